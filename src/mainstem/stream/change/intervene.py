"""Interventions: what if this had not been there, or something else had been there?

An intervention is a tap that puts another tensor in the place of a point, or of a part of one:

    tap = Intervention(model, {"L1H3": zero(), ("mlp_out", 2): mean(trace), At("resid_pre4", pos=-1): add(vector)})
    logits = model(ids, tap=tap)
    text = generate(model, tokenizer, "ROMEO:", max_new_tokens=50, tap=tap)

Steering while it generates, ablating and patching are this one tap with other changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.names import parse_label
from mainstem.stream.points import Key, resolve
from mainstem.stream.record import Record

Change = Callable[[Tensor], Tensor]
"""What is there -> what is to be there, of the same shape."""
Index = int | Sequence[int] | None
"""One of an axis, which the part then lacks; several, which it keeps; or None for all."""

_PARTS = {"head": ("z", "q", "k", "v", "pattern"), "neuron": ("post", "pre")}
"""What may be changed of a unit; the first is meant by its label alone."""


@dataclass(frozen=True)
class At:
    """A part of a point."""

    target: Key
    """A point, by any name; or a label: `L1H3`, `L1H3.q`, `L2N17`, `0_mlp_out`."""
    pos: Index = None
    """Columns of the window, padding included; -1 is the last of the pass. Of `pattern`, the queries'."""
    units: Index = None
    """Heads of `q k v z pattern`; neurons of `mlp.pre` and `mlp.post`."""

    def __post_init__(self) -> None:
        for name in ("pos", "units"):  # tuples, so that it can be a key of a dict
            index = getattr(self, name)
            if not isinstance(index, int | Sequence | None) or isinstance(index, str):
                raise ConfigError(f"{name}: {index!r} does not say which; give a number, a list of them or a range")
            object.__setattr__(self, name, index if isinstance(index, int | None) else tuple(index))


Target = Key | At
AnyTarget = TypeVar("AnyTarget", bound=Target)


@dataclass(frozen=True)
class Spot:
    """A target as a model of ours has it: a point, and which part of its tensor."""

    point: str
    pos: Index = None
    units: Index = None

    @property
    def of_pattern(self) -> bool:
        """Whether the axes are (B, H, T, T), not (B, T, ...)."""
        return self.point.endswith(".pattern")

    def part(self, tensor: Tensor) -> Tensor:
        """The part, of the point's whole tensor. Raises ConfigError for a position that the tensor does not have."""
        for axis, index in self._indices:
            tensor = tensor[_where(axis, index, tensor)]
        return tensor

    def changed(self, tensor: Tensor, change: Change) -> Tensor:
        """The whole tensor, with the part changed; itself it stays as it is."""
        return _changed(tensor, self._indices, change)

    @property
    def _indices(self) -> list[tuple[int, int | Sequence[int]]]:
        """(axis, index), the last axis first: then an axis that is dropped moves none of those to come."""
        pos, units = ((2, self.pos), (1, self.units)) if self.of_pattern else ((1, self.pos), (2, self.units))
        return [(axis, index) for axis, index in sorted((pos, units), reverse=True) if index is not None]


def _where(axis: int, index: int | Sequence[int], tensor: Tensor) -> tuple[slice | int | list[int], ...]:
    size, every = tensor.shape[axis], [index] if isinstance(index, int) else list(index)
    for i in every:
        if not -size <= i < size:
            raise ConfigError(f"pos: {i} is out of range; the pass has {size} positions, from 0")
    if not every or len({i % size for i in every}) < len(every):
        raise ConfigError(f"pos: {every} names nothing, or one thing twice; name each once")
    return *[slice(None)] * axis, index if isinstance(index, int) else list(index)


def _changed(tensor: Tensor, indices: list[tuple[int, int | Sequence[int]]], change: Change) -> Tensor:
    if indices:
        where = _where(*indices[0], tensor)
        whole = tensor.clone()
        whole[where] = _changed(tensor[where], indices[1:], change)
        return whole
    new = change(tensor)
    if not isinstance(new, Tensor):
        raise ConfigError(f"a change returned {type(new).__name__}; it must return a tensor (was it called? zero())")
    if new.shape != tensor.shape:
        raise ConfigError(f"a change returned {tuple(new.shape)} for what is {tuple(tensor.shape)}; return its shape")
    return new


def locate(target: Target, model: GPT) -> Spot:
    """Where a target is.

    Raises ConfigError, with the nearest name, for one that the model does not have; for a norm's statistics and for
    what is derived from other points, which cannot be changed; and for a head or neuron that is out of range.
    """
    at = target if isinstance(target, At) else At(target)
    key, units = _spelled(at.target)
    if units is not None and at.units is not None:
        raise ConfigError(f"units: {at.target!r} names one already; give a point, or leave units out")
    point, chosen = resolve(key, model), at.units if units is None else units
    if point.endswith((".mean", ".scale")):
        raise ConfigError(f"point: {point!r} is a statistic of a norm; it is read only. Change what the norm reads")
    if point not in model.points():
        raise ConfigError(f"point: {point!r} is computed from others and cannot be changed; change those")
    if chosen is not None:
        _check_units(point, chosen, model.config)
    return Spot(point, at.pos, chosen)


def _spelled(target: Key) -> tuple[Key, int | None]:
    """A point's name for a label that results use, and the head or neuron that it names."""
    label = parse_label(target) if isinstance(target, str) else None
    if label is None or label.block is None:
        return target, None
    if label.unit is None:
        return ((label.name, label.block) if label.name in ("attn_out", "mlp_out") else target), None
    part = label.part or _PARTS[label.name][0]
    return ((part, label.block), label.unit) if part in _PARTS[label.name] else (target, None)


def _check_units(point: str, units: int | Sequence[int], config: ModelConfig) -> None:
    if ".attn." not in point and ".mlp." not in point:
        raise ConfigError(f"units: {point!r} is of the stream, and has neither heads nor neurons")
    what, size = ("heads", config.n_head) if ".attn." in point else ("neurons", config.d_mlp)
    for unit in [units] if isinstance(units, int) else units:
        if not 0 <= unit < size:
            raise ConfigError(f"units: {unit} is out of range; {point!r} has {size} {what}, from 0")


@dataclass(frozen=True, eq=False)
class Referred:
    """A change whose value is read elsewhere, at the target that it is put to."""

    reference: Record | Tensor
    """A record; or the point's whole tensor, as a record gives it."""
    make: Callable[[Spot, Tensor, Tensor | None], Change]
    """(target, the point's whole tensor, the record's mask) -> the change."""

    def at(self, spot: Spot) -> Change:
        """The change at a target."""
        if isinstance(self.reference, Record):
            return self.make(spot, self.reference[spot.point], self.reference.mask)
        axes = 4 if ".attn." in spot.point else 3
        if self.reference.ndim != axes:
            shape = tuple(self.reference.shape)
            raise ConfigError(f"a reference of shape {shape} is not the whole of {spot.point!r}, which has {axes} axes")
        return self.make(spot, self.reference, None)


def zero() -> Change:
    """Zeros."""
    return torch.zeros_like


def set_to(value: Tensor | float) -> Change:
    """The value, which must fit the part's shape by broadcasting."""
    return lambda x: _fit(torch.as_tensor(value), x)


def add(vector: Tensor | float, scale: float = 1.0) -> Change:
    """What is there, and scale times the vector: steering (Turner et al. 2023, "Activation Addition")."""
    return lambda x: x + scale * _fit(torch.as_tensor(vector), x)


def mean(reference: Record | Tensor) -> Referred:
    """The mean over the reference's rows and positions, padding left out; of `pattern`, over its rows."""
    return Referred(reference, _mean)


def resample(other: Record | Tensor) -> Referred:
    """What another pass had there, row by row; one row serves all (Chan et al. 2022, "Causal Scrubbing")."""
    return Referred(other, _resample)


def _mean(spot: Spot, value: Tensor, mask: Tensor | None) -> Change:
    if spot.of_pattern:  # over positions it would look ahead
        return set_to(spot.part(value.mean(0, keepdim=True)))
    tokens = Spot(spot.point, units=spot.units).part(value)  # (B, T, ...)
    return set_to((tokens.flatten(0, 1) if mask is None else tokens[mask.bool()]).mean(0))


def _resample(spot: Spot, value: Tensor, mask: Tensor | None) -> Change:
    part = spot.part(value)

    def change(x: Tensor) -> Tensor:
        if part.shape not in (x.shape, (1, *x.shape[1:])):
            raise ConfigError(
                f"resample: {spot.point!r} is {tuple(part.shape)} in the other pass and {tuple(x.shape)} here; "
                "give passes of the same shape"
            )
        return _fit(part, x)

    return change


def _fit(value: Tensor, like: Tensor) -> Tensor:
    try:
        return value.to(like).expand_as(like)
    except RuntimeError:
        raise ConfigError(f"a value of shape {tuple(value.shape)} does not fit {tuple(like.shape)}") from None


class _Changes:
    """A tap that makes changes at points, in order."""

    def __init__(self, changes: Mapping[str, Sequence[tuple[Spot, Change]]]):
        self._changes = changes
        self.points = frozenset(changes)

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """The tensor with this point's changes made."""
        for spot, change in self._changes.get(point, ()):
            tensor = spot.changed(tensor, change)
        return tensor


class Intervention(_Changes):
    """A tap that changes targets of a model.

    Args:
        model: whose targets they are.
        changes: target -> change. As pairs, a target may come twice; changes at one point are made in the order given.

    It holds no state, and may be used with any number of passes. Positions count from the beginning of the window, also
    in a pass that continues a KV cache: a change is made when its position is read, and what later ones attend to is
    changed with it. Positions from the end (-1) are those of a whole pass, and refused in one that continues a cache.

    Raises ConfigError as `locate` does; during a pass, for a position that it does not have and values that do not fit.
    """

    def __init__(
        self,
        model: GPT,
        changes: Mapping[AnyTarget, Change | Referred] | Iterable[tuple[AnyTarget, Change | Referred]],
    ):
        self._given: list[tuple[Spot, Change | Referred]] = []
        for target, change in changes.items() if isinstance(changes, Mapping) else changes:
            if not isinstance(change, Referred) and not callable(change):
                raise ConfigError(f"{target!r}: {change!r} is not a change; give zero(), set_to(value) or a function")
            self._given.append((locate(target, model), change))
        super().__init__(_by_point((spot, spot, change) for spot, change in self._given))

    def for_pass(self, offset: int, length: int, partial: bool) -> _Changes:
        """The tap of a pass that reads `length` positions after `offset` earlier ones.

        `partial`: whether the text may go on in a later pass, so that a position which is not there yet is no fault.
        """
        limited = any(spot.pos is not None for spot, _ in self._given)
        if not limited or (offset == 0 and not partial):
            return self
        parts = ((*_in_pass(spot, offset, length), change) for spot, change in self._given)
        return _Changes(_by_point((local, whole, change) for local, whole, change in parts if local is not None))


def _by_point(
    changes: Iterable[tuple[Spot, Spot, Change | Referred]],
) -> dict[str, list[tuple[Spot, Change]]]:
    """Changes by point: each where its pass has it, and bound to where the whole text has it."""
    by_point: dict[str, list[tuple[Spot, Change]]] = {}
    for local, whole, change in changes:
        bound = change.at(whole) if isinstance(change, Referred) else change
        by_point.setdefault(local.point, []).append((local, bound))
    return by_point


def _in_pass(spot: Spot, offset: int, length: int) -> tuple[Spot | None, Spot]:
    """The part of a target that a pass reads, by the pass's positions (None if it reads none of it) and the text's."""
    if spot.pos is None:
        return spot, spot
    every = [spot.pos] if isinstance(spot.pos, int) else list(spot.pos)
    if min(every) < 0:
        if offset == 0:
            return spot, spot
        raise ConfigError(
            f"pos: {min(every)} counts from the end, and this pass continues a cache of {offset}; "
            "give positions from 0, or use_cache=False"
        )
    read = [pos for pos in every if offset <= pos < offset + length]
    if not read:
        return None, spot
    if isinstance(spot.pos, int):
        return replace(spot, pos=read[0] - offset), spot
    return replace(spot, pos=[pos - offset for pos in read]), replace(spot, pos=read)


class Copies:
    """Several interventions in one pass: the batch is given once for each, and each changes its own copy.

    Args:
        taps: of n interventions; the pass reads (n B, T), copy after copy.
    """

    def __init__(self, taps: Sequence[_Changes]):
        self._taps = taps
        self.points = frozenset[str]().union(*(tap.points for tap in taps))

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """The tensor, (n B, ...), with each copy changed."""
        copies = zip(self._taps, tensor.chunk(len(self._taps)), strict=True)
        return torch.cat([tap(point, copy) if point in tap.points else copy for tap, copy in copies])
