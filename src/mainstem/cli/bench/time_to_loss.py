"""`mainstem bench time-to-loss`: how much sooner a preset is where the reference recipe ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.errors import ConfigError
from mainstem.text.corpus import Source


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """Train the reference, nanoGPT's published recipe for a CPU, and the preset `swift` on the characters of a text, by
    turns in one process; its last tenth is held out, and both are scored on all of it on the way, off the clock.
    The speedup is the reference's seconds to the loss at which it ends, over ours to the first that is not above it."""

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
    command = parse(TimeToLoss, "bench time-to-loss", argv)
    screen = Screen(command.json)
    text = "".join(piece.text for piece in Source((command.data,)).pieces())
    from mainstem.bench.reference import Recipe
    from mainstem.bench.time_to_loss import measure

    recipe = Recipe()
    if command.iterations < 1:
        raise ConfigError(f"iterations: {command.iterations} is not possible; give at least 1")
    if command.iterations != recipe.iterations:
        screen.note(f"the recipe has {recipe.iterations:,} iterations, not {command.iterations:,}: a try, not a figure")
    with screen.bar("bench time-to-loss", 1) as bar:
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
