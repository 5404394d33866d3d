"""What a run is asked to be: its request, what it may start from, and which tokens it trains on. No torch."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mainstem.config import AUTO, DROPOUTS, ModelConfig, TrainConfig
from mainstem.errors import ConfigError, DataError, RunError
from mainstem.formats import vocabulary
from mainstem.formats.run import ModelFolder
from mainstem.formats.run import tokenizer as open_tokenizer
from mainstem.presets import preset
from mainstem.runs.folder import RunFolder, refuse_changes
from mainstem.text import tokenizer as tokenizers
from mainstem.text import tokens
from mainstem.text.corpus import BUNDLED, STDIN, TextOptions
from mainstem.text.tokenizer import Tokenizer

DEFAULT_PRESET, DEFAULT_TOKENIZER = "tiny", "bpe"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What decides a run, as `run.json` keeps it under `asked`; a resumed run is compared with it."""

    preset: str = ""
    """The preset's name; empty for a config of one's own."""
    data: tuple[str, ...] = ()
    """Text files, a prepared folder, a bundled corpus' name, or - for standard input."""
    val: tuple[str, ...] = ()
    """Text files to validate on; the last tenth of the data if there are none."""
    tokenizer: str = DEFAULT_TOKENIZER
    """bpe, char or byte, trained on the data; or whatever `mainstem.formats.run.tokenizer` opens."""
    init_from: str | None = None
    """A RUN whose weights, config and tokenizer a new run starts from."""
    reading: TextOptions = field(default_factory=TextOptions)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "preset": self.preset,
            "data": list(self.data),
            "val": list(self.val),
            "tokenizer": self.tokenizer,
            "init_from": self.init_from,
            "reading": vars(self.reading),
            "train": self.train.to_dict(),
            "model": self.model.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Request":
        """The request that `to_dict` returned."""
        parts = {
            "data": tuple(values["data"]),
            "val": tuple(values["val"]),
            "reading": TextOptions(**values["reading"]),
            "train": TrainConfig.from_dict(values["train"]),
            "model": ModelConfig.from_dict(values["model"]),
        }
        return cls(**values | parts)

    @property
    def prepared(self) -> bool:
        """Whether the data are a prepared folder."""
        return len(self.data) == 1 and (Path(self.data[0]) / tokens.PASSPORT).is_file()

    def with_dropout_everywhere(self) -> "Request":
        """The request with the five dropouts following `dropout` again, whatever they were set to."""
        return dataclasses.replace(self, model=self.model.replace(**dict.fromkeys(DROPOUTS, AUTO)))


def default_request(run: RunFolder | None, name: str | None, source: ModelFolder | None = None) -> Request:
    """The values of what is not asked for: those of the run if it was started, else the preset's.

    Args:
        run: the run folder, if there is one.
        name: the preset's name; None for the default one.
        source: the RUN that a new run starts from; its model's config and tokenizer come before the preset's.
    """
    if run is not None and run.exists():
        settings = run.settings()
        if "asked" in settings:
            return Request.from_dict(settings["asked"])
        own = (str(run.data),) if (run.data / tokens.PASSPORT).is_file() else ()
        train, model = TrainConfig.from_dict(settings["train"]), ModelConfig.from_dict(settings["model"])
        return Request(data=own, train=train, model=model)  # begun with a Keeper: any data whose hashes are the run's
    start = preset(name or DEFAULT_PRESET)
    request = Request(preset=start.name, data=(start.data,), train=start.train, model=start.model)
    if source is None:
        return request
    tokenizer = source.name if source.has_tokenizer else request.tokenizer
    return dataclasses.replace(request, model=source.config, tokenizer=tokenizer, init_from=source.name)


def require_same(run: RunFolder, request: Request, extend: bool) -> None:
    """Refuse a request that differs from the one that the run was started with. Raises RunError with both values.

    A prepared folder may stand elsewhere now: its hashes are compared when the run is opened. `extend` lets `steps`
    differ.
    """
    asked = run.settings().get("asked")
    if asked is None:  # a Keeper compares the configs
        return
    saved = _flat(asked)
    if request.prepared:
        del saved["data"]
    refuse_changes(run.path, saved, _flat(request.to_dict()), extend)


def _flat(asked: dict[str, Any]) -> dict[str, Any]:
    model = {f"model.{name}": value for name, value in asked["model"].items()}
    rest = {name: value for name, value in asked.items() if name not in ("model", "train", "reading")}
    return rest | asked["train"] | asked["reading"] | model


_FREE = ("vocab_size", "norm_eps", "rope_base", "attn_scale", "init")
"""Fields, besides dropouts, that may differ from those of the model whose weights a run starts from."""


def require_start(request: Request, source: ModelFolder) -> None:
    """Refuse, before anything is written, a start that a run of this config and tokenizer cannot have.

    Raises ConfigError for another shape, RunError for quantized weights, DataError for another tokenizer.
    """
    have, asked = (config.resolved().to_dict() for config in (source.config, request.model))
    for name, value in have.items():
        if asked[name] != value and name not in _FREE and not name.endswith("dropout"):
            raise ConfigError(f"init_from: {source.name} has {name} {value}, not {asked[name]}; leave out `{name}`")
    if source.weights != "fp32":
        raise RunError(
            f"{source.name}: its weights are {source.weights}, which cannot be trained; give fp32 ones as `init_from`"
        )
    given = named_tokenizer(request.tokenizer, source)
    if not source.has_tokenizer:
        if given is None:
            raise DataError(f"{source.name}: it has no tokenizer; put one inside, or give `tokenizer`")
        vocabulary.check(source.config.vocab_size, given, source.name)
        return
    own = source.tokenizer
    assert own is not None
    if given.hash != own.hash if given is not None else not own.kind == request.tokenizer == "byte":
        raise DataError(f"{source.name}: its ids are of its own tokenizer; leave out `tokenizer`")


def named_tokenizer(name: str, source: ModelFolder | None = None) -> Tokenizer | None:
    """The tokenizer of that name, of `source` if it is named; None for a kind that is to be trained."""
    if source is not None and name == source.name:
        return source.tokenizer
    return None if name in tokenizers.KINDS else open_tokenizer(name)


def prepared(
    request: Request,
    run: RunFolder,
    source: ModelFolder | None = None,
    *,
    notice: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], None] = lambda: None,
) -> tokens.Prepared:
    """The token files that a request means: a prepared folder, or the run's own, made from text if need be.

    Args:
        request: what was asked for.
        run: the run folder; new token files are written to its `data`.
        source: what a new run starts from.
        notice: called with a sentence for what a person should know.
        progress: called with the bytes that are encoded, and all bytes.
        should_stop: called between batches; it may raise, and then nothing is written.

    Raises DataError for data that were made with another tokenizer or have changed since the run was started.
    """
    if request.prepared:
        data = tokens.load(Path(request.data[0]), verify=True)
        if not run.exists():  # whose hashes decide
            _require_own_tokenizer(request, data, source)
        return data
    names = request.data + request.val
    if run.exists() and run.data.is_dir():
        data = tokens.load(run.data, verify=True)
        if gone := [name for name in names if name not in (*BUNDLED, STDIN) and not Path(name).exists()]:
            notice(f"{', '.join(gone)}: no longer there; the run goes on with the tokens that were made from it")
        elif _fingerprints(request) != [data.passport["sources"], *_sources(data.passport["validation"])]:
            changed = f"{', '.join(names)}: changed since {run.path} was started"
            raise DataError(f"{changed}; choose another folder for it")
        return data
    if not request.data:
        raise DataError(f"{run.path}: its token files are in another folder; give that folder as `data`")
    given = named_tokenizer(request.tokenizer, source)
    return tokens.prepare(
        request.reading.source(request.data),
        run.data,
        tokenizer=given,
        kind=request.tokenizer if given is None else DEFAULT_TOKENIZER,
        vocab_size=request.model.vocab_size if request.tokenizer == DEFAULT_TOKENIZER else None,
        val=request.reading.source(request.val) if request.val else None,
        should_stop=should_stop,
        progress=progress,
    )


def _require_own_tokenizer(request: Request, data: tokens.Prepared, source: ModelFolder | None) -> None:
    """Refuse a prepared folder of another tokenizer than the one asked for, or with options for reading text."""
    given, folder = named_tokenizer(request.tokenizer, source), request.data[0]
    another_kind = given is None and request.tokenizer not in (DEFAULT_TOKENIZER, data.tokenizer.kind)
    if another_kind or (given is not None and given.hash != data.tokenizer.hash):
        fix = "leave that out"
        if request.tokenizer == request.init_from:
            fix = f"prepare the text again, with `tokenizer` {request.tokenizer}"
        raise DataError(f"{folder}: made by another tokenizer than that of {request.tokenizer}; {fix}")
    if request.val or request.reading != TextOptions():
        raise DataError(f"{folder}: prepared already; give `val` and how to read to `mainstem data`")


def _fingerprints(request: Request) -> list[Any]:
    """What the texts to train on, and to validate on if there are any, are now."""
    return [request.reading.source(files).fingerprints() for files in (request.data, request.val) if files]


def _sources(validation: dict[str, Any] | None) -> list[Any]:
    return [] if validation is None else [validation["sources"]]


def model_config(request: Request, data: tokens.Prepared) -> ModelConfig:
    """The config of the model that is trained: resolved, its vocabulary the tokenizer's."""
    return request.model.replace(vocab_size=data.tokenizer.vocab_size).resolved()


def notices(request: Request, run: RunFolder, data: tokens.Prepared) -> list[str]:
    """What a person should know before the first step, a sentence each."""
    texts = data.notes()
    if run.exists() and (saved := run.settings()["train"]["steps"]) != request.train.steps:
        steps = request.train.steps
        texts.insert(0, f"steps {saved:,} -> {steps:,}; the schedule is that of {steps:,} steps")
    size = data.tokenizer.vocab_size
    if size != request.model.vocab_size:
        texts.append(f"vocabulary {size:,}, the tokenizer's, instead of {request.model.vocab_size:,}")
    return texts


def steps_for(tokens: int, train: TrainConfig, model: ModelConfig, also: Sequence[str] = ()) -> TrainConfig:
    """The config with the steps that read so many tokens, rounded up. Raises ConfigError below 1, or beside `steps`."""
    if tokens < 1 or "steps" in also:
        raise ConfigError(f"tokens: {tokens} is not possible; give at least 1, and no `steps` beside it")
    per_step = train.batch_size * model.n_ctx
    return train.replace(steps=max(1, -(-tokens // per_step)))
