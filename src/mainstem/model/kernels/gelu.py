"""tanh-GELU of a product and its bias by Triton: gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

Hendrycks and Gimpel 2016; GPT-2's and ANDREA's activation. One pass forward and one backward, which sums the bias's
gradient as well, without atomics, so that results on one device are bit-identical.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model.kernels.launch import max_programs, programs, tile


def gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) in x's type, (..., M), by Triton: computed in float32 and rounded once.

    Args:
        x: (..., M), a product without its bias, float32 or bfloat16.
        bias: (M,), float32 or bfloat16.

    Differentiable once, with respect to both. In a compiled graph it is one operation. Raises ConfigError for other
    shapes or types, and without Triton.
    """
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"gelu_bias: {name} is {tensor.dtype}; give float32 or bfloat16, or use plain_gelu_bias")
    if bias.shape != x.shape[-1:]:
        raise ConfigError(f"gelu_bias: bias has shape {tuple(bias.shape)}; it must be {tuple(x.shape[-1:])}")
    return _forward(x, bias)


def plain_gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) in x's type, (..., M), by PyTorch: what `gelu_bias` must equal. It may be compiled."""
    return F.gelu(x + bias, approximate="tanh").to(x.dtype)


@torch.library.custom_op("mainstem::gelu_bias", mutates_args=())
def _forward(x: Tensor, bias: Tensor) -> Tensor:
    width, x = x.shape[-1], x.contiguous()
    y, rows = torch.empty_like(x), x.numel() // max(1, width)
    if rows:
        t = tile(width)
        grid = (-(-rows // t.rows), -(-width // t.block))
        with torch.cuda.device_of(x):
            programs().gelu_bias_forward[grid](x, bias.contiguous(), y, rows, width, **t.options)
    return y


@torch.library.custom_op("mainstem::gelu_bias_backward", mutates_args=())
def _backward(x: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    width, x = x.shape[-1], x.contiguous()
    dx, rows, t = torch.empty_like(x), x.numel() // max(1, width), tile(width)
    columns = -(-width // t.block)
    grid = (max(1, min(-(-rows // t.rows), max_programs(x) // columns)), columns)
    partial = x.new_empty((grid[0], width), dtype=torch.float32)
    if not rows:
        return dx, torch.zeros_like(bias)
    with torch.cuda.device_of(x):
        programs().gelu_bias_backward[grid](
            x, bias.contiguous(), dy.contiguous(), dx, partial, rows, width, **t.options
        )
    return dx, partial.sum(0).to(bias.dtype)


@_forward.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_backward.register_fake
def _(x: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(*ctx.saved_tensors, dy)


_forward.register_autograd(_gradients, setup_context=_setup_context)
