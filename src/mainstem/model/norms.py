"""LayerNorm and RMSNorm with their statistics in reach of a tap, and the empty slot."""

import torch
from torch import Tensor, nn

from mainstem.config import ModelConfig
from mainstem.model.tap import Tap


class _Statistics:
    """Offers mean and scale at `{point}.mean` and `{point}.scale`, (B, T, 1): the norm is (x - mean) / scale."""

    point: str

    def offer(self, x: Tensor, tap: Tap) -> None:
        """Compute the statistics beside the fused kernel, if they are asked for."""
        wanted = [f"{self.point}.mean", f"{self.point}.scale"]
        if not any(point in tap.points for point in wanted):
            return
        for point, value in zip(wanted, self.statistics(x), strict=True):
            if point in tap.points:
                tap(point, value)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class LayerNorm(_Statistics, nn.LayerNorm):
    """Ba et al. 2016: over d_model, (x - mean) / sqrt(variance + eps), then gain and bias."""

    def __init__(self, width: int, eps: float, bias: bool, point: str):
        super().__init__(width, eps=eps, bias=bias)
        self.point = point

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """(..., C) -> (..., C)."""
        if tap is not None:
            self.offer(x, tap)
        return super().forward(x)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and sqrt(variance + eps), each (..., 1)."""
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return mean, (variance + self.eps).sqrt()


class RMSNorm(_Statistics, nn.RMSNorm):
    """Zhang and Sennrich 2019: over d_model, x / sqrt(mean square + eps), then gain."""

    eps: float

    def __init__(self, width: int, eps: float, point: str):
        super().__init__(width, eps=eps)
        self.point = point

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """(..., C) -> (..., C)."""
        if tap is not None:
            self.offer(x, tap)
        return super().forward(x)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Zero and sqrt(mean square + eps), each (..., 1)."""
        square = x.square().mean(-1, keepdim=True)
        return torch.zeros_like(square), (square + self.eps).sqrt()


class Empty(nn.Identity):
    """A slot without a norm."""

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """The input itself."""
        return x


def make_norm(config: ModelConfig, point: str, width: int | None = None, bias: bool | None = None) -> nn.Module:
    """The norm that the config names, over `width` (d_model if None), its statistics offered under `point`."""
    width = width or config.d_model
    if config.norm == "rmsnorm":
        return RMSNorm(width, config.norm_eps, point)
    return LayerNorm(width, config.norm_eps, config.bias if bias is None else bias, point)
