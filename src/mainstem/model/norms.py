"""LayerNorm and RMSNorm whose statistics a tap can read, and an empty norm slot."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from mainstem.config import ModelConfig
from mainstem.model.tap import Tap


class Norm(nn.Module, ABC):
    """A norm over the last axis: gain * (x - mean) / scale + bias. A mixin before PyTorch's class."""

    point: str
    """The prefix of the norm's points, `{point}.mean` and `{point}.scale`, each (B, T, 1)."""

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """The norm of x, (..., C) -> (..., C), by the fused kernel; statistics are computed only for a tap."""
        if tap is not None and any(point in tap.points for point in self.points()):
            for point, value in zip(self.points(), self.statistics(x), strict=True):
                if point in tap.points:
                    tap(point, value)
        return super().forward(x)

    def points(self) -> list[str]:
        """The points of the statistics."""
        return [f"{self.point}.mean", f"{self.point}.scale"]

    @abstractmethod
    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale of x, each (..., 1)."""


class LayerNorm(Norm, nn.LayerNorm):
    """LayerNorm (Ba et al. 2016): the scale is sqrt(variance + eps)."""

    def __init__(self, width: int, eps: float, bias: bool, point: str):
        super().__init__(width, eps=eps, bias=bias)
        self.point = point

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and sqrt(variance + eps), each (..., 1)."""
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return mean, (variance + self.eps).sqrt()


class RMSNorm(Norm, nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019): no mean is subtracted, the scale is sqrt(mean square + eps), without bias."""

    eps: float

    def __init__(self, width: int, eps: float, point: str):
        super().__init__(width, eps=eps)
        self.point = point

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Zero and sqrt(mean square + eps), each (..., 1)."""
        square = x.square().mean(-1, keepdim=True)
        return torch.zeros_like(square), (square + self.eps).sqrt()


class Empty(nn.Identity):
    """An empty norm slot: the identity."""

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """The input, unchanged."""
        return x

    def points(self) -> list[str]:
        """No points: the list is empty."""
        return []


@dataclass(frozen=True)
class NormKind:
    """The kind of norm of a model: `layernorm` or `rmsnorm`, its eps, and whether a LayerNorm has a bias."""

    name: str = "layernorm"
    eps: float = 1e-5
    bias: bool = True

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """The kind of norm in a config."""
        return cls(config.norm, config.norm_eps, config.bias)

    def make(self, width: int, point: str) -> Norm:
        """Build a norm over `width` with points `{point}.mean` and `{point}.scale`."""
        if self.name == "rmsnorm":
            return RMSNorm(width, self.eps, point)
        return LayerNorm(width, self.eps, self.bias, point)
