"""Interventions: replace tensors of a forward pass, for steering, ablation and patching.

An intervention is a tap that replaces the tensor of a point, or a part of it:

    tap = Intervention(model, {"L1H3": zero(), ("mlp_out", 2): mean(trace), At("resid_pre4", pos=3): add(vector)})
    logits = model(ids, tap=tap)
    text = generate(model, tokenizer, "ROMEO:", max_new_tokens=50, tap=tap)

Steering during generation, ablation and patching differ only in the changes.
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
"""A function from the tensor of a target to its replacement, of the same shape."""
Index = int | Sequence[int] | None
"""An index along an axis, which drops the axis; a sequence, which keeps it; or None for all."""

_PARTS = {"head": ("z", "q", "k", "v", "pattern"), "neuron": ("post", "pre")}
"""The tensors of a unit that can be changed; a label alone means the first."""


@dataclass(frozen=True)
class At:
    """A part of a point: some positions, heads or neurons."""

    target: Key
    """A point, by any of its names, or a label: `L1H3`, `L1H3.q`, `L2N17`, `0_mlp_out`."""
    pos: Index = None
    """Positions in the window, padding included; -1 is the last of the pass. For `pattern`, query positions."""
    units: Index = None
    """Heads for `q k v z pattern`, neurons for `mlp.pre` and `mlp.post`."""

    def __post_init__(self) -> None:
        for name in ("pos", "units"):  # tuples, so that it can be a key of a dict
            index = getattr(self, name)
            if not isinstance(index, int | Sequence | None) or isinstance(index, str):
                raise ConfigError(f"{name}: {index!r} is not an index; give a number, a list of numbers or a range")
            object.__setattr__(self, name, index if isinstance(index, int | None) else tuple(index))


Target = Key | At
AnyTarget = TypeVar("AnyTarget", bound=Target)


@dataclass(frozen=True)
class Spot:
    """A target in a model: a point, and the part of its tensor."""

    point: str
    pos: Index = None
    units: Index = None

    @property
    def of_pattern(self) -> bool:
        """Whether the axes are (B, H, T, T), not (B, T, ...)."""
        return self.point.endswith(".pattern")

    def part(self, tensor: Tensor) -> Tensor:
        """The part of the point's whole tensor. Raises ConfigError for a position out of range."""
        for axis, index in self._indices:
            tensor = tensor[_where(axis, index, tensor)]
        return tensor

    def changed(self, tensor: Tensor, change: Change) -> Tensor:
        """A copy of the whole tensor with the part changed."""
        return _changed(tensor, self._indices, change)

    @property
    def _indices(self) -> list[tuple[int, int | Sequence[int]]]:
        """Pairs (axis, index), last axis first, so that dropping an axis does not move the next ones."""
        pos, units = ((2, self.pos), (1, self.units)) if self.of_pattern else ((1, self.pos), (2, self.units))
        return [(axis, index) for axis, index in sorted((pos, units), reverse=True) if index is not None]


def _where(axis: int, index: int | Sequence[int], tensor: Tensor) -> tuple[slice | int | list[int], ...]:
    size, every = tensor.shape[axis], [index] if isinstance(index, int) else list(index)
    for i in every:
        if not -size <= i < size:
            raise ConfigError(f"pos: {i} is out of range; the pass has {size} positions, from 0")
    if not every or len({i % size for i in every}) < len(every):
        raise ConfigError(f"pos: {every} is empty or has an index twice; give each once")
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
    """The point and part of a target.

    Raises ConfigError, with the nearest name, for an unknown target; for statistics of norms and points derived from
    others, which cannot be changed; and for a head or neuron out of range.
    """
    at = target if isinstance(target, At) else At(target)
    key, units = _spelled(at.target)
    if units is not None and at.units is not None:
        raise ConfigError(f"units: {at.target!r} already names a unit; give a point, or omit `units`")
    point, chosen = resolve(key, model), at.units if units is None else units
    if point.endswith((".mean", ".scale")):
        raise ConfigError(
            f"point: {point!r} is a statistic of a norm, which cannot be changed; change the input of the norm"
        )
    if point not in model.points():
        raise ConfigError(f"point: {point!r} is computed from other points and cannot be changed; change those")
    if chosen is not None:
        _check_units(point, chosen, model.config)
    return Spot(point, at.pos, chosen)


def _spelled(target: Key) -> tuple[Key, int | None]:
    """The point of a label, and the head or neuron that it names, if any."""
    label = parse_label(target) if isinstance(target, str) else None
    if label is None or label.block is None:
        return target, None
    if label.unit is None:
        return ((label.name, label.block) if label.name in ("attn_out", "mlp_out") else target), None
    part = label.part or _PARTS[label.name][0]
    return ((part, label.block), label.unit) if part in _PARTS[label.name] else (target, None)


def _check_units(point: str, units: int | Sequence[int], config: ModelConfig) -> None:
    if ".attn." not in point and ".mlp." not in point:
        raise ConfigError(f"units: {point!r} is a point of the stream, without heads or neurons")
    what, size = ("heads", config.n_head) if ".attn." in point else ("neurons", config.d_mlp)
    for unit in [units] if isinstance(units, int) else units:
        if not 0 <= unit < size:
            raise ConfigError(f"units: {unit} is out of range; {point!r} has {size} {what}, from 0")


@dataclass(frozen=True, eq=False)
class Referred:
    """A change whose value comes from another pass, at the same target."""

    reference: Record | Tensor
    """A record, or the whole tensor of the point."""
    make: Callable[[Spot, Tensor, Tensor | None], Change]
    """A function (target, whole tensor of the point, mask of the record) -> the change."""

    def at(self, spot: Spot) -> Change:
        """The change for a target."""
        if isinstance(self.reference, Record):
            return self.make(spot, self.reference[spot.point], self.reference.mask)
        axes = 4 if ".attn." in spot.point else 3
        if self.reference.ndim != axes:
            shape = tuple(self.reference.shape)
            raise ConfigError(f"a reference of shape {shape} does not match {spot.point!r}, which has {axes} axes")
        return self.make(spot, self.reference, None)


def zero() -> Change:
    """A change to zeros."""
    return torch.zeros_like


def set_to(value: Tensor | float) -> Change:
    """A change to a value, which must broadcast to the part's shape."""
    return lambda x: _fit(torch.as_tensor(value), x)


def add(vector: Tensor | float, scale: float = 1.0) -> Change:
    """A change that adds scale times a vector: steering (Turner et al. 2023, "Activation Addition")."""
    return lambda x: x + scale * _fit(torch.as_tensor(vector), x)


def mean(reference: Record | Tensor) -> Referred:
    """A change to the mean over the reference's rows and positions without padding; for `pattern`, over its rows."""
    return Referred(reference, _mean)


def resample(other: Record | Tensor) -> Referred:
    """A change to another pass's value, row by row or from one row (Chan et al. 2022, "Causal Scrubbing")."""
    return Referred(other, _resample)


def _mean(spot: Spot, value: Tensor, mask: Tensor | None) -> Change:
    if spot.of_pattern:  # a mean over query positions would attend to later keys
        return set_to(spot.part(value.mean(0, keepdim=True)))
    tokens = Spot(spot.point, units=spot.units).part(value)  # (B, T, ...)
    return set_to((tokens.flatten(0, 1) if mask is None else tokens[mask.bool()]).mean(0))


def _resample(spot: Spot, value: Tensor, mask: Tensor | None) -> Change:
    part = spot.part(value)

    def change(x: Tensor) -> Tensor:
        if part.shape not in (x.shape, (1, *x.shape[1:])):
            raise ConfigError(
                f"resample: {spot.point!r} is {tuple(part.shape)} in the other pass and {tuple(x.shape)} in this one; "
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
    """A tap that applies changes at points, in order."""

    def __init__(self, changes: Mapping[str, Sequence[tuple[Spot, Change]]]):
        self._changes = changes
        self.points = frozenset(changes)

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Apply the changes of this point to the tensor."""
        for spot, change in self._changes.get(point, ()):
            tensor = spot.changed(tensor, change)
        return tensor


class Intervention(_Changes):
    """A tap that changes targets of a model: `model(ids, tap=Intervention(model, {"L1H3": zero()}))`.

    Args:
        model: any GPT.
        changes: target -> change, or pairs, in which a target may occur twice; changes at one point apply in order.

    It has no state and can be used with any number of passes. Positions count from the start of the window, also in a
    pass that continues a KV cache: a change is applied when its position is read, and later positions attend to the
    changed values. Negative positions count from the end of a whole pass; they are not supported with a cache.

    A value that differs between positions needs a change for each: a pass may read some of them alone.

    Raises ConfigError as `locate` does; during a pass, for a position out of range and values that do not fit.
    """

    def __init__(
        self,
        model: GPT,
        changes: Mapping[AnyTarget, Change | Referred] | Iterable[tuple[AnyTarget, Change | Referred]],
    ):
        self._located: list[tuple[Spot, Change | Referred]] = []
        for target, change in changes.items() if isinstance(changes, Mapping) else changes:
            if not isinstance(change, Referred) and not callable(change):
                raise ConfigError(f"{target!r}: {change!r} is not a change; give zero(), set_to(value) or a function")
            self._located.append((locate(target, model), change))
        super().__init__(_by_point((spot, spot, change) for spot, change in self._located))

    def for_pass(self, offset: int, length: int, partial: bool) -> _Changes:
        """The tap of a pass that reads `length` positions after `offset` earlier ones.

        `partial` is whether the text may continue in a later pass, so that a position beyond this pass is no error.
        """
        limited = any(spot.pos is not None for spot, _ in self._located)
        if not limited or (offset == 0 and not partial):
            return self
        parts = ((*_in_pass(spot, offset, length), change) for spot, change in self._located)
        return _Changes(_by_point((local, whole, change) for local, whole, change in parts if local is not None))


def _by_point(
    changes: Iterable[tuple[Spot, Spot, Change | Referred]],
) -> dict[str, list[tuple[Spot, Change]]]:
    """Changes by point: the part in this pass, with changes bound to the target in the whole text."""
    by_point: dict[str, list[tuple[Spot, Change]]] = {}
    for local, whole, change in changes:
        bound = change.at(whole) if isinstance(change, Referred) else change
        by_point.setdefault(local.point, []).append((local, bound))
    return by_point


def _in_pass(spot: Spot, offset: int, length: int) -> tuple[Spot | None, Spot]:
    """The part of a target in a pass, by positions of the pass (None if it has none) and by positions of the text."""
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
    """Several interventions in one pass, each on its own copy of the batch.

    Args:
        taps: n interventions; the pass reads (n B, T), copy after copy.
    """

    def __init__(self, taps: Sequence[_Changes]):
        self._taps = taps
        self.points = frozenset[str]().union(*(tap.points for tap in taps))

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Apply each intervention to its copy in the tensor, (n B, ...)."""
        copies = zip(self._taps, tensor.chunk(len(self._taps)), strict=True)
        return torch.cat([tap(point, copy) if point in tap.points else copy for tap, copy in copies])
