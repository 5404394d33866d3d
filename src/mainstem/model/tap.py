"""The tap: an explicit argument through which a forward pass can be watched or changed.

A tap names the points that it wants; a point that nobody asked for is not computed, and without a tap nothing is
called. Recording, ablating and patching are three taps. Nothing outlives the call that it was given to.
`mainstem.model.names` lists the points.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from torch import Tensor

from mainstem.errors import ConfigError, nearest


class Tap(Protocol):
    """What the model asks of a tap.

    A tap that has a method `for_pass(offset, length, partial)` is asked for the tap of each pass, which reads `length`
    positions after the `offset` that its KV cache holds; `partial` says whether the text may go on in a later pass.
    """

    @property
    def points(self) -> Collection[str]:
        """The points to be called at."""
        ...

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Look at the tensor of this point, and return it, or another one that takes its place."""
        ...


def touch(tap: Tap | None, point: str, tensor: Tensor) -> Tensor:
    """What the tap leaves at this point: the tensor itself where it did not ask for it."""
    return tensor if tap is None or point not in tap.points else tap(point, tensor)


def replaced(tap: Tap | None, point: str, compute: Callable[[], Tensor]) -> Tensor | None:
    """What the tap put in the place of a tensor that is computed for it alone; None where it only looked, or did not.

    For what a fused kernel does not hand out: as long as nothing is changed, the kernel's own result is used.
    """
    if tap is None or point not in tap.points:
        return None
    tensor = compute()
    version = None if tensor.is_inference() else tensor._version
    returned = tap(point, tensor)
    untouched = returned is tensor and (version is None or version == tensor._version)
    return None if untouched else returned


def for_pass(tap: Tap | None, offset: int, length: int, partial: bool) -> Tap | None:
    """The tap of one pass; None if it asks for nothing, so that it costs nothing."""
    bind = getattr(tap, "for_pass", None)
    tap = tap if bind is None else bind(offset, length, partial)
    return tap if tap is not None and tap.points else None


class Scope:
    """A tap as one block sees it: names are relative to the block, which does not know its position."""

    def __init__(self, tap: Tap, prefix: str):
        self._tap, self._prefix = tap, prefix
        self.points = {p.removeprefix(prefix) for p in tap.points if p.startswith(prefix)}

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Pass the call on under the full name."""
        return self._tap(self._prefix + point, tensor)


class Recorder:
    """The tap that records: `values[point]` is the tensor of the last call, in the graph if there is one."""

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
