"""Floors: what no program can be faster than on this machine, measured in the same run as what is compared with it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.model.gpt import GPT


def compute_floor(model: GPT, batch: int, length: int) -> Callable[[], None]:
    """Exactly the products of one training step, run alone: forward, input gradient and weight gradient of every linear
    layer, and the fused attention forward and backward.

    The weights are the model's own; inputs and results are buffers that are there beforehand, so nothing is allocated
    but what the fused attention returns.
    """
    rows, weights = batch * length, [layer.weight.detach() for layer in model.modules() if isinstance(layer, nn.Linear)]
    buffers = {shape: _buffers(rows, *shape) for shape in {tuple(weight.shape) for weight in weights}}
    config, blocks = model.config, len(model.blocks)
    q, k, v, out = (torch.randn(batch, config.n_head, length, config.d_head) for _ in range(4))
    for part in (q, k, v):
        part.requires_grad_()

    def run() -> None:
        for weight in weights:
            x, y, dx, dW = buffers[tuple(weight.shape)]
            torch.mm(x, weight.T, out=y)
            torch.mm(y, weight, out=dx)
            torch.mm(y.T, x, out=dW)
        for _ in range(blocks):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=config.attn_scale)
            torch.autograd.grad(mixed, (q, k, v), out)

    return run


def _buffers(rows: int, out: int, inside: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and its gradient (rows, in), y (rows, out), and the weight's gradient (out, in)."""
    return torch.randn(rows, inside), torch.empty(rows, out), torch.empty(rows, inside), torch.empty(out, inside)


def compute_flops(model: GPT, batch: int, length: int) -> int:
    """The floating-point operations of `compute_floor`'s products, attention not counted."""
    inside = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    return 3 * 2 * batch * length * inside
