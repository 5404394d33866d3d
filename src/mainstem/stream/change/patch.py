"""Activation patching: run a corrupted input with activations of a clean one, and measure how much a metric recovers.

The normalised effect of a patch is 1 where it restores the whole difference of the metric between clean and corrupted
input, and 0 where it restores nothing (Vig et al. 2020; Meng et al. 2022, section 2; Wang et al. 2022).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mainstem.errors import ConfigError, nearest
from mainstem.model import names
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.results import SHOWN, Item, Rows, strongest, summary
from mainstem.stream.capture import capture
from mainstem.stream.change.intervene import At, Intervention, Target, locate, resample
from mainstem.stream.change.rerun import ROOM, Rerun, choose_blocks, recorded
from mainstem.stream.ids import Ids, paired
from mainstem.stream.metrics import Metric, checked, measured, with_ids
from mainstem.stream.points import position
from mainstem.stream.record import Record

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

STREAM = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
"""Points that are patched at one position of one block."""
HEADS = {"head": "z", "q": "q", "k": "k", "v": "v", "pattern": "pattern"}
"""Points that are patched for one head of one block, at all positions, by the value of `what`."""


@dataclass(frozen=True, eq=False, repr=False)
class Patched:
    """The effect of patches on a metric, of B pairs of a clean and a corrupted input."""

    effects: Tensor
    """The metric of the patched pass less that of the corrupted pass, (..., B)."""
    clean: Tensor
    """The metric of the clean pass, (B,)."""
    corrupt: Tensor
    """The metric of the corrupted pass, (B,)."""

    @property
    def values(self) -> Tensor:
        """The normalised effects, (m_patched - m_corrupt) / (m_clean - m_corrupt), of means over pairs, (...).

        Raises ConfigError where the metric is the same for clean and corrupted inputs.
        """
        gap = (self.clean - self.corrupt).mean()
        if gap == 0:
            raise ConfigError(
                f"metric: it is {self.clean.mean().item():.4g} for the clean and the corrupted input alike: there is "
                "nothing to restore; choose another pair or metric, or look at `effects`"
            )
        return self.effects.mean(-1) / gap

    def __repr__(self) -> str:
        return summary(f"Patched: {self._metric}", self.top(SHOWN), len(self.clean))

    @property
    def _metric(self) -> str:
        clean, corrupt = self.clean.mean().item(), self.corrupt.mean().item()
        return f"metric {clean:+.4g} clean, {corrupt:+.4g} corrupt (pairs: {len(self.clean)})"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values, one a pair: `label`, `value` (effect in the metric's units), `clean` and `corrupt`."""
        columns = self.effects.tolist(), self.clean.tolist(), self.corrupt.tolist()
        return [
            {"label": f"pair {pair}", "value": effect, "clean": clean, "corrupt": corrupt}
            for pair, (effect, clean, corrupt) in enumerate(zip(*columns, strict=True))
        ]

    def top(self, n: int = 10) -> Rows[Item]:
        """The n pairs with the largest effects, by magnitude."""
        effects = self.effects.tolist()
        return strongest([f"pair {pair}" for pair in range(len(effects))], effects, n)


@dataclass(frozen=True, eq=False, repr=False)
class Grid(Patched):
    """Patches by block and position, or by block and head: `effects` is (layers, columns, B)."""

    what: str
    """One of STREAM or HEADS."""
    layers: list[int]
    columns: list[int]
    """Positions, or heads."""

    def label(self, row: int, column: int) -> str:
        """The label of a cell: `2_attn_out at 5`, `L2H3`, `L2H3.q`."""
        layer, at = self.layers[row], self.columns[column]
        if self.what in HEADS:
            return names.head(layer, at, "" if self.what == "head" else self.what)
        return f"{names.row(layer, self.what)} at {at}"

    def __repr__(self) -> str:
        columns = "heads" if self.what in HEADS else "positions"
        title = f"Grid: {self.what}, {len(self.layers)} blocks x {len(self.columns)} {columns}; {self._metric}"
        if self.clean.mean() == self.corrupt.mean():
            return summary(f"{title}: there is nothing to restore")
        return summary(title, self.top(SHOWN), len(self.layers) * len(self.columns))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values, one a cell: `label`, `layer`, `position` or `head`, and `value` (normalised effect)."""
        column = "head" if self.what in HEADS else "position"
        return [
            {"label": self.label(i, j), "layer": layer, column: self.columns[j], "value": value}
            for i, (layer, values) in enumerate(zip(self.layers, self.values.tolist(), strict=True))
            for j, value in enumerate(values)
        ]

    def top(self, n: int = 10) -> Rows[Item]:
        """The n cells with the largest normalised effects, by magnitude."""
        return Rows(Item(cell["label"], cell["value"]) for cell in self.to_dicts()).top(n)


def patch(
    model: GPT,
    clean: Ids,
    corrupt: Ids,
    targets: Target | list[Target],
    metric: Metric,
    *,
    mask: Tensor | None = None,
    tokenizer: "Tokenizer | None" = None,
) -> Patched:
    """Patch clean values at targets, all at once, into the corrupted pass; `effects` is (B,).

    Args:
        model: any GPT.
        clean, corrupt: ids, (B, T) both; or rows of ids, or texts, row by row of as many tokens.
        targets: one or a list: a point, `At` a part of it, `L1H3`, `L1H3.q`, `L2N17`, `0_mlp_out`.
        metric: logits (B, T, V) -> (B,); see `metrics`.
        mask: (B, T) bool, false at padding, of both.
        tokenizer: for texts, of the inputs and of the metric's tokens.

    Raises ConfigError for inputs of unequal shapes and unknown targets.
    """
    clean, corrupt, mask = paired(model, clean, corrupt, mask, tokenizer)
    metric = with_ids(metric, tokenizer)
    every = targets if isinstance(targets, list) else [targets]
    points = {locate(target, model).point for target in every}
    source = recorded(model, clean, [*points, "resid_final"], mask)
    base = recorded(model, corrupt, ["resid_final"], mask)
    tap = Intervention(model, [(target, resample(source)) for target in every])
    with torch.no_grad(), evaluating(model):
        finals = (source["resid_final"], base["resid_final"], model.stream(corrupt, mask=mask, tap=tap))
        before, without, patched = (measured(model, final, metric) for final in finals)
    return Patched(patched - without, before, without)


def patch_grid(
    model: GPT,
    clean: Ids,
    corrupt: Ids,
    metric: Metric,
    what: str = "resid_pre",
    *,
    mask: Tensor | None = None,
    tokenizer: "Tokenizer | None" = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    should_stop: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Grid:
    """Patch the clean value of one block and position, or one head, into the corrupted pass, for every cell of a grid.

        metric = ms.LogitDifference(" thee", " you")
        grid = ms.patch_grid(model, "I pray thee, sir, I pray", "I pray you, sir, I pray", metric, tokenizer=tokenizer)
        grid.top(5)  # the blocks and positions with the largest effects

    Blocks and positions before a patch are not run again, so a cell costs a part of a pass.

    Args:
        model: any GPT.
        clean, corrupt: ids, (B, T) both; or rows of ids, or texts, row by row of as many tokens.
        metric: logits (B, T, V) -> (B,); for one at a single position (`metrics.AtPosition`), only that is unembedded.
        what: `resid_pre resid_mid resid_post attn_out mlp_out`: one block at one position. `head` (its `z`),
            `q k v pattern`: one head of one block, at all positions together.
        mask: (B, T) bool, false at padding, of both.
        tokenizer: for texts, of the inputs and of the metric's tokens.
        layers: the blocks; default all.
        positions: the positions of the grid; for heads, the positions that are patched; default all.
        should_stop: called between chunks; it may raise.
        progress: called with the number of cells done and of all cells.

    Raises ConfigError for inputs of unequal shapes, an unknown `what`, blocks and positions out of range, and a metric
    that does not return a number for each row.
    """
    clean, corrupt, mask = paired(model, clean, corrupt, mask, tokenizer)
    metric = with_ids(metric, tokenizer)
    chosen, at, targets = _cells(model, corrupt.shape[1], what, layers, positions)
    with torch.no_grad(), evaluating(model):
        base = Rerun(model, corrupt, metric, mask)
        source = recorded(model, clean, [*targets, "resid_final"], mask)
        before = measured(model, source["resid_final"], metric)
        if what in HEADS:
            columns = list(range(model.config.n_head))
            changes = [
                (layer, Intervention(model, {At(target, None if positions is None else at, head): resample(source)}))
                for layer, target in zip(chosen, targets, strict=True)
                for head in columns
            ]
            patched = base.under(changes, at[0], should_stop, progress).unflatten(0, (len(chosen), -1))
        else:
            columns, patched = at, _by_position(base, source, what, chosen, at, should_stop, progress)
    return Grid(patched - base.baseline, before, base.baseline, what, chosen, columns)


def attribution_patch(
    model: GPT,
    clean: Ids,
    corrupt: Ids,
    metric: Metric,
    what: str = "resid_pre",
    *,
    mask: Tensor | None = None,
    tokenizer: "Tokenizer | None" = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> Grid:
    """Attribution patching: `patch_grid` to first order, (clean - corrupt) . the metric's gradient at corrupt.

    It takes one backward pass. The arguments and errors are those of `patch_grid`. Nanda 2023, "Attribution Patching".
    """
    clean, corrupt, mask = paired(model, clean, corrupt, mask, tokenizer)
    metric = with_ids(metric, tokenizer)
    chosen, at, targets = _cells(model, corrupt.shape[1], what, layers, positions)
    rows = len(corrupt)
    source = recorded(model, clean, [*targets, "resid_final"], mask)
    trace = capture(
        model, corrupt, [*targets, "resid_final"], mask=mask, metric=lambda logits: checked(metric(logits), rows)
    )
    with torch.no_grad(), evaluating(model):
        before, without = (measured(model, record["resid_final"], metric) for record in (source, trace))
        effects = []
        for target in targets:
            attribution = (source[target] - trace[target]) * trace.gradient(target)
            if what == "pattern":  # (B, H, T, T)
                effects.append(attribution[:, :, at].sum((2, 3)).T)
            elif what in HEADS:  # (B, T, H, D)
                effects.append(attribution[:, at].sum((1, 3)).T)
            else:  # (B, T, C)
                effects.append(attribution[:, at].sum(2).T)
    columns = list(range(model.config.n_head)) if what in HEADS else at
    return Grid(torch.stack(effects), before, without, what, chosen, columns)


def _cells(
    model: GPT,
    T: int,
    what: str,
    layers: Sequence[int] | None,
    positions: Sequence[int] | None,
) -> tuple[list[int], list[int], list[str]]:
    """The blocks and positions of a grid, and the point of each block."""
    if what not in (*STREAM, *HEADS):
        raise ConfigError(f"what: unknown value {what!r}; {nearest(what, (*STREAM, *HEADS))}")
    chosen = choose_blocks(layers, model)
    at = sorted({position(pos, T) for pos in (range(T) if positions is None else positions)})
    if not at:
        raise ConfigError("positions: empty; give at least one, or None for all")
    return chosen, at, [locate((HEADS.get(what, what), layer), model).point for layer in chosen]


def _by_position(
    base: Rerun,
    source: Record,
    what: str,
    layers: list[int],
    positions: list[int],
    should_stop: Callable[[], None],
    progress: Callable[[int, int], None],
) -> Tensor:
    """The metric of each cell, (layers, positions, B).

    Only attention moves information between positions. So a patch of a write, or of the stream, at one position changes
    the input of the next block at that position alone. One pass of the patched block computes it for all positions.
    """
    B, T = base.record.ids.shape
    later = 0 if what == "resid_pre" else 1
    entries = [layer + later for layer in layers]
    patched = [_patched(base, source, (what, layer)) for layer in layers]  # (B, T, C) each
    cells, done = base.baseline.new_empty(len(layers), len(positions), B), 0
    for rows, columns in _parts(len(layers), positions, B, T):
        should_stop()
        chosen = positions[columns]
        entering = {
            block: _at_each(base.entry(block), stream, chosen)
            for block, stream in zip(entries[rows], patched[rows], strict=True)
        }
        values = base.measure(base.final(entering, chosen[0]), chosen[0])
        cells[rows, columns] = values.unflatten(0, (len(entering), len(chosen)))
        done += len(entering) * len(chosen)
        progress(done, len(layers) * len(positions))
    return cells


def _parts(layers: int, positions: list[int], B: int, T: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the grid that are run together."""
    first = 0
    while first < len(positions):
        size = max(1, ROOM // (B * (T - positions[first])))  # copies at once
        width, height = max(1, size // layers), min(size, layers)
        for top in range(0, layers, height):
            yield slice(top, top + height), slice(first, first + width)
        first += width


def _patched(base: Rerun, source: Record, key: tuple[str, int]) -> Tensor:
    """The input of the next block, (B, T, C), with a point of a block patched at every position."""
    if key[0] == "resid_pre":
        return source[key]
    return base.left(key[1], [Intervention(base.model, {key: resample(source)})])[0]


def _at_each(stream: Tensor, patched: Tensor, positions: list[int]) -> Tensor:
    """Copies of the stream from the first position on, (positions, B, T - first, C), each patched at one position."""
    start, rows = positions[0], torch.arange(len(positions))
    copies = stream[:, start:].repeat(len(positions), 1, 1, 1)
    copies[rows, :, torch.tensor(positions) - start] = patched[:, positions].transpose(0, 1)
    return copies
