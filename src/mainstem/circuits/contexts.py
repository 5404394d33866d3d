"""The contexts in which a head or a neuron is strongest, from batches of windows that are read once.

A neuron's value is its activation as `c_proj` reads it, `mlp.post`. A head's value is the norm of its write to the
stream, not its largest attention weight: an inactive head attends to the first token and writes little. Its source is
the position that contributes most to the write, by attention weight times the norm of what that position alone would
write (Kobayashi et al. 2020, "Attention is Not Only a Weight").

B windows, T positions, C d_model, H heads, D d_head.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mainstem.circuits.factors import triangle
from mainstem.circuits.weights import writer
from mainstem.errors import ConfigError, DataError
from mainstem.model import names
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.tap import Recorder, Scope
from mainstem.results import Rows
from mainstem.stream.ids import padded


@dataclass(frozen=True)
class Read:
    """The position that contributes most to a head's write."""

    position: int
    """The position in the window."""
    token: int
    attention: float
    """The attention weight on the position, from 0 to 1."""


@dataclass(frozen=True)
class Context:
    """One position of a text, and the value of a head or a neuron at it."""

    value: float
    """The neuron's activation, or the norm of the head's write."""
    window: int
    """The index of the window, from 0, counted through all batches."""
    position: int
    """The position in the window."""
    ids: list[int]
    """The tokens from `start` on, around the position."""
    start: int
    """The position of the first of `ids`."""
    source: Read | None = None
    """The source of a head's write; None for a neuron."""

    @property
    def label(self) -> str:
        """The window and the position: `window 3 at 17`."""
        return f"window {self.window} at {self.position}"


Batches = Iterable[Tensor | np.ndarray]
"""Batches of ids, each (B, T)."""


def neuron_contexts(
    model: GPT, windows: Batches, layer: int, neuron: int, top: int = 10, around: int = 8
) -> Rows[Context]:
    """The positions at which a neuron's activation is largest, largest first.

    Args:
        model: any GPT. It is run in evaluation mode, up to this block.
        windows: batches of ids, each (B, T); one is in memory at a time.
        layer, neuron: the block and the neuron, from 0.
        top: how many positions to return.
        around: how many tokens to show on each side of a position.

    Raises ConfigError for a block or a neuron that the model does not have, DataError without windows.
    """
    block = _block(model, layer)
    if block.mlp is None:
        raise ConfigError(f"neuron: block {layer} has no MLP; use the contexts of a head")
    _check("neuron", neuron, block.mlp.c_proj.in_features)
    return _strongest(model, windows, layer, _Neuron(neuron), top, around)


def head_contexts(model: GPT, windows: Batches, layer: int, head: int, top: int = 10, around: int = 8) -> Rows[Context]:
    """The positions at which a head's write is largest, largest first, each with its source.

    A head's write is its row of `decompose(by="head")`, without the part from the values' bias, which is the same at
    every position. The arguments and errors are those of `neuron_contexts`, with `head` instead of `neuron`.
    """
    _check("head", head, _block(model, layer).attn.n_head)
    return _strongest(model, windows, layer, _Head(model, layer, head), top, around)


class _Neuron:
    """The activation of one neuron."""

    points: tuple[str, ...] = ("mlp.post",)

    def __init__(self, neuron: int):
        self._neuron = neuron

    def value(self, at: dict[str, Tensor]) -> Tensor:
        """The activation, (B, T)."""
        return at["mlp.post"][..., self._neuron]

    def source(self, at: dict[str, Tensor], row: int, position: int) -> tuple[int, float] | None:
        """No source: an MLP reads only its own position."""
        return None


class _Head:
    """The write norms of one head; its attention pattern is computed at the strongest positions only."""

    def __init__(self, model: GPT, layer: int, head: int):
        attn, written = _block(model, layer).attn, writer(model, names.head(layer, head))
        self._head, self._scale = head, attn.scale
        self._length = triangle(written.matrix.T)  # |z @ matrix| = |z @ length.T|
        self._norms = [names.split(scale)[1] for scale in written.scales]
        self.points = ("attn.q", "attn.k", "attn.v", "attn.z", *self._norms)
        self._bias = self._length.new_zeros(()) if attn.b_V is None else attn.b_V[head]

    def value(self, at: dict[str, Tensor]) -> Tensor:
        """The norm of the head's write, (B, T)."""
        lengths = self._lengths(at["attn.z"])
        for norm in self._norms:
            lengths = lengths / at[norm][..., 0]
        return lengths

    def source(self, at: dict[str, Tensor], row: int, position: int) -> tuple[int, float] | None:
        """The position that contributes most to the write, and its attention weight."""
        before = slice(position + 1)
        q, k = at["attn.q"][row, position, self._head], at["attn.k"][row, before, self._head]
        attention = (self._scale * k @ q).softmax(0)  # (position + 1,)
        best = int((attention * self._lengths(at["attn.v"][row, before])).argmax())
        return best, attention[best].item()

    def _lengths(self, values: Tensor) -> Tensor:
        """The norms, (...), of what the head writes for values (..., H, D)."""
        return ((values[..., self._head, :] - self._bias).to(self._length.dtype) @ self._length.T).norm(dim=-1)


def _strongest(
    model: GPT, windows: Batches, layer: int, unit: _Neuron | _Head, count: int, around: int
) -> Rows[Context]:
    """The positions of the `count` largest values; no more than `count` are kept at a time."""
    if count < 1 or around < 0:
        raise ConfigError(f"top: {count} positions with {around} tokens around; give at least 1 and at least 0")
    best: list[Context] = []
    windows_read = 0
    with torch.no_grad(), evaluating(model):
        for batch in windows:
            ids, _ = padded(model, torch.as_tensor(batch))
            at = _inside(model, ids, layer, unit.points)
            values = unit.value(at)
            top, places = (column[:count].tolist() for column in values.flatten().sort(descending=True, stable=True))
            for value, place in zip(top, places, strict=True):
                if len(best) < count or value > best[-1].value:
                    row, position = divmod(place, ids.shape[1])
                    source = unit.source(at, row, position)
                    context = _context(ids[row], value, windows_read + row, position, around, source)
                    best = sorted([*best, context], key=lambda each: each.value, reverse=True)[:count]
            windows_read += len(ids)
    if not windows_read:
        raise DataError("windows: empty; give at least one batch (an iterator can be read only once)")
    return Rows(best, "positions: the value at each")


def _context(
    ids: Tensor, value: float, window: int, position: int, around: int, source: tuple[int, float] | None
) -> Context:
    start = max(0, position - around)
    shown = ids[start : position + around + 1].tolist()
    read = None if source is None else Read(source[0], int(ids[source[0]]), source[1])
    return Context(value, window, position, shown, start, read)


def _inside(model: GPT, ids: Tensor, layer: int, points: Iterable[str]) -> dict[str, Tensor]:
    """The tensors at points of a block, by their names within the block; later blocks are not run."""
    x, view = model.embed(ids)
    for block in model.blocks[:layer]:
        x = block(x, view)
    prefix = names.point("", layer)
    tap = Recorder([prefix + point for point in points])
    model.blocks[layer](x, view, None, Scope(tap, prefix))
    return {point.removeprefix(prefix): value for point, value in tap.values.items()}


def _block(model: GPT, layer: int) -> Block:
    _check("layer", layer, len(model.blocks))
    block = model.blocks[layer]
    assert isinstance(block, Block)
    return block


def _check(what: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ConfigError(f"{what}: {index} is not in this model, which has {count}, from 0")
