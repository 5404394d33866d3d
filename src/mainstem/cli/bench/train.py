"""`mainstem bench train`: what a training step costs, over its products alone and over `transformers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen


@dataclass(frozen=True, kw_only=True)
class Train:
    """Time a training step beside its matrix products and attention alone, and beside the step of `transformers` for
    the same model, by turns in one process; and weigh the memory, each side in a process of its own."""

    shape: Literal["small", "mid", "andrea"] = "small"
    """4 blocks of 128, 6 of 384 (characters), or ANDREA's 12 of 768."""
    rounds: int = 9
    """Timed steps of each side."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print."""
    command = parse(Train, "bench train", argv)
    screen = Screen(command.json)
    from mainstem.bench.train import measure

    with screen.bar("bench train", 1) as bar:
        found = measure(command.shape, command.rounds, progress=lambda done, total: bar.at(done, total=total))
    for note in found["notes"]:
        screen.note(note)
    screen.say(f"{found['shape']}: torch {found['torch']}, {found['threads']} threads, float32")
    rows = []
    for name, timing in found["timings"].items():
        if timing is not None:
            lower, upper = timing["ratio_quartiles"]
            seconds = ", ".join(f"{side} {1000 * value:,.1f}" for side, value in timing["seconds"].items())
            rows.append((name, f"{found[name]:.3f}", f"{lower:.3f} to {upper:.3f}", seconds))
    screen.table(("figure", "ratio", "middle half", "ms a step"), rows)
    ratio = found["memory_over_transformers"]
    sides = ", ".join(f"{side} {peak / 1e6:,.1f} MB" for side, peak in found["memory"].items() if peak)
    if sides:
        screen.say(f"memory of a step, above model and optimizer: {sides}{f', {ratio:.3f}' if ratio else ''}")
    screen.result(found)
