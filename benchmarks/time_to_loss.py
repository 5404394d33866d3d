"""How much sooner a preset of ours reaches the loss at which the reference recipe ends, on the same characters.

Two clocks run over training alone: batches, gradients and updates; not over building and scoring. The sides take turns,
so that a machine whose speed drifts disturbs both alike. Both are scored after every SEGMENT steps on the whole
validation text, in windows that do not overlap, and a side has reached a loss at its first score that is not above it.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.memory import taken
from benchmarks.processes import Process, Works, alone
from benchmarks.reference import Recipe, Reference
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import ConfigError, DataError
from mainstem.model.gpt import GPT
from mainstem.model.kernels.gelu_backend import choose_gelu
from mainstem.model.mode import evaluating
from mainstem.presets import Preset, preset
from mainstem.text.corpus import Source
from mainstem.text.tokens import Windows, evaluation_windows
from mainstem.training import allocator
from mainstem.training.device import Device
from mainstem.training.optim import Optimizer
from mainstem.training.step import TrainStep

OURS, REFERENCE = "mainstem", "reference"
BUILDS = {REFERENCE: "benchmarks.time_to_loss:reference", OURS: "benchmarks.time_to_loss:ours"}
PRESET = "swift"
CHOSEN_ON = "tinyshakespeare"
"""The text on which the preset's settings were chosen (docs/log.md); on another its speedup is a fairer one."""
SEGMENT = 25
"""Steps between scores, and of a side's turn."""
AT_ONCE = 128
"""Windows that are scored at once."""


class Data(NamedTuple):
    """A text as the ids of its characters, its last tenth held out."""

    train: np.ndarray
    """(N,) uint16."""
    val: np.ndarray
    vocabulary: int
    context: int
    """Characters that are seen at once."""


def characters(text: str, context: int = Recipe.context) -> Data:
    """One id a character, in code-point order. DataError if the held-out tenth holds no window of `context`."""
    alphabet, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    split = len(ids) - len(ids) // 10
    if len(ids) - split <= context:
        raise DataError(f"{len(text):,} characters; a tenth of them must hold a window of {context}: give more text")
    ids = ids.astype(np.uint16)
    return Data(ids[:split], ids[split:], len(alphabet), context)


class Side(Protocol):
    """What trains: `step(i)` for each i from 0 to `steps` - 1."""

    @property
    def model(self) -> nn.Module:
        """Ids (B, T) -> logits (B, T, V)."""
        ...

    @property
    def steps(self) -> int:
        """How many there are."""
        ...

    def step(self, done: int) -> None:
        """Train once more after `done` steps."""
        ...


class Ours:
    """A preset at work, by the library's own parts."""

    def __init__(self, chosen: Preset, tokens: np.ndarray, vocabulary: int, seed: int):
        self.config = chosen.train.replace(seed=seed)
        self.steps = self.config.steps
        self.model = GPT(chosen.model.replace(vocab_size=vocabulary), seed=seed)
        self.windows = Windows(tokens, chosen.model.n_ctx, seed, vocabulary)
        device = Device.choose("cpu")
        choose_gelu(self.model, device.device, self.config.batch_size * chosen.model.n_ctx)
        self._train_step = TrainStep(self.model, Optimizer(self.model, self.config), self.config, device)

    def step(self, done: int) -> None:
        """One step as the training loop takes it: batch, loss, gradient, clipping, update."""
        x, y = (torch.from_numpy(part) for part in self.windows.batch(done, self.config.batch_size))
        self._train_step.move(done, self._train_step.gradient(x, y).norm)


def validation_loss(model: nn.Module, data: Data) -> float:
    """Nats per character over the held-out tenth, each but the first predicted once."""
    total, count = 0.0, 0
    with evaluating(model), torch.no_grad():
        for x, y in evaluation_windows(data.val, data.context, AT_ONCE):
            logits = model(torch.from_numpy(x))
            total += F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(y).flatten(), reduction="sum").item()
            count += y.size
    return total / count


class Score(NamedTuple):
    """The validation loss after so many steps, which took so many seconds."""

    steps: int
    seconds: float
    loss: float


class Turns:
    """A side at work, turn by turn."""

    def __init__(self, side: Side, data: Data):
        self.side, self.data = side, data
        self.last: Score | None = None

    def turn(self) -> Score:
        """Train for at most SEGMENT steps by the clock, then score."""
        done, seconds = (0, 0.0) if self.last is None else self.last[:2]
        until = min(done + SEGMENT, self.side.steps)
        start = time.perf_counter()
        for step in range(done, until):
            self.side.step(step)
        seconds += time.perf_counter() - start
        self.last = Score(until, seconds, validation_loss(self.side.model, self.data))
        return self.last


def ours(text: str, preset: dict[str, Any], recipe: dict[str, Any], seed: int) -> Works:
    """Our side, of a text file and a preset as plain values: the next `turn`, and the `memory` of training."""
    allocator.keep_freed()  # as the training loop has it
    model, config = ModelConfig.from_dict(preset["model"]), TrainConfig.from_dict(preset["train"])
    data = characters(Path(text).read_text(encoding="utf-8"), model.n_ctx)
    return _works(partial(Ours, Preset("", "", model, config), data.train, data.vocabulary), data, seed)


def reference(text: str, preset: dict[str, Any], recipe: dict[str, Any], seed: int) -> Works:
    """The same works of the reference."""
    settings = Recipe(**recipe)
    data = characters(Path(text).read_text(encoding="utf-8"), settings.context)
    return _works(partial(Reference, settings, data.train, data.vocabulary), data, seed)


def _works(start: Callable[[int], Side], data: Data, seed: int) -> Works:
    start(seed).step(0)  # what only a first step does is on no clock
    return {"turn": Turns(start(seed), data).turn, "memory": lambda: _peak(start)}


@dataclass
class Run:
    """How far a side came, as it was scored on the way."""

    steps: int
    """Of all its training."""
    scores: list[Score] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of its steps."""
        return self.scores[-1].steps / self.steps if self.scores else 0.0

    def reached(self, loss: float) -> Score | None:
        """The first score that is not above a loss."""
        return next((score for score in self.scores if score.loss <= loss), None)


def measure(
    text: str,
    seeds: Sequence[int] = (1, 2, 3),
    *,
    recipe: Recipe | None = None,
    chosen: Preset | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Both sides on a text, seed by seed.

    Args:
        text: its last tenth is what both are scored on.
        seeds: of weights and batches; a race for each.
        recipe: the reference's; as published if None.
        chosen: ours; `swift` if None.
        progress: called with the turns done, their number, and where the race stands.

    Returns plain values, in seconds and bytes: `speedup`, the smallest over the seeds, None if ours missed the target
    with one of them; `seeds`, a row each; `memory_over_reference`, None where nobody counts; `memory`, `torch`,
    `threads`, and both sides' settings.

    Raises DataError for a short text, ConfigError for no seed or a preset whose windows are of another length.
    """
    recipe, chosen = recipe or Recipe(), chosen or preset(PRESET)
    if not seeds:
        raise ConfigError("seeds: none was given; give one at least")
    if chosen.model.n_ctx != recipe.context:
        raise ConfigError(
            f"n_ctx: {chosen.model.n_ctx} is not the reference's {recipe.context}; the tasks would differ"
        )
    characters(text, recipe.context)  # long enough?
    steps = {REFERENCE: recipe.iterations, OURS: chosen.train.steps}
    turns = sum(-(-each // SEGMENT) for each in steps.values())
    settings: dict[str, Any] = {
        "preset": {"model": chosen.model.to_dict(), "train": chosen.train.to_dict()}, "recipe": vars(recipe)
    }  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text, encoding="utf-8", newline="")
        settings["text"] = str(path)
        peaks = {name: alone(build, "memory", ours=name == OURS, seed=1, **settings) for name, build in BUILDS.items()}
        for number, seed in enumerate(seeds):

            def tick(done: int, what: str, before: int = number * turns, seed: int = seed) -> None:
                progress(before + done, turns * len(seeds), f"seed {seed}: {what}")

            with ExitStack() as stack:
                sides = {
                    name: stack.enter_context(Process(build, ours=name == OURS, seed=seed, **settings))
                    for name, build in BUILDS.items()
                }
                rows.append({"seed": seed, **_race(sides, {name: Run(steps[name]) for name in sides}, tick)})
    speedups = [row["speedup"] for row in rows]
    ours, theirs = peaks[OURS], peaks[REFERENCE]
    return {
        "speedup": None if None in speedups else min(speedups),
        "seeds": rows,
        "chosen_on": CHOSEN_ON if chosen.name == PRESET else None,
        "memory_over_reference": ours / theirs if ours and theirs else None,
        "memory": peaks,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": {
            REFERENCE: vars(recipe),
            OURS: {"preset": chosen.name, "model": chosen.model.to_dict(), "train": chosen.train.to_dict()},
        },
    }


def _race(sides: dict[str, Process], runs: dict[str, Run], tick: Callable[[int, str], None]) -> dict[str, Any]:
    """Both to their ends, the turn always that of the side that has done the smaller share; then who was where when."""
    turns = 0
    while runs[name := min(runs, key=lambda name: runs[name].share)].share < 1:
        runs[name].scores.append(Score(*sides[name].value("turn")))
        turns += 1
        last = {side: f"{side} {run.scores[-1].loss:.3f}" for side, run in runs.items() if run.scores}
        tick(turns, ", ".join(last.values()))
    target = runs[REFERENCE].scores[-1].loss
    reached = {name: run.reached(target) for name, run in runs.items()}
    ours, theirs = reached[OURS], reached[REFERENCE]
    assert theirs is not None
    return {
        "target": target,
        "speedup": ours and theirs.seconds / ours.seconds,
        "seconds": {name: score and score.seconds for name, score in reached.items()},
        "steps": {name: score and score.steps for name, score in reached.items()},
        "last": {name: run.scores[-1].loss for name, run in runs.items()},
        "scores": {name: [list(score) for score in run.scores] for name, run in runs.items()},
    }


def _peak(start: Callable[[int], Side]) -> int | None:
    """What training takes at its highest, in bytes: model, optimizer, and three steps."""

    def train() -> list[torch.Tensor]:
        side = start(1)
        for step in range(min(3, side.steps)):
            side.step(step)
        return list(side.model.parameters())

    train()  # loads what training needs
    return taken(train).peak


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """Train the reference, nanoGPT's published recipe for a CPU, and the preset `swift` on the characters of a text, by
    turns, each in a process of its own. The text's last tenth is held out, and both are scored on all of it on the way,
    off the clock. The speedup is the reference's seconds to the loss at which it ends, over ours to the first that is
    not above it."""

    data: str
    """The text: a file, - for standard input, or a bundled text."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Of weights and batches; each is a race, of minutes."""
    iterations: int = 2000
    """The reference's; fewer make a quick try, whose figures are not those of the recipe."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print."""
    command = parse(TimeToLoss, "time-to-loss", argv, program="python -m benchmarks")
    screen = Screen(command.json)
    text = "".join(piece.text for piece in Source((command.data,)).pieces())

    recipe = Recipe()
    if command.iterations < 1:
        raise ConfigError(f"iterations: {command.iterations} is not possible; give at least 1")
    if command.iterations != recipe.iterations:
        screen.note(f"the recipe has {recipe.iterations:,} iterations, not {command.iterations:,}: a try, not a figure")
    with screen.bar("time-to-loss", 1) as bar:
        found = measure(
            text,
            command.seeds,
            recipe=replace(recipe, iterations=command.iterations),
            progress=lambda done, total, what: bar.at(done, what, total=total),
        )
    _show(screen, found)
    screen.result(found)


def _show(screen: Screen, found: dict[str, Any]) -> None:
    """A row a seed, the smallest speedup, the memory."""
    columns = ("seed", "target", "reference s", "steps", "mainstem s", "steps", "speedup")
    rows = []
    for row in found["seeds"]:
        cells = [row["seed"], f"{row['target']:.4f}"]
        for side in ("reference", "mainstem"):
            cells += [_text(row["seconds"][side], ".1f"), row["steps"][side]]
        rows.append([*cells, _text(row["speedup"], ".2f")])
    screen.say(f"torch {found['torch']}, {found['threads']} threads, float32")
    screen.say(f"the settings of {PRESET} were chosen on {CHOSEN_ON}")
    screen.table(columns, rows)
    if found["speedup"] is None:
        screen.say("speedup: none, for the target was not reached with every seed")
    else:
        screen.say(f"speedup: {found['speedup']:.2f}, the smallest")
    sides = ", ".join(f"{side} {peak / 1e6:,.1f} MB" for side, peak in found["memory"].items() if peak)
    if found["memory_over_reference"]:
        screen.say(f"memory of training: {sides}, {found['memory_over_reference']:.3f}")


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
