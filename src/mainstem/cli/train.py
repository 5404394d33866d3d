"""`mainstem train [RUN]`: start a run; the same line typed again resumes it."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from mainstem import counts
from mainstem.cli.parts.arguments import Flat, Positional, TextOptions, parse
from mainstem.cli.parts.flags import spelled
from mainstem.cli.parts.screen import Bar, Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import ConfigError, Interrupted
from mainstem.formats.run import ModelFolder, resolve
from mainstem.runs.folder import RunFolder
from mainstem.runs.summary import peak_memory, summary
from mainstem.text import tokens
from mainstem.text.tokenizer import Tokenizer
from mainstem.training import start
from mainstem.training.start import DEFAULT_PRESET, Request


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

    @property
    def request(self) -> Request:
        """What decides the run."""
        return Request(**{each.name: getattr(self, each.name) for each in dataclasses.fields(Request)})


def main(argv: Sequence[str]) -> None:
    """Parse, train, print."""
    command, source = resumable(argv)
    screen = Screen(command.json)
    with stoppable() as check:
        result = run(command, source, screen, check)
    if not command.dry_run:
        _farewell(result, screen)
    screen.result(result)


def resumable(argv: Sequence[str]) -> tuple[Train, ModelFolder | None]:
    """The command that argv spells over the preset, or over the run that it names if that was started before.

    Returns with it the RUN that a new run starts from, if there is one.
    """
    named, init_from = _typed(argv, "--preset"), _typed(argv, "--init-from")
    place = argv[0] if argv and not argv[0].startswith("-") else _typed(argv, "--out")
    source: ModelFolder | None = None
    while True:  # a RUN that stands behind the flags is known after the first parse alone
        folder = RunFolder(place or f"runs/{named or DEFAULT_PRESET}")
        if init_from is not None and source is None and not folder.exists():
            source = resolve(init_from)
        request = start.default_request(folder, named, source)
        if _typed(argv, "--model.dropout") is not None:
            request = request.with_dropout_everywhere()
        default = Train(**{each.name: getattr(request, each.name) for each in dataclasses.fields(Request)})
        command = parse(Train, "train", argv, default)
        if place == (actual := command.run or command.out):
            break
        place = actual
    if command.tokens:
        also = () if _typed(argv, "--steps") is None else ("steps",)
        steps = start.steps_for(command.tokens, command.train, command.model, also)
        command = dataclasses.replace(command, train=steps)
    if command.folder.exists():
        start.require_same(command.folder, command.request, command.extend)
    return command, source


def _typed(argv: Sequence[str], flag: str) -> str | None:
    typed = None
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            typed = value if equals else argv[i + 1] if i + 1 < len(argv) else typed
    return typed  # the last one counts, as for every flag


def run(command: Train, source: ModelFolder | None, screen: Screen, check: Callable[[], None]) -> dict[str, Any]:
    """Prepare the data, train to the end, and return what --json shows."""
    if source is not None:
        start.require_start(command.request, source)
    if command.dry_run and not command.folder.exists():
        with tempfile.TemporaryDirectory(prefix="mainstem-") as elsewhere:
            return _run(command, RunFolder(elsewhere), source, screen, check)
    with command.folder.locked() as folder:
        return _run(command, folder, source, screen, check)


def _run(
    command: Train, folder: RunFolder, source: ModelFolder | None, screen: Screen, check: Callable[[], None]
) -> dict[str, Any]:
    request, notes = command.request, list[str]()

    def note(text: str) -> None:
        notes.append(spelled(text))
        screen.note(text)

    with contextlib.ExitStack() as stack:

        @functools.cache  # text that is prepared already needs no bar
        def bar() -> Bar:
            return stack.enter_context(screen.bar("reading", 1))

        def reading(done: int, total: int) -> None:
            bar().at(done, total=total)

        data = start.prepared(request, folder, source, notice=note, progress=reading, should_stop=check)
    for text in start.notices(request, folder, data):
        note(text)
    model = start.model_config(request, data)
    _headline(command, model, data, screen)
    if command.dry_run:
        return _dry_run(command, model, screen)
    from mainstem.cli.parts.progress import watch  # torch is loaded once the line and the text are known to be valid
    from mainstem.training.keeper import Keeper
    from mainstem.training.loop import Training

    training = Training(model, command.train, data, _sample, check)
    keeper = Keeper(folder, training, {"asked": request.to_dict()}, source, command.extend)
    try:
        watch(keeper.events(), command.train.steps, screen, note)
    except Interrupted as stopped:
        where = folder.named("last")
        saved_at = f"saved as {where}" if where else "before the first step"
        raise Interrupted(f"{stopped}; {saved_at}; the same line resumes it", stopped.exit_code - 128) from None
    return {**summary(folder), "peak_memory_bytes": peak_memory(), "notes": notes}


def _headline(command: Train, model: ModelConfig, data: tokens.Prepared, screen: Screen) -> None:
    total = counts.parameters(model).total
    screen.say(
        f"{command.preset or command.folder.path}: {model.n_layer} blocks, {model.d_model} wide, "
        f"residual {model.residual}; {total:,} parameters"
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


def _farewell(result: dict[str, Any], screen: Screen) -> None:
    if result["val_bits_per_byte"] is not None:
        screen.say(f"held-out {result['val_bits_per_byte']:.4f} bits per byte after {result['steps']:,} steps")
    screen.say(f"{result['train_seconds']:,.0f} s of training")
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
