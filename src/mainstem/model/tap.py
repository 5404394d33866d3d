"""The tap: an explicit argument through which a forward pass can be watched or changed.

A tap names the points that it wants; a point that nobody asked for is not computed, and without a tap nothing is
called. Recording, ablating and patching are three taps. Nothing outlives the call that it was given to.
`mainstem.model.names` lists the points.
"""

from collections.abc import Collection, Iterable
from typing import Protocol

from torch import Tensor

from mainstem.errors import ConfigError, nearest


class Tap(Protocol):
    """What the model asks of a tap."""

    @property
    def points(self) -> Collection[str]:
        """The points to be called at."""
        ...

    @property
    def writes(self) -> Collection[str]:
        """Those at which another tensor than the one given may be returned."""
        ...

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Look at the tensor of this point and return what is to take its place."""
        ...


def touch(tap: Tap | None, point: str, tensor: Tensor) -> Tensor:
    """The tensor, after the tap has had its say if it asked for this point."""
    return tensor if tap is None or point not in tap.points else tap(point, tensor)


class Scope:
    """A tap as one block sees it: names are relative to the block, which does not know its position."""

    def __init__(self, tap: Tap, prefix: str):
        self._tap, self._prefix = tap, prefix
        self.points = {p.removeprefix(prefix) for p in tap.points if p.startswith(prefix)}
        self.writes = {p.removeprefix(prefix) for p in tap.writes if p.startswith(prefix)}

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Pass the call on under the full name."""
        return self._tap(self._prefix + point, tensor)


class Recorder:
    """The tap that records: `values[point]` is the tensor of the last call, in the graph if there is one."""

    writes: Collection[str] = ()

    def __init__(self, points: str | Iterable[str]):
        self.points = frozenset([points] if isinstance(points, str) else points)
        self.values: dict[str, Tensor] = {}

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Keep the tensor and let it pass."""
        self.values[point] = tensor
        return tensor


def check_points(points: Iterable[str], valid: Collection[str]) -> None:
    """Raise ConfigError for a point that is not among the valid ones, with the nearest one that is."""
    for point in sorted(set(points).difference(valid)):
        raise ConfigError(f"point: {point!r} is not in this model; {nearest(point, valid)}")
