"""Where in a text a head or a neuron does most: its strongest contexts, from windows that are read once and let go.

A neuron's value is its activation as `c_proj` reads it, `mlp.post`. A head's is the length of what it adds to the
stream, and not its largest attention: a head with nothing to do puts all its attention on the first token, and writes
little. For the same reason its source is the position that most of the write comes from, by attention times the length
of what reading that position alone would write (Kobayashi et al. 2020, "Attention is Not Only a Weight").

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
    """The position that most of a head's write comes from."""

    position: int
    """In the window."""
    token: int
    attention: float
    """The head's weight on it, from 0 to 1."""


@dataclass(frozen=True)
class Context:
    """One place of a text, and what a head or a neuron does there."""

    value: float
    """The neuron's activation, or the length of the head's write."""
    window: int
    """The number of the row, from 0, through all batches."""
    position: int
    """In the window."""
    ids: list[int]
    """The tokens from `start` on, around the position."""
    start: int
    """The position of the first of `ids`."""
    source: Read | None = None
    """A head's."""

    @property
    def label(self) -> str:
        """The place."""
        return f"window {self.window} at {self.position}"


Windows = Iterable[Tensor | np.ndarray]
"""Batches of ids, each (B, T)."""


def neuron_contexts(
    model: GPT, windows: Windows, layer: int, neuron: int, top: int = 10, around: int = 8
) -> Rows[Context]:
    """The places where a neuron's activation is largest, largest first.

    Args:
        model: any GPT. It is read in evaluation mode, up to the block and no further.
        windows: batches of ids, each (B, T); one is held at a time.
        layer, neuron: which one.
        top: how many places to return.
        around: how many tokens are shown on each side of a place.

    Raises ConfigError for a block or a neuron that the model does not have, and DataError where there are no windows.
    """
    block = _block(model, layer)
    if block.mlp is None:
        raise ConfigError(f"neuron: block {layer} has no MLP; ask for the contexts of a head")
    _check("neuron", neuron, block.mlp.c_proj.in_features)
    return _strongest(model, windows, layer, _Neuron(neuron), top, around)


def head_contexts(model: GPT, windows: Windows, layer: int, head: int, top: int = 10, around: int = 8) -> Rows[Context]:
    """The places where a head writes most, most first, each with the source that it reads there.

    What a head writes is its row of `decompose(by="head")`: without the share of the values' bias, which is the same
    everywhere. The arguments and errors are those of `neuron_contexts`, with `head` instead of `neuron`.
    """
    _check("head", head, _block(model, layer).attn.n_head)
    return _strongest(model, windows, layer, _Head(model, layer, head), top, around)


class _Neuron:
    """What is looked at for a neuron."""

    points: tuple[str, ...] = ("mlp.post",)

    def __init__(self, neuron: int):
        self._neuron = neuron

    def value(self, at: dict[str, Tensor]) -> Tensor:
        """(B, T)."""
        return at["mlp.post"][..., self._neuron]

    def source(self, at: dict[str, Tensor], row: int, position: int) -> tuple[int, float] | None:
        """None: an MLP reads its own position alone."""
        return None


class _Head:
    """What is looked at for a head: all its writes, and its pattern at the strongest places alone."""

    def __init__(self, model: GPT, layer: int, head: int):
        attn, written = _block(model, layer).attn, writer(model, names.head(layer, head))
        self._head, self._scale = head, attn.scale
        self._length = triangle(written.matrix.T)  # |z @ matrix| = |z @ length.T|
        self._norms = [names.split(scale)[1] for scale in written.scales]
        self.points = ("attn.q", "attn.k", "attn.v", "attn.z", *self._norms)
        self._bias = self._length.new_zeros(()) if attn.b_V is None else attn.b_V[head]

    def value(self, at: dict[str, Tensor]) -> Tensor:
        """(B, T)."""
        lengths = self._lengths(at["attn.z"])
        for norm in self._norms:
            lengths = lengths / at[norm][..., 0]
        return lengths

    def source(self, at: dict[str, Tensor], row: int, position: int) -> tuple[int, float] | None:
        """The position that most of the write comes from, and the attention that it gets."""
        seen = slice(position + 1)
        q, k = at["attn.q"][row, position, self._head], at["attn.k"][row, seen, self._head]
        attention = (self._scale * k @ q).softmax(0)  # (position + 1,)
        best = int((attention * self._lengths(at["attn.v"][row, seen])).argmax())
        return best, attention[best].item()

    def _lengths(self, values: Tensor) -> Tensor:
        """(..., H, D) -> (...): how long they are once the head has written them."""
        return ((values[..., self._head, :] - self._bias).to(self._length.dtype) @ self._length.T).norm(dim=-1)


def _strongest(
    model: GPT, windows: Windows, layer: int, unit: _Neuron | _Head, count: int, around: int
) -> Rows[Context]:
    """The places of the largest values, of which no more than `count` are kept on the way."""
    if count < 1 or around < 0:
        raise ConfigError(f"top: {count} places with {around} tokens around; give at least 1 and at least 0")
    best: list[Context] = []
    seen = 0
    with torch.no_grad(), evaluating(model):
        for batch in windows:
            ids, _ = padded(model, torch.as_tensor(batch))
            at = _inside(model, ids, layer, unit.points)
            values = unit.value(at)
            top, places = (column[:count].tolist() for column in values.flatten().sort(descending=True, stable=True))
            for value, place in zip(top, places, strict=True):
                if len(best) < count or value > best[-1].value:
                    row, position = divmod(place, ids.shape[1])
                    context = _context(ids[row], value, seen + row, position, around, unit.source(at, row, position))
                    best = sorted([*best, context], key=lambda each: each.value, reverse=True)[:count]
            seen += len(ids)
    if not seen:
        raise DataError("windows: there are none, so no place is the strongest; an iterator can be read only once")
    return Rows(best, "places: the value at each")


def _context(
    ids: Tensor, value: float, window: int, position: int, around: int, source: tuple[int, float] | None
) -> Context:
    start = max(0, position - around)
    shown = ids[start : position + around + 1].tolist()
    read = None if source is None else Read(source[0], int(ids[source[0]]), source[1])
    return Context(value, window, position, shown, start, read)


def _inside(model: GPT, ids: Tensor, layer: int, points: Iterable[str]) -> dict[str, Tensor]:
    """Points of a block by their names within it; later blocks are not run."""
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
