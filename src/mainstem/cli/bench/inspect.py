"""`mainstem bench inspect`: what looking inside costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.presets import preset


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Time a capture beside the plain forward, composition and attribution beside TransformerLens, and patching beside
    whole passes, by turns in one process; and weigh the memory, each side in a process of its own.

    The model has random weights and reads random tokens. TransformerLens is optional: pip install mainstem[bench].
    """

    preset: str = "gpt2"
    """Whose shape the model has, without dropout."""
    tokens: int | None = None
    """Of the text that is looked into; without it 256, or as many as the context holds."""
    grid_tokens: int = 24
    """Of the texts between which is patched; fewer, for the plain way runs a whole pass for each block and position."""
    rounds: int = 9
    """Timed calls of each side; three at most of what takes minutes."""
    seed: int = 1
    """Of weights and tokens."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print."""
    command = parse(Inspect, "bench inspect", argv)
    screen = Screen(command.json)
    from mainstem.bench.inspect import measure
    from mainstem.bench.subject import Subject

    tokens = min(256, preset(command.preset).model.n_ctx) if command.tokens is None else command.tokens
    subject = Subject(command.preset, tokens, command.grid_tokens, command.seed)
    with screen.bar("bench inspect", 1) as bar:
        found = measure(subject, command.rounds, progress=lambda done, total, what: bar.at(done, what, total))
    for note in found["notes"]:
        screen.note(note)
    _show(screen, found)
    screen.result(found)


def _show(screen: Screen, found: dict[str, Any]) -> None:
    """Two tables, and what each figure means."""
    from mainstem.bench.inspect import FIGURES, OURS, PEER

    shape = found["shape"]
    screen.say(
        f"{shape['preset']}: {shape['n_layer']} blocks of {shape['n_head']} heads, {shape['d_model']} wide, "
        f"{shape['vocab_size']:,} tokens known, {shape['dtype']}, random weights; {shape['tokens']} tokens are read, "
        f"and {shape['grid_tokens']} in the grid of patches"
    )
    peer = f"without {PEER}"
    if found["peer"]:
        peer = f"{found['peer']} with the same weights, its logits within {found['logits_difference']:.0e} of ours"
    screen.say(f"torch {found['torch']}, {found['threads']} threads; {peer}\n")
    rows = [[figure.name, *_cells(found[figure.name], found["timings"][figure.name]), figure.aim] for figure in FIGURES]
    screen.table(["figure", "ratio", "seconds", "differ", "aim"], rows)
    screen.say()
    rows = [[side, *_megabytes(found["memory"][side])] for side in (OURS, PEER)]
    screen.table(["memory", "MB at the peak", "MB kept"], rows)
    screen.say(f"  memory_ratio, of the peaks: {_ratio(found['memory_ratio'])}; good below 1")
    screen.say()
    for figure in FIGURES:
        screen.say(f"  {figure.name:<30}{figure.about}")
    screen.say(f"  {'memory':<30}{OURS}: a default capture and that attribution; {PEER}: a cache of everything")


def _cells(ratio: float | None, timing: dict[str, Any] | None) -> list[str]:
    if timing is None:
        return ["-"] * 3
    seconds = " / ".join(f"{value:.3g}" for value in timing["seconds"].values())
    return [_ratio(ratio), seconds, f"{timing['difference']:.0e}"]


def _megabytes(taken: dict[str, int | None] | None) -> list[str]:
    values = [None, None] if taken is None else [taken["peak"], taken["held"]]
    return ["-" if value is None else f"{value / 1e6:,.1f}" for value in values]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
