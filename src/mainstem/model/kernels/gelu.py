"""tanh-GELU of a product and its bias: gelu(x + bias), gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

Hendrycks and Gimpel 2016, GPT-2's and ANDREA's. One pass forward; one backward, in which the bias's gradient is summed
as well, without atomics, so that the same device gives the same bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mainstem.model.kernels.launch import check, check_shape, programs, programs_at_once, tile

WIDEST = 1024


def gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) in x's type, (..., M), by our kernel: float32 inside, rounded once.

    Args:
        x: (..., M), a product without its bias.
        bias: (M,), in any of the types.

    Differentiable once, with respect to both. It stands in a compiled graph as one operation. Raises ConfigError for
    other shapes, for float64, and without Triton.
    """
    check("gelu_bias", x=x, bias=bias)
    check_shape("gelu_bias", "bias", bias, (x.shape[-1],))
    return _forward(x, bias)


def plain_gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    """The same in PyTorch's own operations: the oracle, and what a compiler is given."""
    return F.gelu(x + bias, approximate="tanh").to(x.dtype)


@torch.library.custom_op("mainstem::gelu_bias", mutates_args=())
def _forward(x: Tensor, bias: Tensor) -> Tensor:
    width, x = x.shape[-1], x.contiguous()
    y, rows = torch.empty_like(x), x.numel() // max(1, width)
    if rows:
        t = tile(width, WIDEST)
        grid = (-(-rows // t.rows), -(-width // t.block))
        with torch.cuda.device_of(x):
            programs().gelu_bias_forward[grid](x, bias.contiguous(), y, rows, width, **t.options)
    return y


@torch.library.custom_op("mainstem::gelu_bias_backward", mutates_args=())
def _backward(x: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    width, x = x.shape[-1], x.contiguous()
    dx, rows, t = torch.empty_like(x), x.numel() // max(1, width), tile(width, WIDEST)
    columns = -(-width // t.block)
    grid = (max(1, min(-(-rows // t.rows), programs_at_once(x) // columns)), columns)
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


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(*ctx.saved_tensors, dy)


_forward.register_autograd(_gradients, setup_context=_keep)
