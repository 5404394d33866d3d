"""What looking inside costs: captures, composition, attribution and patching, each beside another way to the same.

A figure is a ratio of seconds within one run; that of memory is one of bytes. By how much the results of the two ways
differ stands beside it, for ways that do not agree are not ways to the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import memory, naive
from benchmarks.peer import Peer, find
from benchmarks.subject import Subject
from benchmarks.timing import Alternated, Spread, Work, alternate, spread
from mainstem.circuits.composition import MODES, composition
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.model.gpt import GPT
from mainstem.presets import preset
from mainstem.stream.capture import capture
from mainstem.stream.change.patch import patch_grid
from mainstem.stream.change.rerun import ROOM
from mainstem.stream.decompose import closing_error
from mainstem.stream.metrics import LogitDifference

OURS, PEER = "mainstem", "TransformerLens"
POINTS = ("embed", "pos_embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "resid_final")
"""The stream and every write."""
SLOW_ROUNDS = 3
"""Rounds, at most, of what takes minutes."""


class Opened(NamedTuple):
    """What the figures are taken of."""

    subject: Subject
    model: GPT
    peer: Peer | None


class Ways(NamedTuple):
    """Two ways to the same, and by how much two results differ, as a share of the largest value."""

    first: Work
    second: Work
    difference: Callable[[Any, Any], float]


def stream_and_writes(model: GPT) -> list[str]:
    """The points of POINTS that a model has."""
    return [point for point in model.points() if point.split(".")[-1] in POINTS]


def captured(opened: Opened, by_default: bool) -> Ways:
    """A pass that keeps the stream and every write, or the default points; and one that keeps nothing."""
    model, (ids, _) = opened.model, opened.subject.text()
    points = None if by_default else stream_and_writes(model)
    return Ways(lambda: capture(model, ids, points).logits, lambda: model(ids), closing_error)


def composed(opened: Opened) -> Ways:
    """The peer's scores of Q, K and V, and ours."""
    model, peer = opened.model, _there(opened.peer)

    def difference(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> float:
        return max(closing_error(theirs[mode], ours[mode].nan_to_num()) for mode in MODES)

    return Ways(peer.composition, lambda: composition(model).scores, difference)


def attributed(opened: Opened) -> Ways:
    """Every head's part of every position's next token, ours with all other rows, from passes that are kept already.

    The weights are as they were drawn. The biases that reach the values are 0, which the two sides count to other rows.
    """
    peer, (ids, targets) = _there(opened.peer), opened.subject.text()
    trace, cache = capture(opened.model, ids), peer.cache(ids)

    def ours() -> tuple[list[str], Tensor]:
        why = trace.attribution(targets, by="head", pos=None)
        return why.labels, why.values

    def difference(ours: tuple[list[str], Tensor], theirs: Tensor) -> float:
        heads = [row for row, label in enumerate(ours[0]) if label.startswith("L")]  # `L3H2`
        return closing_error(ours[1][heads], theirs)

    return Ways(ours, lambda: peer.head_attribution(cache, targets), difference)


def patched(opened: Opened) -> Ways:
    """resid_pre at every block and position of a shorter text: ours, and a whole pass for each, as many at once."""
    model, (clean, corrupt) = opened.model, opened.subject.pair()
    metric = LogitDifference(0, 1)
    return Ways(
        lambda: patch_grid(model, clean, corrupt, metric).effects[..., 0],
        lambda: naive.patch_grid(model, clean, corrupt, metric, ROOM),
        closing_error,
    )


def _there(peer: Peer | None) -> Peer:
    assert peer is not None
    return peer


@dataclass(frozen=True)
class Figure:
    """A ratio: the seconds `of` something over those of another way to the same."""

    name: str
    of: str
    over: str
    aim: str
    """Where it should be at GPT-2-small's shape."""
    about: str
    ways: Callable[[Opened], Ways]
    slow: bool = False

    @property
    def needs_peer(self) -> bool:
        """Whether one of the two sides is the peer's."""
        return PEER in (self.of, self.over)

    def rounds(self, asked: int) -> int:
        """How many it gets."""
        return min(asked, SLOW_ROUNDS) if self.slow else asked


FIGURES = (
    Figure("capture_over_forward", "capture", "forward", "at most 1.10",
           "a pass that keeps the stream and every write, over one that keeps nothing",
           partial(captured, by_default=False)),
    Figure("default_capture_over_forward", "capture", "forward", "at most 1.20",
           "the same with z and the norms' statistics, as a capture is by default",
           partial(captured, by_default=True)),
    Figure("composition_speedup", PEER, OURS, "at least 15",
           f"all composition scores of the weights: {PEER}'s time over ours",
           composed, slow=True),
    Figure("head_attribution_ratio", OURS, PEER, "at most 0.50",
           f"each head's part of each next token's logit: our time over {PEER}'s",
           attributed),
    Figure("patch_grid_ratio", "patch_grid", "whole passes", "at most 0.60",
           "resid_pre patched at each block and position, over a whole pass for each",
           patched, slow=True),
)  # fmt: skip


def measure(
    subject: Subject, rounds: int = 9, *, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> dict[str, Any]:
    """Every figure, and what stands behind it.

    Args:
        subject: the model and the texts.
        rounds: timed calls of each way; of the slow ones SLOW_ROUNDS at most.
        progress: called with the calls done, their number, and what is measured.

    Returns plain values, in seconds and bytes: each figure and `memory_ratio` by name, None where there is no peer to
    compare with; then `timings`, `memory`, `shape`, `torch`, `threads`, `peer` with the `logits_difference` between its
    model and ours, and `notes`.

    Raises ConfigError for less than one round.
    """
    calls = {figure.name: 2 * (figure.rounds(rounds) + 1) for figure in FIGURES}
    done, total = 0, 2 + sum(calls.values())

    def step(what: str, count: int = 1) -> None:
        nonlocal done
        done += count
        progress(done, total, what)

    step("memory", 0)
    taken: dict[str, memory.Taken | None] = {}
    for side, look in ((OURS, memory.ours), (PEER, memory.peers)):  # before this process has models of its own
        taken[side] = memory.alone(look, subject)
        step("memory")
    timings: dict[str, Alternated | None] = {}
    with torch.no_grad():
        model = subject.model()
        peer, why_not, difference = find(model, subject.text()[0])
        opened = Opened(subject, model, peer)
        for figure in FIGURES:
            step(figure.name, 0)
            if figure.needs_peer and peer is None:
                timings[figure.name] = None
                step(figure.name, calls[figure.name])
            else:
                ways, tick = figure.ways(opened), partial(step, figure.name)
                timings[figure.name] = alternate(
                    ways.first, ways.second, figure.rounds(rounds), difference=ways.difference, tick=tick
                )
    return {
        **{name: None if timing is None else timing.ratio.median for name, timing in timings.items()},
        "memory_ratio": _memory_ratio(taken),
        "timings": {figure.name: _seconds(figure, timings[figure.name]) for figure in FIGURES},
        "memory": {side: None if bytes_ is None else vars(bytes_) for side, bytes_ in taken.items()},
        "shape": _shape(subject),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "peer": None if peer is None else f"{PEER} {peer.version}",
        "logits_difference": difference,
        "notes": [why_not] if why_not else [],
    }


def _memory_ratio(taken: dict[str, memory.Taken | None]) -> float | None:
    """Our peak over the peer's."""
    ours, theirs = taken[OURS], taken[PEER]
    if ours is None or theirs is None or not ours.peak or not theirs.peak:
        return None
    return ours.peak / theirs.peak


def _seconds(figure: Figure, timing: Alternated | None) -> dict[str, Any] | None:
    """Medians, quartiles and rounds of the two sides, and of their ratio."""
    if timing is None:
        return None
    sides = {figure.of: spread(timing.first), figure.over: spread(timing.second)}
    return {
        "rounds": len(timing.first),
        "seconds": {side: found.median for side, found in sides.items()},
        "quartiles": {side: _quartiles(found) for side, found in sides.items()},
        "ratio_quartiles": _quartiles(timing.ratio),
        "difference": timing.difference,
    }


def _quartiles(found: Spread) -> list[float]:
    return [found.lower, found.upper]


def _shape(subject: Subject) -> dict[str, Any]:
    fields = ("vocab_size", "n_ctx", "n_layer", "n_head", "d_model")
    config = subject.config
    return {**vars(subject), **{field: getattr(config, field) for field in fields}, "dtype": "float32"}


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Time a capture beside the plain forward, composition and attribution beside TransformerLens, and patching beside
    whole passes, by turns in one process; and weigh the memory, each side in a process of its own.

    The model has random weights and reads random tokens. TransformerLens is optional: pip install 'mainstem[bench]'.
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
    command = parse(Inspect, "inspect", argv, program="python -m benchmarks")
    screen = Screen(command.json)

    tokens = min(256, preset(command.preset).model.n_ctx) if command.tokens is None else command.tokens
    subject = Subject(command.preset, tokens, command.grid_tokens, command.seed)
    with screen.bar("inspect", 1) as bar:
        found = measure(subject, command.rounds, progress=lambda done, total, what: bar.at(done, what, total))
    for note in found["notes"]:
        screen.note(note)
    _show(screen, found)
    screen.result(found)


def _show(screen: Screen, found: dict[str, Any]) -> None:
    """Two tables, and what each figure means."""
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
