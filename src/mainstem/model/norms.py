"""LayerNorm and RMSNorm with their statistics in reach of a tap, and the empty slot."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from mainstem.config import ModelConfig
from mainstem.model.tap import Tap


class Norm(nn.Module, ABC):
    """A norm over the last axis: gain * (x - mean) / scale + bias. Mixed in before the kernel's own class."""

    point: str
    """Its statistics are offered at `{point}.mean` and `{point}.scale`, each (B, T, 1)."""

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """(..., C) -> (..., C) by the fused kernel; the statistics are computed beside it, if they are asked for."""
        if tap is not None and any(point in tap.points for point in self.points()):
            for point, value in zip(self.points(), self.statistics(x), strict=True):
                if point in tap.points:
                    tap(point, value)
        return super().forward(x)

    def points(self) -> list[str]:
        """The names of its statistics."""
        return [f"{self.point}.mean", f"{self.point}.scale"]

    @abstractmethod
    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale of x, each (..., 1)."""


class LayerNorm(Norm, nn.LayerNorm):
    """Ba et al. 2016: the scale is sqrt(variance + eps)."""

    def __init__(self, width: int, eps: float, bias: bool, point: str):
        super().__init__(width, eps=eps, bias=bias)
        self.point = point

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and sqrt(variance + eps), each (..., 1)."""
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return mean, (variance + self.eps).sqrt()


class RMSNorm(Norm, nn.RMSNorm):
    """Zhang and Sennrich 2019: the mean is left in, the scale is sqrt(mean square + eps), and there is no bias."""

    eps: float

    def __init__(self, width: int, eps: float, point: str):
        super().__init__(width, eps=eps)
        self.point = point

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Zero and sqrt(mean square + eps), each (..., 1)."""
        square = x.square().mean(-1, keepdim=True)
        return torch.zeros_like(square), (square + self.eps).sqrt()


class Empty(nn.Identity):
    """A slot without a norm."""

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """The input itself."""
        return x

    def points(self) -> list[str]:
        """None."""
        return []


@dataclass(frozen=True)
class NormKind:
    """Which norm a model has: `layernorm` or `rmsnorm`, its eps, and whether a layernorm has a bias."""

    name: str = "layernorm"
    eps: float = 1e-5
    bias: bool = True

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """The kind that a config names."""
        return cls(config.norm, config.norm_eps, config.bias)

    def make(self, width: int, point: str) -> Norm:
        """A norm over `width`, its statistics at `{point}.mean` and `{point}.scale`."""
        if self.name == "rmsnorm":
            return RMSNorm(width, self.eps, point)
        return LayerNorm(width, self.eps, self.bias, point)
