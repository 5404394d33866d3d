"""What looking inside costs: captures, composition, attribution and patching, each beside another way to the same.

A figure is a ratio of seconds within one run; that of memory is one of bytes. By how much the results of the two ways
differ stands beside it, for ways that do not agree are not ways to the same.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import naive
from benchmarks.memory import taken
from benchmarks.peer import find
from benchmarks.processes import NotCompared, Process, Works, alone
from benchmarks.subject import Subject
from benchmarks.timing import Alternated, Spread, alternate, check, spread
from mainstem.circuits.composition import composition
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.model.gpt import GPT
from mainstem.presets import preset
from mainstem.stream.capture import capture
from mainstem.stream.change.patch import patch_grid
from mainstem.stream.change.rerun import ROOM
from mainstem.stream.decompose import closing_error
from mainstem.stream.metrics import LogitDifference
from mainstem.stream.trace import Trace

OURS, PEER = "mainstem", "TransformerLens"
POINTS = ("embed", "pos_embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "resid_final")
"""The stream and every write."""
Arrays = dict[str, Tensor]
SLOW_ROUNDS = 3
"""Rounds, at most, of what takes minutes."""


def stream_and_writes(model: GPT) -> list[str]:
    """The points of POINTS that a model has."""
    return [point for point in model.points() if point.split(".")[-1] in POINTS]


def ours(**fields: Any) -> Works:
    """Our side, of a Subject's fields: each look, the plain ways beside it, and the `memory` of a look."""
    subject = Subject(**fields)
    model, (ids, targets), (clean, corrupt) = subject.model(), subject.text(), subject.pair()
    metric, points, traces = LogitDifference(0, 1), stream_and_writes(model), dict[str, Trace]()

    def attribution() -> Arrays:
        """Every head's part of every position's next token, with all other rows, from a pass that is kept already."""
        if not traces:
            traces["kept"] = capture(model, ids)
        why = traces["kept"].attribution(targets, by="head", pos=None)
        return dict(zip(why.labels, why.values, strict=True))

    def look(ids: Tensor, targets: Tensor) -> list[Tensor]:
        trace = capture(model, ids)
        why = trace.attribution(targets, by="head", pos=None)
        return [*trace.values.values(), why.values, why.total]

    def memory() -> dict[str, int | None]:
        look(ids[:, :2], targets[:, :2])
        return vars(taken(lambda: look(ids, targets)))

    works: dict[str, Callable[[], Any]] = {
        "forward": lambda: {"logits": model(ids)},
        "capture": lambda: {"logits": capture(model, ids, points).logits},
        "default capture": lambda: {"logits": capture(model, ids).logits},
        "composition": lambda: dict(composition(model).scores),
        "attribution": attribution,
        "patch_grid": lambda: {"effects": patch_grid(model, clean, corrupt, metric).effects[..., 0]},
        "whole passes": lambda: {"effects": naive.patch_grid(model, clean, corrupt, metric, ROOM)},
        "memory": memory,
    }
    return {name: torch.no_grad()(work) for name, work in works.items()}


def theirs(**fields: Any) -> Works:
    """TransformerLens's side, whose weights are as they were drawn: the biases that reach the values are 0, which the
    two sides count to other rows. Raises NotCompared as `peer.find` does."""
    subject = Subject(**fields)
    model, (ids, targets) = subject.model(), subject.text()
    peer, difference = find(model, ids)
    kept: dict[str, Tensor] = {}

    def attribution() -> Arrays:
        if not kept:
            kept.update(peer.cache(ids))
        heads = [f"L{block}H{head}" for block in range(len(model.blocks)) for head in range(model.config.n_head)]
        return dict(zip(heads, peer.head_attribution(kept, targets), strict=True))

    def memory() -> dict[str, int | None]:
        peer.cache(ids[:, :2])
        return vars(taken(lambda: peer.cache(ids).values()))

    return {
        "about": lambda: {"version": peer.version, "difference": difference},
        "composition": peer.composition,
        "attribution": attribution,
        "memory": memory,
    }


def apart(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> float:
    """By how much two results differ in the arrays that both have, as a share of the largest value."""
    names = sorted(first.keys() & second.keys())
    one, other = (torch.cat([torch.from_numpy(arrays[name]).flatten() for name in names]) for arrays in (first, second))
    return closing_error(one.nan_to_num(), other.nan_to_num())


@dataclass(frozen=True)
class Figure:
    """A ratio: the seconds `of` something over those of another way to the same."""

    name: str
    of: str
    over: str
    aim: str
    """Where it should be at GPT-2-small's shape."""
    about: str
    works: tuple[str, str]
    """The works of the two sides."""
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
           ("capture", "forward")),
    Figure("default_capture_over_forward", "capture", "forward", "at most 1.20",
           "the same with z and the norms' statistics, as a capture is by default",
           ("default capture", "forward")),
    Figure("composition_speedup", PEER, OURS, "at least 15",
           f"all composition scores of the weights: {PEER}'s time over ours",
           ("composition", "composition"), slow=True),
    Figure("head_attribution_ratio", OURS, PEER, "at most 0.50",
           f"each head's part of each next token's logit: our time over {PEER}'s",
           ("attribution", "attribution")),
    Figure("patch_grid_ratio", "patch_grid", "whole passes", "at most 0.60",
           "resid_pre patched at each block and position, over a whole pass for each",
           ("patch_grid", "whole passes"), slow=True),
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
    check(rounds)
    calls = {figure.name: 2 * (figure.rounds(rounds) + 1) for figure in FIGURES}
    done, total = 0, 2 + sum(calls.values())

    def step(what: str, count: int = 1) -> None:
        nonlocal done
        done += count
        progress(done, total, what)

    step("memory", 0)
    fields, notes = vars(subject), []
    memory: dict[str, dict[str, int | None] | None] = {}
    for name, build in ((OURS, "ours"), (PEER, "theirs")):
        memory[name] = None
        with suppress(NotCompared):
            memory[name] = alone(f"benchmarks.inspect:{build}", "memory", ours=name == OURS, **fields)
        step("memory")
    timings: dict[str, Alternated | None] = {}
    peer = about = None
    with ExitStack() as stack:
        mainstem = stack.enter_context(Process("benchmarks.inspect:ours", ours=True, **fields))
        try:
            peer = stack.enter_context(Process("benchmarks.inspect:theirs", ours=False, **fields))
            about = peer.value("about")
        except NotCompared as error:
            notes.append(str(error))
        for figure in FIGURES:
            step(figure.name, 0)
            timings[figure.name] = None
            if figure.needs_peer and peer is None:
                step(figure.name, calls[figure.name])
                continue
            first, second = (
                (peer if name == PEER and peer is not None else mainstem).side(work)
                for name, work in zip((figure.of, figure.over), figure.works, strict=True)
            )
            tick = partial(step, figure.name)
            timings[figure.name] = alternate(first, second, figure.rounds(rounds), difference=apart, tick=tick)
    return {
        **{name: None if timing is None else timing.ratio.median for name, timing in timings.items()},
        "memory_ratio": _memory_ratio(memory),
        "timings": {figure.name: _seconds(figure, timings[figure.name]) for figure in FIGURES},
        "memory": memory,
        "shape": _shape(subject),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "peer": about and f"{PEER} {about['version']}",
        "logits_difference": about and about["difference"],
        "notes": notes,
    }


def _memory_ratio(memory: Mapping[str, Mapping[str, int | None] | None]) -> float | None:
    """Our peak over the peer's."""
    ours, theirs = ((memory[side] or {}).get("peak") for side in (OURS, PEER))
    return ours / theirs if ours and theirs else None


def _seconds(figure: Figure, timing: Alternated | None) -> dict[str, Any] | None:
    """Medians, quartiles and rounds of the two sides, and of their ratio."""
    if timing is None:
        return None
    sides = {figure.of: spread(timing.first), figure.over: spread(timing.second)}
    return {
        "rounds": len(timing.first),
        "seconds": {side: each.median for side, each in sides.items()},
        "quartiles": {side: _quartiles(each) for side, each in sides.items()},
        "ratio_quartiles": _quartiles(timing.ratio),
        "difference": timing.difference,
    }


def _quartiles(ratio: Spread) -> list[float]:
    return [ratio.lower, ratio.upper]


def _shape(subject: Subject) -> dict[str, Any]:
    fields = ("vocab_size", "n_ctx", "n_layer", "n_head", "d_model")
    config = subject.config
    return {**vars(subject), **{field: getattr(config, field) for field in fields}, "dtype": "float32"}


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Time a capture beside the plain forward, composition and attribution beside TransformerLens, and patching beside
    whole passes, by turns, each in a process of its own as its users have it; and weigh the memory.

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
        figures = measure(subject, command.rounds, progress=lambda done, total, what: bar.at(done, what, total))
    for note in figures["notes"]:
        screen.note(note)
    _show(screen, figures)
    screen.result(figures)


def _show(screen: Screen, figures: dict[str, Any]) -> None:
    """Two tables, and what each figure means."""
    shape = figures["shape"]
    screen.say(
        f"{shape['preset']}: {shape['n_layer']} blocks of {shape['n_head']} heads, {shape['d_model']} wide, "
        f"{shape['vocab_size']:,} tokens known, {shape['dtype']}, random weights; {shape['tokens']} tokens are read, "
        f"and {shape['grid_tokens']} in the grid of patches"
    )
    peer = f"without {PEER}"
    if figures["peer"]:
        peer = f"{figures['peer']} with the same weights, its logits within {figures['logits_difference']:.0e} of ours"
    screen.say(f"torch {figures['torch']}, {figures['threads']} threads; {peer}\n")
    timings = figures["timings"]
    rows = [[figure.name, *_cells(figures[figure.name], timings[figure.name]), figure.aim] for figure in FIGURES]
    screen.table(["figure", "ratio", "seconds", "differ", "aim"], rows)
    screen.say()
    rows = [[side, *_megabytes(figures["memory"][side])] for side in (OURS, PEER)]
    screen.table(["memory", "MB at the peak", "MB kept"], rows)
    screen.say(f"  memory_ratio, of the peaks: {_ratio(figures['memory_ratio'])}; good below 1")
    screen.say()
    for figure in FIGURES:
        screen.say(f"  {figure.name:<30}{figure.about}")
    screen.say(f"  {'memory':<30}{OURS}: a default capture and that attribution; {PEER}: a cache of everything")


def _cells(ratio: float | None, timing: dict[str, Any] | None) -> list[str]:
    if timing is None:
        return ["-"] * 3
    seconds = " / ".join(f"{value:.3g}" for value in timing["seconds"].values())
    return [_ratio(ratio), seconds, f"{timing['difference']:.0e}"]


def _megabytes(memory: dict[str, int | None] | None) -> list[str]:
    values = [None, None] if memory is None else [memory["peak"], memory["held"]]
    return ["-" if value is None else f"{value / 1e6:,.1f}" for value in values]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
