"""A norm with the scale that it had: an affine map, through which each part of a sum can be carried on its own.

With the recorded scale s of a position, a norm is x -> weight * (x - mean(x)) / s + bias (RMSNorm: without the mean).
Its linear part acts on every part of x alike; the bias is a part of its own. The same map, turned round, pulls back a
direction: <carry(x), u> = <x, pull(u)>, so a part can be weighed along u without being carried at all.
"""

from typing import NamedTuple

from torch import Tensor, nn


class Frozen(NamedTuple):
    """One norm at the scales of one forward pass; without a scale, the identity of an empty slot."""

    weight: Tensor | None = None
    """(C,)."""
    bias: Tensor | None = None
    """(C,), where the norm has one."""
    centres: bool = False
    """Whether the mean is taken off: LayerNorm does, RMSNorm does not."""
    scale: Tensor | None = None
    """(B, T, 1)."""

    def carry(self, x: Tensor) -> Tensor:
        """The linear part: (..., B, T, C) -> the same."""
        return x if self.weight is None or self.scale is None else self.weight * self._centred(x) / self.scale

    def pull(self, u: Tensor) -> Tensor:
        """Its transpose: directions after the norm, (..., B, T, C), as directions before it."""
        return u if self.weight is None or self.scale is None else self._centred(self.weight * u) / self.scale

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centres else x


def freeze(norm: nn.LayerNorm | nn.RMSNorm, scale: Tensor) -> Frozen:
    """The norm at the scales given, (B, T, 1)."""
    return Frozen(norm.weight, getattr(norm, "bias", None), isinstance(norm, nn.LayerNorm), scale)
