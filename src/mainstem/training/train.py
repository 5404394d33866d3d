"""`train`: the library's front door to training, in memory or in a run folder."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import ConfigError, nearest
from mainstem.formats.load import load
from mainstem.formats.run import resolve
from mainstem.model.gpt import GPT
from mainstem.presets import Preset
from mainstem.runs.folder import RunFolder, read_rows
from mainstem.runs.summary import summarize
from mainstem.text.corpus import TextOptions
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tokens import Prepared
from mainstem.training import start
from mainstem.training.events import CheckpointDue, Evaluated, Event, Notice, Step
from mainstem.training.keeper import Keeper
from mainstem.training.loop import Training

_FIELDS = {
    "train": TrainConfig.field_names(),
    "model": ModelConfig.field_names(),
    "reading": tuple(field.name for field in dataclasses.fields(TextOptions)),
}


@dataclass(frozen=True, repr=False)
class TrainResult:
    """A trained model, its tokenizer and what the run came to."""

    model: GPT
    """The model after the last step, in evaluation mode, on the device that it was trained on."""
    tokenizer: Tokenizer
    summary: dict[str, Any]
    """steps, parameters, tokens, train_seconds, train_loss, val_loss, val_bits_per_byte, best_step, ..."""
    run: Path | None
    """The run folder; None for training in memory."""

    def __repr__(self) -> str:
        bits = self.summary["val_bits_per_byte"]
        held_out = "" if bits is None else f", held-out {bits:.4f} bits per byte"
        where = "in memory" if self.run is None else f"in {self.run}"
        numbers = f"{self.summary['steps']:,} steps, {self.summary['parameters']:,} parameters"
        return f"TrainResult({numbers}{held_out}, {where})"


def train(
    model: str | Preset | ModelConfig | None = None,
    data: str | Path | Prepared | Sequence[str | Path] | None = None,
    *,
    run: Path | str | None = None,
    val: str | Path | Sequence[str | Path] | None = None,
    tokenizer: str | Path | None = None,
    init_from: Path | str | None = None,
    tokens: int | None = None,
    extend: bool = False,
    progress: Callable[[Event], None] = lambda event: None,
    sample: Callable[[GPT, Tokenizer], str] | None = None,
    should_stop: Callable[[], None] = lambda: None,
    **changes: Any,
) -> TrainResult:
    """Train a GPT on text; the defaults are those of `mainstem train`.

        result = ms.train("tiny", "shakespeare", steps=100)             # in memory
        result = ms.train("tiny", "my.txt", run="runs/mine", lr=1e-3)   # the same call resumes it
        text = ms.generate(result.model, result.tokenizer, "ROMEO:")

    Args:
        model: a preset or its name (`ms.PRESETS`), or a config; `tiny` by default.
        data: text files, a prepared folder, or a bundled corpus (`shakespeare`, `constitution-ko`); by default the
            preset's.
        run: the run folder to write or to resume; None trains in memory and writes nothing.
        val: text files to validate on; by default the last tenth of the data.
        tokenizer: `bpe` (the default), `char` or `byte`, trained on the data; or a file or folder that has one.
        init_from: a RUN whose weights, config and tokenizer a new run starts from.
        tokens: train on this many tokens instead of a number of `steps`.
        extend: whether `steps` may differ from what the run was started with.
        progress: called with each event of `mainstem.training.events`.
        sample: called with model and tokenizer every `sample_every` steps; returns the text of a Sampled event.
        should_stop: called often; it may raise Interrupted, after which the run is saved.
        changes: fields of `ms.TrainConfig` (`steps=`, `lr=`, ...) and of `ms.ModelConfig` (`n_layer=`, ...), and how
            text is read (`encoding=`, `newlines=`, `separator=`, `text_field=`).

    Raises ConfigError for an unknown or impossible field, DataError for data that cannot be used, RunError for a run
    that cannot be resumed, and TrainingFailed where numbers are not finite.
    """
    folder = None if run is None else RunFolder(run)
    fresh = folder is None or not folder.exists()
    source = resolve(init_from) if init_from is not None and fresh else None
    if isinstance(model, Preset):
        model = model.name
    if not isinstance(model, str | ModelConfig | None):
        raise ConfigError(f"model: {type(model).__name__} cannot be trained; give a preset's name or a ModelConfig")
    if isinstance(model, ModelConfig) and data is None and fresh:
        raise ConfigError("data: a ModelConfig has no text of its own; give text files, or a bundled corpus' name")
    named = model if isinstance(model, str) else None
    request = start.default_request(folder, named, source)
    asked: dict[str, Any] = {
        "data": _names(data), "val": _names(val), "init_from": None if init_from is None else str(init_from),
        "preset": named, "tokenizer": None if tokenizer is None else str(tokenizer),
    }  # fmt: skip
    if isinstance(model, ModelConfig):
        own: dict[str, Any] = {"train": TrainConfig(), "data": ()} if fresh else {}
        request = dataclasses.replace(request, preset="" if fresh else request.preset, model=model, **own)
    request = dataclasses.replace(request, **{name: value for name, value in asked.items() if value is not None})
    request = _changed(request, changes)
    if tokens is not None:
        request = dataclasses.replace(request, train=start.steps_for(tokens, request.train, request.model, [*changes]))
    with ExitStack() as stack:
        where = folder
        if where is None:  # token files of a text have to be on a disk while it is trained on
            elsewhere = tempfile.TemporaryDirectory(prefix="mainstem-", ignore_cleanup_errors=True)
            where = RunFolder(stack.enter_context(elsewhere))
        if folder is not None and not fresh:
            start.require_same(folder, request, extend)
        if source is not None:
            start.require_start(request, source)
        if folder is not None:
            stack.enter_context(folder.locked())

        def notice(text: str) -> None:
            progress(Notice(text))

        prepared = start.prepared(request, where, source, notice=notice, should_stop=should_stop)
        for text in start.notices(request, where, prepared):
            notice(text)
        training = Training(start.model_config(request, prepared), request.train, prepared, sample, should_stop)
        if folder is not None:
            settings = {"asked": request.to_dict()}
            for event in Keeper(folder, training, settings, source, extend).events():
                progress(event)
            rows = read_rows(folder.metrics)
        else:
            if source is not None:
                training.begin_with(*load(source, notice), source.name)
            rows = []
            for event in training.events():
                if isinstance(event, Step | Evaluated):
                    rows.append(event.row())
                if not isinstance(event, CheckpointDue):
                    progress(event)
    result = summarize(rows, training.model_config)
    return TrainResult(training.model.eval(), prepared.tokenizer, result, None if folder is None else folder.path)


def _names(files: str | Path | Prepared | Sequence[str | Path] | None) -> tuple[str, ...] | None:
    if files is None:
        return None
    if isinstance(files, Prepared):
        return (str(files.path),)
    return tuple(map(str, [files] if isinstance(files, str | Path) else files))


def _changed(request: start.Request, changes: dict[str, Any]) -> start.Request:
    """The request with these fields. Raises ConfigError on an unknown one, with the nearest valid name."""
    if "dropout" in changes:
        request = request.with_dropout_everywhere()
    parts: dict[str, Any] = {}
    for part, fields in _FIELDS.items():
        values = {name: value for name, value in changes.items() if name in fields}
        parts[part] = dataclasses.replace(getattr(request, part), **values)
    for name in changes:
        if not any(name in fields for fields in _FIELDS.values()):
            valid = [field for fields in _FIELDS.values() for field in fields]
            raise ConfigError(f"{name}: no field of a run; {nearest(name, valid)}")
    return dataclasses.replace(request, **parts)
