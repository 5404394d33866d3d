"""The tap: an argument of a forward pass that reads or replaces tensors.

A tap lists its points; other points are not computed, and without a tap nothing is called. Recording, ablation and
patching are taps. A model stores no tap: it applies to the call that it is passed to.
`mainstem.model.names` lists the points.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from torch import Tensor

from mainstem.errors import ConfigError, nearest


class Tap(Protocol):
    """The interface of a tap.

    If a tap has a method `for_pass(offset, length, partial)`, it returns the tap of each pass, which reads `length`
    positions after `offset` positions in the KV cache; `partial` is whether the text may continue in a later pass.
    """

    @property
    def points(self) -> Collection[str]:
        """The points at which the tap is called."""
        ...

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Receive the tensor of a point, and return it or its replacement."""
        ...


def touch(tap: Tap | None, point: str, tensor: Tensor) -> Tensor:
    """The tensor of a point after the tap; unchanged if it is not one of the tap's points."""
    return tensor if tap is None or point not in tap.points else tap(point, tensor)


def replaced(tap: Tap | None, point: str, compute: Callable[[], Tensor]) -> Tensor | None:
    """The tap's replacement for a tensor that is computed only for the tap; None if it is not replaced.

    This is for tensors inside a fused kernel: unless one is replaced, the kernel's own result is used.
    """
    if tap is None or point not in tap.points:
        return None
    tensor = compute()
    version = None if tensor.is_inference() else tensor._version
    returned = tap(point, tensor)
    untouched = returned is tensor and (version is None or version == tensor._version)
    return None if untouched else returned


def for_pass(tap: Tap | None, offset: int, length: int, partial: bool) -> Tap | None:
    """The tap of one pass; None if it has no points."""
    bind = getattr(tap, "for_pass", None)
    tap = tap if bind is None else bind(offset, length, partial)
    return tap if tap is not None and tap.points else None


class Scope:
    """A tap for one block: names are relative to the block."""

    def __init__(self, tap: Tap, prefix: str):
        self._tap, self._prefix = tap, prefix
        self.points = {p.removeprefix(prefix) for p in tap.points if p.startswith(prefix)}

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Call the tap with the full name of the point."""
        return self._tap(self._prefix + point, tensor)


class Recorder:
    """A tap that records: `values[point]` is the tensor of the last call, with its autograd graph."""

    def __init__(self, points: str | Iterable[str]):
        self.points = frozenset([points] if isinstance(points, str) else points)
        self.values: dict[str, Tensor] = {}

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Store the tensor and return it unchanged."""
        self.values[point] = tensor
        return tensor


def check_points(points: Iterable[str], valid: Collection[str]) -> None:
    """Raise ConfigError, with the nearest valid name, for a point that is not valid."""
    for point in sorted(set(points).difference(valid)):
        raise ConfigError(f"point: {point!r} is not in this model; {nearest(point, valid)}")
