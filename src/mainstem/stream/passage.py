"""What a join does to what is in the stream, as linear maps at the statistics of one forward pass.

    x'  =  ln_add( skip * x  +  gain * ln_out( f(...) ) )

Once a norm's mean and scale are recorded it is affine, so a part of a sum goes through on its own. Each map goes both
ways: `carry` takes rows forward, and `pull`, its transpose, takes directions back: <carry(x), u> = <x, pull(u)>, so a
part can be measured along u without being carried at all.

A passage is all that a decomposition knows of a join. A join that adds with a coefficient for each token or channel is
another choice of maps. Where there are several streams, or a branch reads its own combination of the earlier writes,
what is carried is wider than the stream: `entering` and `add` put a write into it, `carry` takes it on, and `reading`
takes out what a point has; who carries rows does not look inside.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mainstem.model.block import Site
from mainstem.model.norms import Empty
from mainstem.model.sublayer import Constant, Gain, Join
from mainstem.stream.record import Record

EVERYWHERE = slice(None)


class Linear(Protocol):
    """A linear map of the stream, and its transpose; both (..., B, T, C) -> the same."""

    def carry(self, x: Tensor) -> Tensor:
        """Rows before the map, as rows after it."""
        ...

    def pull(self, u: Tensor) -> Tensor:
        """Directions after the map, as directions before it."""
        ...


@dataclass(frozen=True)
class Identity:
    """An empty slot."""

    def carry(self, x: Tensor) -> Tensor:
        """The rows themselves."""
        return x

    pull = carry


@dataclass(frozen=True)
class Scaled:
    """A factor: one number, a number for each token, (B, T, 1), or for each channel, (C,). It is its own transpose."""

    factor: Tensor | float

    def carry(self, x: Tensor) -> Tensor:
        """Factor * x; a zero is exact, also where x overflowed."""
        return torch.zeros_like(x) if isinstance(self.factor, float) and self.factor == 0 else self.factor * x

    pull = carry


class RecordedNorm(NamedTuple):
    """The linear part of a norm at the scale that it had: weight * (x - mean(x)) / scale; RMSNorm: without the mean."""

    weight: Tensor
    """(C,)."""
    centres: bool
    """Whether the mean is subtracted: LayerNorm does, RMSNorm does not."""
    scale: Tensor | None
    """(B, T, 1); None leaves the division by it out, for what is the same at every token."""
    bias: Tensor | None = None
    """(C,), where the norm has one: what it adds besides."""

    def carry(self, x: Tensor) -> Tensor:
        """Weight * centred(x) / scale."""
        return self._divided(self.weight * self._centred(x))

    def pull(self, u: Tensor) -> Tensor:
        """Centred(weight * u) / scale."""
        return self._divided(self._centred(self.weight * u))

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def _divided(self, x: Tensor) -> Tensor:
        return x if self.scale is None else x / self.scale


def recorded_norm(norm: nn.Module, scale: Tensor | None) -> Identity | RecordedNorm:
    """The norm of a slot at a scale, (B, T, 1); the identity where the slot is empty."""
    if isinstance(norm, Empty):
        return Identity()
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    return RecordedNorm(norm.weight, isinstance(norm, nn.LayerNorm), scale, getattr(norm, "bias", None))


def entering(record: Record) -> Linear:
    """What the passages carry of an embedding: itself, in each row of the residual table."""
    return Identity()


def reading(record: Record, point: str) -> Linear:
    """What a point of the stream has of what the passages carry: all of it, in each row of the residual table."""
    return Identity()


def final_norm(record: Record, positions: slice = EVERYWHERE) -> Identity | RecordedNorm:
    """`ln_f` at its recorded scales."""
    norm = record.model.ln_f
    return recorded_norm(norm, None if isinstance(norm, Empty) else record["ln_f.scale"][:, positions])


def factor(slot: nn.Module) -> Identity | Scaled:
    """The map of a slot that multiplies: `skip` or `gain`. It follows from the weights alone."""
    if isinstance(slot, Constant):
        return Scaled(slot.value)
    return Scaled(slot.weight) if isinstance(slot, Gain) else Identity()


class Passage:
    """One join at the statistics of one pass, at some positions.

    Args:
        record: of the pass.
        site: the join.
        positions: those at which the rows stand.
    """

    def __init__(self, record: Record, site: Site, positions: slice = EVERYWHERE):
        self._record, self.site, self._positions = record, site, positions
        self.skip, self.gain = factor(site.join.skip), factor(site.join.gain)

    def norm(self, slot: str) -> Identity | RecordedNorm:
        """The norm in `ln_in`, `ln_out` or `ln_add` at its recorded scales."""
        point = self.site.scale(slot)
        scale = None if point is None else self._record[point][:, self._positions]
        return recorded_norm(getattr(self.site.join, slot), scale)

    @cached_property
    def over(self) -> Identity | RecordedNorm:
        """`ln_add`, the norm over the sum."""
        return self.norm("ln_add")

    @cached_property
    def out(self) -> Identity | RecordedNorm:
        """`ln_out`, the norm on what the branch returns."""
        return self.norm("ln_out")

    @property
    def constant(self) -> Tensor | None:
        """What the join adds by itself, (C,): the bias of `ln_add`; None where there is none."""
        return getattr(self.over, "bias", None)

    def carry(self, x: Tensor) -> Tensor:
        """What was in the stream before the join, as it is after it."""
        return self.add(self.skip.carry(x))

    def add(self, write: Tensor) -> Tensor:
        """What is added at the join, as it is in the stream after it."""
        return self.over.carry(write)

    def returned(self, x: Tensor) -> Tensor:
        """A part of what the branch returns, as it is added: through `ln_out` and gain."""
        return self.gain.carry(self.out.carry(x))

    def pull(self, u: Tensor) -> "Pulled":
        """A direction after the join, as it was before it: in the stream, and in what is added."""
        at_write = self.over.pull(u)
        return Pulled(self.skip.pull(at_write), at_write)

    def pull_returned(self, u: Tensor) -> Tensor:
        """A direction in what is added, as one in what the branch returns."""
        return self.out.pull(self.gain.pull(u))


class Pulled(NamedTuple):
    """A direction, (..., B, T, C), pulled back through a join."""

    stream: Tensor
    """In the stream before it."""
    write: Tensor
    """In what it adds."""


def passages(record: Record, count: int | None = None, positions: slice = EVERYWHERE) -> Iterator[Passage]:
    """The joins of a pass in order; the first `count` of them, all if None."""
    return (Passage(record, site, positions) for site in record.model.joins()[:count])


def skip_factor(join: Join) -> float:
    """The number by which a join multiplies the stream before it adds to it."""
    skip = factor(join.skip)
    return float(skip.factor) if isinstance(skip, Scaled) else 1.0
