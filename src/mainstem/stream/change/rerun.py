"""A pass that was recorded, of which only the part that a change can reach is run again.

A change in block l leaves every block before l as it was; and, attention being causal, a change at position t leaves
every position before t as it was. So the record keeps the stream before each block, where a rerun enters, and each
block's keys and values, which the positions that run again read as they would from a cache.

Many changes are measured in one sweep up the stack. The changed copies of the batch join it where each one's change is
behind it, so each block runs once for all that have joined, in one large product.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model import names
from mainstem.model.attention import View
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.tap import Recorder, Scope
from mainstem.stream.change.intervene import Copies, Intervention
from mainstem.stream.ids import Ids, padded
from mainstem.stream.metrics import AtPosition, Metric, checked, measured
from mainstem.stream.points import position
from mainstem.stream.record import Record

ROOM = 1024
"""Positions that are run at once, all copies together: enough to fill a product, and little memory. A copy that is
longer runs alone."""


def recorded(model: GPT, ids: Ids, points: Iterable[str], mask: Tensor | None = None) -> Record:
    """One pass in evaluation mode and without gradients, recorded at points by our names.

    Raises what `padded` refuses.
    """
    ids, mask = padded(model, ids, mask)
    tap = Recorder(points)
    with torch.no_grad(), evaluating(model):
        model.stream(ids, mask=mask, tap=tap)
    return Record(model, ids, mask, tap.values, None)


def choose_blocks(layers: Sequence[int] | None, model: GPT) -> list[int]:
    """The blocks chosen, in order; all if None. Raises ConfigError for none, and for one that is not there."""
    L = len(model.blocks)
    chosen = range(L) if layers is None else layers
    if isinstance(chosen, int):
        raise ConfigError(f"layers: {chosen} is one number; give a list of blocks, [{chosen}]")
    for layer in chosen:
        if not -L <= layer < L:
            raise ConfigError(f"layers: {layer} is out of range; the model has {L} blocks, from 0")
    if not chosen:
        raise ConfigError(f"layers: there is no block among them; the model has {L}")
    return sorted({layer % L for layer in chosen})


class Prefix(NamedTuple):
    """A block's slot of a cache: keys and values of the positions that are not run again, for any number of copies."""

    keys: Tensor  # (B, H, start, D)
    values: Tensor  # (B, H, start, D)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of n copies, (n B, H, T - start, D) -> (n B, H, T, D)."""
        n = k.shape[0] // self.keys.shape[0]
        return torch.cat([self.keys.repeat(n, 1, 1, 1), k], 2), torch.cat([self.values.repeat(n, 1, 1, 1), v], 2)


class Rerun:
    """A pass, measured, whose end can be run again under changes. To be used within `no_grad` and `evaluating`.

    Args:
        model: any GPT.
        ids: (B, T).
        metric: of the logits, (B,).
        mask: (B, T) bool, false at padding.
        points: what else is recorded.
    """

    def __init__(self, model: GPT, ids: Ids, metric: Metric, mask: Tensor | None = None, points: Iterable[str] = ()):
        inside = ("resid_pre", "attn.k", "attn.v")
        kept = [names.point(name, index) for index in range(len(model.blocks)) for name in inside]
        self.model, self.metric = model, metric
        self.record = recorded(model, ids, [*kept, "resid_final", *points], mask)
        self.baseline = measured(model, self.record["resid_final"], metric)  # (B,)

    def entry(self, block: int) -> Tensor:
        """The stream, (B, T, C), before a block; before the one after the last, what `ln_f` reads."""
        last = block == len(self.model.blocks)
        return self.record.values[names.FINAL if last else names.point("resid_pre", block)]

    def left(self, block: int, taps: Sequence[Intervention]) -> Tensor:
        """The stream after a block, (n, B, T, C), for n interventions inside it."""
        n = len(taps)
        x, scope = self.entry(block).repeat(n, 1, 1), Scope(Copies(taps), names.point("", block))
        return self.model.blocks[block](x, self._view(n), None, scope).unflatten(0, (n, -1))

    def final(self, entering: Mapping[int, Tensor], start: int = 0) -> Tensor:
        """`resid_final` of all copies, (n, B, T - start, C), when each has gone through the blocks left to it.

        Args:
            entering: block -> the copies that are first changed there, (n, B, T - start, C); block L is the end.
            start: the first position that differs in any of them.

        They are in the order of their blocks.
        """
        B, L = self.record.ids.shape[0], len(self.model.blocks)
        live: list[Tensor] = []
        for block in range(min(entering), L + 1):
            if block in entering:
                live.append(entering[block].flatten(0, 1))
            x = torch.cat(live)  # (n B, T - start, C)
            if block < L:
                x = self.model.blocks[block](x, self._view(len(x) // B, start), self._prefix(block, start))
            live = [x]
        return x.unflatten(0, (-1, B))

    def measure(self, final: Tensor, start: int = 0) -> Tensor:
        """The metric of each copy, (n, B), by what `final` returned."""
        B, T = self.record.ids.shape
        if not isinstance(self.metric, AtPosition):
            before = self.record.logits[:, :start]
            every = (torch.cat([before, self.model.unembed(copy)], dim=1) for copy in final)
            return torch.stack([checked(self.metric(logits), B) for logits in every])
        pos = position(self.metric.pos, T)
        if pos < start:
            return self.baseline.expand(len(final), -1)
        return torch.stack([checked(self.metric.at(x), B) for x in self.model.unembed(final[:, :, pos - start])])

    def under(
        self,
        changes: Sequence[tuple[int, Intervention]],
        start: int = 0,
        should_stop: Callable[[], None] = lambda: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Tensor:
        """The metric under each change alone, (n, B).

        Args:
            changes: each a block, and what is changed inside it; in the order of the blocks.
            start: the first position that any of them changes.
            should_stop: called between chunks; it may raise.
            progress: called with the changes done and their number.
        """
        B, T = self.record.ids.shape
        size, parts = max(1, ROOM // (B * (T - start))), []
        for first in range(0, len(changes), size):
            should_stop()
            groups = groupby(changes[first : first + size], key=lambda change: change[0])
            entering = {block + 1: self.left(block, [tap for _, tap in group])[:, :, start:] for block, group in groups}
            parts.append(self.measure(self.final(entering, start), start))
            progress(min(first + size, len(changes)), len(changes))
        return torch.cat(parts)

    def _view(self, n: int, start: int = 0) -> View:
        """What n copies' queries from `start` on may see."""
        T, view = self.record.ids.shape[1], self.record.view
        mask = view.mask
        if mask is None and start:
            mask = view.mask_for(T, T, self.record.ids.device)[None, None]
        if mask is not None:
            mask = _copied(mask[:, :, start:], n)
        rotation = view.rotation and (_copied(view.rotation[0][:, start:], n), _copied(view.rotation[1][:, start:], n))
        return View(mask, causal=mask is None, rotation=rotation)

    def _prefix(self, block: int, start: int) -> Prefix | None:
        if start == 0:
            return None
        k, v = (self.record.values[names.point(f"attn.{name}", block)] for name in "kv")  # (B, T, H, D)
        return Prefix(k[:, :start].transpose(1, 2), v[:, :start].transpose(1, 2))


def _copied(x: Tensor, n: int) -> Tensor:
    """(B, ...), four axes, for n copies of the batch; one row serves all of them as it is."""
    return x if x.shape[0] == 1 else x.repeat(n, 1, 1, 1)
