"""Rerun of a recorded pass under changes, limited to the blocks and positions that a change can affect.

A change in block l does not affect earlier blocks, and since attention is causal, a change at position t does not
affect earlier positions. So the record has the stream before each block, where a rerun starts, and each block's keys
and values, which rerun positions read as from a KV cache.

Many changes are measured in one sweep through the blocks. Each changed copy of the batch joins after its changed block,
so every block runs once, on one large batch.
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
"""Positions per pass over all copies: large enough for efficient products, with little memory. A longer copy runs
alone."""


def recorded(model: GPT, ids: Ids, points: Iterable[str], mask: Tensor | None = None) -> Record:
    """Record points of one pass, in evaluation mode and without gradients.

    Raises as `padded` does.
    """
    ids, mask = padded(model, ids, mask)
    tap = Recorder(points)
    with torch.no_grad(), evaluating(model):
        model.stream(ids, mask=mask, tap=tap)
    return Record(model, ids, mask, tap.values, None)


def choose_blocks(layers: Sequence[int] | None, model: GPT) -> list[int]:
    """The chosen blocks in order; all if None. Raises ConfigError for an empty choice and a block out of range."""
    L = len(model.blocks)
    chosen = range(L) if layers is None else layers
    if isinstance(chosen, int):
        raise ConfigError(f"layers: {chosen} is one number; give a list of blocks, [{chosen}]")
    for layer in chosen:
        if not -L <= layer < L:
            raise ConfigError(f"layers: {layer} is out of range; the model has {L} blocks, from 0")
    if not chosen:
        raise ConfigError(f"layers: empty; give at least one of the model's {L} blocks")
    return sorted({layer % L for layer in chosen})


class Prefix(NamedTuple):
    """The KV cache entry of a block for a rerun: keys and values of earlier positions, for any number of copies."""

    keys: Tensor  # (B, H, start, D)
    values: Tensor  # (B, H, start, D)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Prepend the earlier keys and values for n copies, (n B, H, T - start, D) -> (n B, H, T, D)."""
        n = k.shape[0] // self.keys.shape[0]
        return torch.cat([self.keys.repeat(n, 1, 1, 1), k], 2), torch.cat([self.values.repeat(n, 1, 1, 1), v], 2)


class Rerun:
    """A recorded pass with its metric, which can be rerun under changes. Use it within `no_grad` and `evaluating`.

    Args:
        model: any GPT.
        ids: (B, T).
        metric: logits (B, T, V) -> (B,).
        mask: (B, T) bool, false at padding.
        points: further points to record.
    """

    def __init__(self, model: GPT, ids: Ids, metric: Metric, mask: Tensor | None = None, points: Iterable[str] = ()):
        inside = ("resid_pre", "attn.k", "attn.v")
        entries = [names.point(name, index) for index in range(len(model.blocks)) for name in inside]
        self.model, self.metric = model, metric
        self.record = recorded(model, ids, [*entries, "resid_final", *points], mask)
        self.baseline = measured(model, self.record["resid_final"], metric)  # (B,)

    def entry(self, block: int) -> Tensor:
        """The stream before a block, (B, T, C); for the index after the last block, the input of `ln_f`."""
        last = block == len(self.model.blocks)
        return self.record.values[names.FINAL if last else names.point("resid_pre", block)]

    def left(self, block: int, taps: Sequence[Intervention]) -> Tensor:
        """The stream after a block, (n, B, T, C), for n interventions inside it."""
        n = len(taps)
        x, scope = self.entry(block).repeat(n, 1, 1), Scope(Copies(taps), names.point("", block))
        return self.model.blocks[block](x, self._view(n), None, scope).unflatten(0, (n, -1))

    def final(self, entering: Mapping[int, Tensor], start: int = 0) -> Tensor:
        """`resid_final` of all copies, (n, B, T - start, C), in the order of the blocks at which they enter.

        Args:
            entering: block -> the copies of the stream that enter before it, (n, B, T - start, C); L is after the last.
            start: the first position at which a copy differs.
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
        """The metric of each copy, (n, B), from the result of `final`."""
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
            changes: pairs of a block and an intervention inside it, in the order of the blocks.
            start: the first position that is changed.
            should_stop: called between chunks; it may raise.
            progress: called with the number of changes done and of all changes.
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
        """The mask and rotation for n copies of the positions from `start` on."""
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
    """A tensor (B, ...) of four axes repeated for n copies of the batch; a single row is returned as it is."""
    return x if x.shape[0] == 1 else x.repeat(n, 1, 1, 1)
