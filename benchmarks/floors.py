"""Floors: what no program can be faster than on this machine, measured in the same run as what is compared with it."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.processes import Timed
from mainstem.model.gpt import GPT

SUMS = 20
"""Of the memory, in one measurement: as long as a short text takes."""


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


def forward_floor(model: GPT, length: int) -> Callable[[], None]:
    """Exactly the products of reading one prompt, run alone: every linear layer forward, the head on the last position
    only, and the fused attention forward."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not model.lm_head]
    weights, head = [layer.weight.detach() for layer in layers], model.lm_head.weight.detach()
    shapes = {tuple(weight.shape) for weight in weights}
    buffers = {shape: (torch.randn(length, shape[1]), torch.empty(length, shape[0])) for shape in shapes}
    config, blocks, last = model.config, len(model.blocks), torch.randn(1, model.config.d_model)
    q, k, v = (torch.randn(1, config.n_head, length, config.d_head) for _ in range(3))

    def run() -> None:
        with torch.inference_mode():
            for weight in weights:
                x, y = buffers[tuple(weight.shape)]
                torch.mm(x, weight.T, out=y)
            for _ in range(blocks):
                F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=config.attn_scale)
            torch.mm(last, head.T)

    return run


def memory_floor(wanted: int) -> Callable[[], Timed]:
    """A call that gives the seconds in which `wanted` bytes can be read: those of large sums, by all threads.

    Each sum is over 512 MB of float32 that were written to beforehand, which is more than processors cache.
    """
    memory = torch.ones(1 << 27)

    def sums() -> Timed:
        start = time.perf_counter()
        for _ in range(SUMS):
            memory.sum()
        return Timed((time.perf_counter() - start) * wanted / (SUMS * memory.nbytes))

    return sums
