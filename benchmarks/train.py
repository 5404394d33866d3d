"""What a training step costs: over its products alone, and over the step of `transformers` for the same model."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.floors import compute_floor
from benchmarks.gpt2 import gpt2
from benchmarks.memory import taken
from benchmarks.processes import NotCompared, Process, Works, alone
from benchmarks.timing import Alternated, alternate, check, spread
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import ConfigError, nearest
from mainstem.model.gpt import GPT
from mainstem.model.kernels.gelu_backend import choose_gelu
from mainstem.training import allocator
from mainstem.training.device import Device
from mainstem.training.optim import Optimizer
from mainstem.training.step import TrainStep

SHAPES = {  # (layers, heads, width, context, batch, vocabulary)
    "small": (4, 4, 128, 64, 12, 65),
    "mid": (6, 6, 384, 256, 4, 65),
    "andrea": (12, 12, 768, 256, 4, 8449),
}
CLIP = 1.0
TURN = 0.3
"""Seconds of steps in a row, one at least, in a turn: as in training, a step finds in the cache what it left there."""
Step = Callable[[], None]


def model_of(shape: str) -> tuple[GPT, Tensor, Tensor]:
    """The model of a shape, in GPT-2's form without dropout, and a batch x, y, (B, T) both, in memory."""
    if shape not in SHAPES:
        raise ConfigError(f"shape: unknown value {shape!r}; {nearest(shape, SHAPES)}")
    layers, heads, width, context, batch, vocabulary = SHAPES[shape]
    config = ModelConfig(vocab_size=vocabulary, n_ctx=context, n_layer=layers, n_head=heads, d_model=width)
    ids = torch.randint(vocabulary, (batch, context + 1), generator=torch.Generator().manual_seed(1))
    return GPT(config), ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_step(model: GPT, x: Tensor, y: Tensor) -> Step:
    """One step as the training loop takes it: loss, gradient, clipping, AdamW."""
    config, device = TrainConfig(batch_size=len(x), clip=CLIP), Device.choose("cpu")
    choose_gelu(model, device.device, x.numel())
    train_step = TrainStep(model, Optimizer(model, config), config, device)

    def step() -> None:
        train_step.move(0, train_step.gradient(x, y).norm)

    return step


def their_step(model: GPT, x: Tensor) -> Step:
    """The same of `transformers`: GPT2LMHeadModel with our weights, its own loss, AdamW as PyTorch has it.

    It takes the targets from x itself: the last token of a row predicts nothing.

    Raises ImportError if it is not installed.
    """
    theirs = gpt2(model).train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> None:
        theirs(x, labels=x).loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(shape: str) -> Works:
    """Our side: `steps` of so many steps in a row, and the `memory` of three, bytes above model and optimizer."""
    allocator.keep_freed()  # as the training loop has it
    return _works(our_step(*model_of(shape)))


def theirs(shape: str) -> Works:
    """The same works, of transformers. Raises NotCompared if it is not installed."""
    model, x, _ = model_of(shape)
    try:
        return _works(their_step(model, x))
    except ImportError as error:
        raise NotCompared(f"transformers is not compared ({error}): pip install transformers") from error


def floor(shape: str) -> Works:
    """`steps` of the products of so many of our steps."""
    allocator.keep_freed()
    model, x, _ = model_of(shape)
    return {"steps": partial(_repeat, compute_floor(model, *x.shape))}


def _works(step: Step) -> Works:
    def three() -> Iterable[Tensor]:
        _repeat(step, 3)
        return []

    def memory() -> int | None:
        step()
        return taken(three).peak

    return {"steps": partial(_repeat, step), "memory": memory}


def _repeat(step: Step, steps: int) -> None:
    """So many steps in a row, as training takes them."""
    for _ in range(steps):
        step()


def measure(
    shape: str, rounds: int = 9, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """`step_over_floor`, `step_over_transformers` and `memory_over_transformers`, with what stands behind them.

    Seconds, and bytes of a step above those of model and optimizer.

    Raises ConfigError for an unknown shape and for less than one round.
    """
    check(rounds)
    notes: list[str] = []
    timings: dict[str, Alternated] = {}
    memory: dict[str, int | None] = {"mainstem": alone("benchmarks.train:ours", "memory", ours=True, shape=shape)}
    try:
        memory["transformers"] = alone("benchmarks.train:theirs", "memory", ours=False, shape=shape)
        others = {"floor": True, "transformers": False}
    except NotCompared as error:
        memory["transformers"] = None
        notes.append(str(error))
        others = {"floor": True}
    count, total = itertools.count(1), (rounds + 1) * 2 * len(others)

    def tick() -> None:
        progress(next(count), total)

    with Process("benchmarks.train:ours", ours=True, shape=shape) as mainstem:
        mainstem.call("steps", 1)
        steps = max(1, round(TURN / mainstem.call("steps", 1).seconds))
        for name, is_ours in others.items():
            build = "floor" if is_ours else "theirs"
            with Process(f"benchmarks.train:{build}", ours=is_ours, shape=shape) as other:
                sides = mainstem.side("steps", steps), other.side("steps", steps)
                timings[name] = alternate(*sides, rounds, tick=tick)
    over_floor, over_peer = timings["floor"], timings.get("transformers")
    both = [peak for peak in memory.values() if peak]
    return {
        "shape": shape,
        "step_over_floor": over_floor.ratio.median,
        "step_over_transformers": over_peer and over_peer.ratio.median,
        "memory_over_transformers": both[0] / both[1] if len(both) == 2 else None,
        "steps_a_turn": steps,
        "timings": {
            "step_over_floor": _plain(over_floor, steps, "floor"),
            "step_over_transformers": over_peer and _plain(over_peer, steps, "transformers"),
        },
        "memory": memory,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "notes": notes,
    }


def _plain(timed: Alternated, steps: int, other: str) -> dict[str, Any]:
    sides = {"mainstem": timed.first, other: timed.second}
    return {
        "seconds": {side: spread(seconds).median / steps for side, seconds in sides.items()},
        "ratio_quartiles": [timed.ratio.lower, timed.ratio.upper],
    }


@dataclass(frozen=True, kw_only=True)
class Train:
    """Time a training step beside its matrix products and attention alone, and beside the step of `transformers` for
    the same model, by turns, each in a process of its own as its users have it; and weigh the memory."""

    shape: Literal["small", "mid", "andrea"] = "small"
    """4 blocks of 128, 6 of 384 (characters), or ANDREA's 12 of 768."""
    rounds: int = 9
    """Timed steps of each side."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print."""
    command = parse(Train, "train", argv, program="python -m benchmarks")
    screen = Screen(command.json)

    with screen.bar("train", 1) as bar:
        figures = measure(command.shape, command.rounds, progress=lambda done, total: bar.at(done, total=total))
    for note in figures["notes"]:
        screen.note(note)
    screen.say(f"{figures['shape']}: torch {figures['torch']}, {figures['threads']} threads, float32")
    rows = []
    for name, timing in figures["timings"].items():
        if timing is not None:
            lower, upper = timing["ratio_quartiles"]
            seconds = ", ".join(f"{side} {1000 * value:,.1f}" for side, value in timing["seconds"].items())
            rows.append((name, f"{figures[name]:.3f}", f"{lower:.3f} to {upper:.3f}", seconds))
    screen.table(("figure", "ratio", "interquartile range", "ms a step"), rows)
    ratio = figures["memory_over_transformers"]
    sides = ", ".join(f"{side} {peak / 1e6:,.1f} MB" for side, peak in figures["memory"].items() if peak)
    if sides:
        screen.say(f"memory of a step, above model and optimizer: {sides}{f', {ratio:.3f}' if ratio else ''}")
    screen.result(figures)
