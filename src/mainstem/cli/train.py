"""`mainstem train [RUN]`: start a run; the same line typed again resumes it."""

import dataclasses
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from mainstem import counts
from mainstem.cli.parts.arguments import Flat, Positional, TextOptions, parse
from mainstem.cli.parts.dataset import given_tokenizer, prepare
from mainstem.cli.parts.flags import spelled
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.config import AUTO, DROPOUTS, ModelConfig, TrainConfig
from mainstem.errors import ConfigError, DataError, Interrupted, RunError
from mainstem.formats import run as runs
from mainstem.formats import vocabulary
from mainstem.presets import preset
from mainstem.runs.folder import RunFolder, read_rows, refuse_changes
from mainstem.text import tokens
from mainstem.text.corpus import BUNDLED, STDIN
from mainstem.text.tokenizer import Tokenizer

DEFAULT_PRESET = "tiny"


@dataclass(frozen=True)
class Train:
    """Train a GPT from scratch. The same line typed again resumes where it stopped."""

    run: Positional[str | None] = None
    """The run folder; by default runs/PRESET."""
    preset: str = DEFAULT_PRESET
    """A preset, such as tiny, mini or gpt2 (README lists them); every flag below overrides it."""
    data: Annotated[tuple[str, ...], arg(metavar="FILE ...")] = ()
    """Text files, a folder that `mainstem data` made, a bundled corpus (shakespeare, constitution-ko), or - ."""
    val: Annotated[tuple[str, ...], arg(metavar="FILE ...")] = ()
    """Text of the validation split; by default the last tenth of the data."""
    tokenizer: str = "bpe"
    """bpe, char or byte, trained on the data; or a tokenizer.json, or a folder that holds one."""
    tokens: int = 0
    """Train on this many tokens instead of a number of --steps."""
    init_from: str | None = None
    """A RUN whose weights, model config and tokenizer a new run starts from."""
    out: str | None = None
    """The run folder, as a flag."""
    extend: bool = False
    """Train a run further than the --steps it was started with."""
    dry_run: bool = False
    """Show the parameters and their optimizers, and train nothing."""
    json: bool = False
    """One object on stdout at the end."""
    reading: Flat[TextOptions] = TextOptions()
    train: Flat[TrainConfig] = TrainConfig()
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def folder(self) -> RunFolder:
        """Where the run lives."""
        if self.run and self.out and Path(self.run) != Path(self.out):
            raise ConfigError(f"--out: {self.out!r} and RUN {self.run!r} are two folders; give one of them")
        if "" in (self.run, self.out):
            raise ConfigError("the run folder's name is empty; give one, or leave it out for runs/PRESET")
        return RunFolder(self.run or self.out or f"runs/{self.preset}")

    def asked(self) -> dict[str, Any]:
        """What decides the run, as run.json keeps it and a resumed line is compared with."""
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


def main(argv: Sequence[str]) -> None:
    """Parse, train, print."""
    command = resumable(argv)
    screen = Screen(command.json)
    with stoppable() as check:
        result = run(command, screen, check)
    if not command.dry_run:
        _farewell(result, screen)
    screen.result(result)


def resumable(argv: Sequence[str]) -> Train:
    """The command that argv spells over the preset, or over the run that it names if that was started before."""
    named = _typed(argv, "--preset")
    place = argv[0] if argv and not argv[0].startswith("-") else _typed(argv, "--out")
    while True:  # a RUN that stands behind the flags is known after the first parse alone
        default = _default(RunFolder(place or f"runs/{named or DEFAULT_PRESET}"), named, _typed(argv, "--init-from"))
        if _typed(argv, "--model.dropout") is not None:  # it is the five's, whatever they were before
            default = dataclasses.replace(default, model=default.model.replace(**dict.fromkeys(DROPOUTS, AUTO)))
        command = parse(Train, "train", argv, default)
        if place == (actual := command.run or command.out):
            break
        place = actual
    if command.tokens < 0 or (command.tokens and _typed(argv, "--steps")):
        raise ConfigError(f"tokens: {command.tokens} is not possible; give at least 1, and no --steps beside it")
    if command.tokens:
        per_step = command.train.batch_size * command.model.n_ctx
        steps = max(1, math.ceil(command.tokens / per_step))
        command = dataclasses.replace(command, train=command.train.replace(steps=steps))
    if command.folder.exists():
        saved = _flat(default.asked())
        if _is_prepared(command.data):  # wherever it stands now: its hashes decide
            del saved["data"]
        refuse_changes(command.folder.path, saved, _flat(command.asked()), command.extend)
    return command


def _typed(argv: Sequence[str], flag: str) -> str | None:
    typed = None
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            typed = value if equals else argv[i + 1] if i + 1 < len(argv) else typed
    return typed  # the last one counts, as for every flag


def _default(folder: RunFolder, named: str | None, init_from: str | None) -> Train:
    """Preset < model of init_from < saved config; what is typed comes on top."""
    if folder.exists():
        if "asked" not in (settings := folder.settings()):
            raise RunError(f"{folder.path}: made by the library, not by this command; resume it with mainstem.Training")
        asked = dict(settings["asked"])
        for name, kind in (("train", TrainConfig), ("model", ModelConfig)):
            asked[name] = kind.from_dict(asked[name])
        asked["reading"] = TextOptions(**asked["reading"])
        return Train(**asked | {"data": tuple(asked["data"]), "val": tuple(asked["val"])})
    start = preset(named or DEFAULT_PRESET)
    made = Train(preset=start.name, data=(start.data,), train=start.train, model=start.model)
    if init_from is None:
        return made
    source = runs.resolve(init_from)
    tokenizer = init_from if source.has_tokenizer else made.tokenizer
    return dataclasses.replace(made, model=source.config, tokenizer=tokenizer)


def _is_prepared(data: Sequence[str]) -> bool:
    return len(data) == 1 and (Path(data[0]) / tokens.PASSPORT).is_file()


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    nested = {f"model.{key}": item for key, item in value["model"].items()}
    return {k: v for k, v in value.items() if k not in ("model", "train", "reading")} | (
        value["train"] | value["reading"] | nested
    )


def run(command: Train, screen: Screen, check: Callable[[], None]) -> dict[str, Any]:
    """Prepare the data, train to the end, and return what --json shows."""
    if command.init_from is not None and not command.folder.exists():
        _require_start(command, command.init_from)
    if command.dry_run and not command.folder.exists():
        with tempfile.TemporaryDirectory(prefix="mainstem-") as elsewhere:
            return _run(command, RunFolder(elsewhere), screen, check)
    with command.folder.locked() as folder:
        return _run(command, folder, screen, check)


_FREE = ("vocab_size", "norm_eps", "rope_base", "attn_scale", "init")
"""Fields, besides dropouts, that may differ from those of the model whose weights a run starts from."""


def _require_start(command: Train, source: str) -> None:
    """UserError, before anything is written, for a start that a run of this config and tokenizer cannot have."""
    start = runs.resolve(source)
    there, here = (config.resolved().to_dict() for config in (start.config, command.model))
    for name, value in there.items():
        if here[name] != value and name not in _FREE and not name.endswith("dropout"):
            flag = ("no-" if here[name] is False else "") + name.replace("_", "-")
            raise ConfigError(f"--init-from {source}: {name} {value}, not {here[name]}; leave out --model.{flag}")
    if start.weights != "fp32":
        weights = f"its weights are {start.weights}, which cannot be trained; start from fp32 ones"
        raise RunError(f"--init-from {source}: {weights}")
    given = given_tokenizer(command.tokenizer)
    if not start.has_tokenizer:
        if given is None:
            raise DataError(f"--init-from {source}: it has no tokenizer; put one inside, or give --tokenizer")
        vocabulary.check(start.config.vocab_size, given, f"--init-from {source}")
        return
    its = runs.tokenizer(source)
    if its.hash != given.hash if given is not None else not its.kind == command.tokenizer == "byte":
        raise DataError(f"--init-from {source}: its ids are of its own tokenizer; leave out --tokenizer")


def _run(command: Train, folder: RunFolder, screen: Screen, check: Callable[[], None]) -> dict[str, Any]:
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(spelled(text))
        screen.note(text)

    if command.extend and folder.exists():
        saved = folder.settings()["train"]["steps"]
        if saved != command.train.steps:
            note(f"steps {saved:,} -> {command.train.steps:,}; the schedule is that of {command.train.steps:,} steps")
    data = prepared(command, folder, screen, check)
    for text in data.notes():
        note(text)
    size = data.tokenizer.vocab_size
    if size != command.model.vocab_size:
        note(f"vocabulary {size:,}, the tokenizer's, instead of {command.model.vocab_size:,}")
    model = command.model.replace(vocab_size=size).resolved()
    _headline(command, model, data, screen)
    if command.dry_run:
        return _dry_run(command, model, screen)
    from mainstem.cli.parts.progress import (
        watch,  # torch is loaded here, once the line and the text are known to be sound
    )
    from mainstem.training.loop import Training

    training = Training(
        folder, model, command.train, data,
        settings={"asked": command.asked()}, init_from=command.init_from, extend=command.extend, sample=_sample,
        should_stop=check,
    )  # fmt: skip
    try:
        watch(training.events(), command.train.steps, screen, note)
    except Interrupted as stopped:
        where = folder.named("last")
        saved_at = f"saved as {where}" if where else "before the first step"
        raise Interrupted(f"{stopped}; {saved_at}; the same line resumes it", stopped.exit_code - 128) from None
    return summary(folder, notes)


def prepared(command: Train, folder: RunFolder, screen: Screen, check: Callable[[], None]) -> tokens.Prepared:
    """The token files that the command means: a prepared folder, or the run's own, made from text if need be."""
    if _is_prepared(command.data):
        data = tokens.load(Path(command.data[0]), verify=True)
        if folder.exists():  # whose hashes decide
            return data
        given = given_tokenizer(command.tokenizer)
        another_kind = given is None and command.tokenizer not in (Train.tokenizer, data.tokenizer.kind)
        if another_kind or (given is not None and given.hash != data.tokenizer.hash):
            fix = "leave that out"
            if command.tokenizer == command.init_from:
                fix = f"prepare the text again, with --tokenizer {command.tokenizer}"
            raise DataError(f"{command.data[0]}: made by another tokenizer than that of {command.tokenizer}; {fix}")
        if command.val or command.reading != TextOptions():
            raise DataError(f"{command.data[0]}: prepared already; give --val and how to read to `mainstem data`")
        return data
    if folder.exists() and folder.data.is_dir():
        data, names = tokens.load(folder.data, verify=True), command.data + command.val
        if gone := [name for name in names if name not in (*BUNDLED, STDIN) and not Path(name).exists()]:
            screen.note(f"{', '.join(gone)}: no longer there; the run goes on with the tokens that it made of it")
        elif _fingerprints(command) != [data.passport["sources"], *_sources(data.passport["validation"])]:
            changed = f"{', '.join(names)}: changed since {folder.path} was started"
            raise DataError(f"{changed}; choose another folder for it")
        return data
    return prepare(
        command.data,
        command.val,
        folder.data,
        reading=command.reading,
        tokenizer=command.tokenizer,
        vocab_size=command.model.vocab_size,
        screen=screen,
        check=check,
    )


def _fingerprints(command: Train) -> list[Any]:
    """What the texts to train on, and to validate on if there are any, are now."""
    return [command.reading.source(files).fingerprints() for files in (command.data, command.val) if files]


def _sources(validation: dict[str, Any] | None) -> list[Any]:
    return [] if validation is None else [validation["sources"]]


def _headline(command: Train, model: ModelConfig, data: tokens.Prepared, screen: Screen) -> None:
    total = counts.parameters(model).total
    screen.say(
        f"{command.preset}: {model.n_layer} blocks, {model.d_model} wide, residual {model.residual}; "
        f"{total:,} parameters"
    )
    met = data.passport["counts"]
    names = ", ".join(Path(str(row["name"])).name for row in data.passport["sources"])
    screen.say(
        f"{names}: {met['documents']:,} documents, {met['bytes'] / 1e6:.2f} MB, {met['tokens']:,} tokens "
        f"({data.tokenizer.kind} of {data.tokenizer.vocab_size:,})"
    )


def _sample(model: Any, tokenizer: Tokenizer) -> str:
    from mainstem.generation.decoding import generate

    start = "" if tokenizer.eot_id is not None else tokenizer.decode([0])
    return generate(model, tokenizer, start, max_new_tokens=64, seed=1)


def summary(folder: RunFolder, notes: list[str]) -> dict[str, Any]:
    """The end of a run, from its own files."""
    rows = read_rows(folder.metrics)
    steps = [row for row in rows if row.get("kind") == "train"]
    evaluations = [row for row in rows if row.get("kind") == "eval"]
    last = evaluations[-1] if evaluations else {}
    best = min((row for row in evaluations if row["loss"] is not None), key=lambda row: row["loss"], default={})
    return {
        "run": str(folder.path),
        "steps": steps[-1]["step"] if steps else 0,
        "parameters": counts.parameters(ModelConfig.from_dict(folder.settings()["model"])).total,
        "tokens": sum(row["tokens"] for row in steps),
        "train_seconds": sum(row["seconds"] for row in steps),
        "train_loss": steps[-1]["loss"] if steps else None,
        "val_loss": last.get("loss"),
        "val_bits_per_byte": last.get("bits_per_byte"),
        "best_step": best.get("step"),
        "best_val_bits_per_byte": best.get("bits_per_byte"),
        "peak_memory_bytes": peak_memory(),
        "notes": notes,
    }


def peak_memory() -> int | None:
    """The most memory that this process ever held, in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _farewell(result: dict[str, Any], screen: Screen) -> None:
    if result["val_bits_per_byte"] is not None:
        screen.say(f"held-out {result['val_bits_per_byte']:.4f} bits per byte after {result['steps']:,} steps")
    screen.say(f"{result['train_seconds']:,.0f} s of training")
    if result["peak_memory_bytes"] is not None:
        screen.say(f"at most {result['peak_memory_bytes'] / 1e9:.2f} GB of memory in this process")
    screen.say(f"run folder  {result['run']}")
    screen.say(f'next        mainstem generate {result["run"]} "your prompt"')


def _dry_run(command: Train, model: ModelConfig, screen: Screen) -> dict[str, Any]:
    """The optimizer's groups: every parameter once."""
    from mainstem.model.gpt import GPT
    from mainstem.training.optim import Optimizer

    built = GPT(model, seed=command.train.seed)
    sizes = {name: parameter.numel() for name, parameter in built.named_parameters()}
    found = Optimizer(built, command.train, fused=False).groups()
    groups = [
        {"optimizer": optimizer, "weight_decay": decay, "parameters": sum(sizes[n] for n in names), "names": names}
        for optimizer, decay, names in found
    ]
    rows = [[kind, decay, len(names), sum(sizes[n] for n in names), names[0]] for kind, decay, names in found]
    screen.table(["optimizer", "decay", "tensors", "parameters", "first"], rows)
    train = command.train
    return {"groups": groups, **counts.summary(model, train.windows_at_once, train.optimizer, train.recompute)}
