"""`mainstem circuits composition RUN`: which earlier head each head reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Opening, finish, open_model
from mainstem.cli.parts.screen import Screen
from mainstem.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Composition(Opening):
    """Q-, K- and V-composition of later heads with earlier ones, against random heads of the same shape."""

    modes: str = "QKV"
    """Which of Q, K and V to score, such as QK."""
    offset: int | None = None
    """With rotary positions, the distance from a key to its query; by default 1."""
    top: int = 15
    """How many pairs to show."""


def main(argv: Sequence[str]) -> None:
    """Parse, multiply, print."""
    command = parse(Composition, "circuits composition", argv)
    screen = Screen(command.json)
    if not command.modes or set(command.modes) - set("QKV"):
        raise UserError(f"modes: {command.modes!r} is not possible; give some of Q, K and V, as in QK")
    model, _ = open_model(command, screen)
    from mainstem.circuits.composition import composition

    compositions = composition(model, command.offset)
    pairs = compositions.top(command.top, command.modes)
    chance = f"random heads score {compositions.mean:.4f} (standard deviation {compositions.std:.4f})"
    screen.say(f"{chance}; 1 / sqrt(width) = {compositions.chance:.4f}")
    screen.table(
        ("writes", "read by", "as", "score", "z", "of limit"),
        [(p.writes, p.reads, p.mode, f"{p.score:.3f}", f"{p.z:+.1f}", f"{p.rank_corrected:.2f}") for p in pairs],
    )
    for note in compositions.notes:
        screen.note(note)
    result = {
        "labels": compositions.labels,
        "offset": compositions.offset,
        "random_mean": compositions.mean,
        "random_std": compositions.std,
        "chance": compositions.chance,
        "pairs": [pair._asdict() for pair in pairs],
        "scores": {mode: scores.tolist() for mode, scores in compositions.scores.items()},
        "notes": compositions.notes,
    }
    finish(command, screen, result, lambda: {"labels": compositions.labels} | compositions.scores)
