"""`mainstem inspect flow RUN "prompt"`: what attention moves from token to token, or from word to word."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Captured, ending, finish, in_json, open_trace
from mainstem.cli.parts.screen import Screen
from mainstem.columns import clip
from mainstem.text import units
from mainstem.text.units import Unit

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = 7
"""Units whose matrix stands on 80 columns of a terminal."""
CELL = 14
"""Columns of a unit's text."""


@dataclass(frozen=True, kw_only=True)
class Flow(Captured):
    """Attention flow: which word reads which in each block and head, and the rollout over all blocks."""

    layer: int | None = None
    """One block; by default all."""
    weighting: Literal["pattern", "value"] = "pattern"
    """Attention weights, or the norms of the value vectors that they move."""
    by: Literal["token", "word"] = "word"
    """From token to token, or from word to word: the tokens of a word are summed where it is read, averaged where it
    reads."""
    top: int = 8
    """How many moves to show for each block, other than from a word to itself."""


def main(argv: Sequence[str]) -> None:
    """Parse, capture, print."""
    command = parse(Flow, "inspect flow", argv)
    screen = Screen(command.json)
    trace = open_trace(command, screen)
    tokenizer, ids = trace.tokenizer, trace.ids[0].tolist()
    assert tokenizer is not None
    import torch

    from mainstem.stream.analysis.flow import block_joins, flow, grouped, moved, rollout

    each = units.words(tokenizer, ids)
    if command.by == "token":
        each = [Unit(text, at, at + 1) for at, text in enumerate(units.pieces(tokenizer, ids))]
    layers = [block_joins(trace, 0 if command.layer is None else command.layer)[0].block]
    if command.layer is None:
        layers = list(range(len(trace.model.blocks)))
    texts = [units.shown(unit.text.strip(" ") or unit.text) for unit in each]
    names = [f"{at} {clip(text, CELL)}" for at, text in enumerate(texts)]
    what = "attention weight" if command.weighting == "pattern" else "length of what is moved"
    screen.say(ending(f"{what} from {command.by} to {command.by} of", command.prompt))
    rows: list[dict[str, Any]] = []
    by_head, by_block = [], []
    for layer in layers:
        heads = flow(trace, layer, command.weighting)
        block = heads.values.mean(1) if command.weighting == "pattern" else moved(trace, layer)
        heads = heads.grouped(each)
        by_head.append(heads.values[0])  # (H, U, U)
        by_block.append(grouped(block[0], each))
        moves = heads.top(command.top)
        rows += [{"label": m.head, "from": m.source, "to": m.target, "value": m.value} for m in moves]
        if len(each) <= COLUMNS:
            _matrix(f"block {layer}, all heads", by_block[-1], names, screen)
        cells = [[names[m.source], names[m.target], m.head, f"{m.value:.3f}"] for m in moves]
        screen.table((f"block {layer}: from", "to", "head", command.weighting), cells)
    rolled = grouped(rollout(trace)[-1, 0], each)  # (U, U)
    last = rolled[-1].topk(min(4, len(each)))
    parts = zip(last.indices.tolist(), last.values.tolist(), strict=True)
    ends = ", ".join(f"{names[at]} ({share:.2f})" for at, share in parts)
    screen.say(f"rollout over all blocks, of {names[-1]}:\n  {ends}")
    result = {
        "tokens": in_json(tokenizer, ids),
        "units": [unit._asdict() for unit in each],
        "weighting": command.weighting,
        "layers": layers,
        "together": [block.tolist() for block in by_block],
        "rollout": rolled.tolist(),
        "rows": rows,
    }
    arrays = {"heads": torch.stack(by_head), "together": torch.stack(by_block), "rollout": rolled}
    finish(command, screen, result, lambda: arrays | {"layers": layers, "units": [unit.text for unit in each]})


def _matrix(title: str, matrix: "Tensor", names: list[str], screen: Screen) -> None:
    """To each unit, a row, from each earlier one, a column."""
    rows = [
        [name, *(f"{value:.2f}" if key <= query else None for key, value in enumerate(row))]
        for query, (name, row) in enumerate(zip(names, matrix.tolist(), strict=True))
    ]
    screen.table((title, *(clip(name, 6) for name in names)), rows)
