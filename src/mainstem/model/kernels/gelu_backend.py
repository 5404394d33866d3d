"""Which implementation computes tanh-GELU and its bias in the MLPs: PyTorch, Numba on a CPU, or Triton on CUDA."""

import importlib
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from mainstem.model.gpt import GPT
from mainstem.model.kernels import gelu
from mainstem.model.mlp import MLP

GeluBias = Callable[[Tensor, Tensor], Tensor]
"""A function of a product (..., M) and a bias (M,) that returns tanh-GELU of their sum, (..., M)."""
TOLERANCE = 2e-2
"""Largest difference, as a share of the largest value, at which two results in bfloat16 count as equal."""
CALLS, ROUNDS = 20, 3
"""Calls that are timed together, and how often both implementations are timed, in turns."""


def choose_gelu(model: GPT, device: torch.device, tokens: int, compiled: bool = False) -> str:
    """Let every MLP compute tanh-GELU and its bias by the fastest implementation; only the rounding may change.

    A model without a biased tanh-GELU is left as it is.

    Args:
        model: on the device, float32.
        device: a CPU takes Numba's loop if Numba is installed; CUDA takes Triton's kernel if `triton_is_as_fast`.
        tokens: B T of a micro-batch, the shape at which Triton's kernel is timed.
        compiled: whether the blocks will be compiled; Numba's loop cannot be part of a compiled graph.

    Returns the implementation, for the run's record: `torch`, `numba` or `triton`.
    """
    config, name, function = model.config, "torch", None
    if config.activation == "gelu_tanh" and config.bias and config.d_mlp:
        if device.type == "cpu" and not compiled:
            name, function = "numba", _numba_gelu()
        elif device.type == "cuda" and triton_is_as_fast(tokens, config.d_mlp, device):
            name, function = "triton", gelu.gelu_bias
    if function is None:
        return "torch"
    for block in model.blocks:
        assert isinstance(block.mlp, MLP)
        block.mlp.gelu_bias = function
    return name


def _numba_gelu() -> GeluBias | None:
    try:
        return importlib.import_module("mainstem.model.kernels.gelu_cpu").gelu_bias
    except Exception:  # no Numba, or a fault in it: PyTorch computes the same
        return None


def triton_is_as_fast(tokens: int, width: int, device: torch.device) -> bool:
    """Whether Triton's tanh-GELU equals the compiled plain form and takes no more time, forward and backward.

    Both read the same random product (tokens, width) in bfloat16 and bias (width,) in float32. The medians of some
    rounds are compared. Where the compiler fails, the plain form is compared as it is; where Triton fails or its result
    differs, the answer is False. Takes seconds, most of them the compiler's.
    """
    generator = torch.Generator(device).manual_seed(1)
    product, dy, bias = (
        torch.randn(shape, generator=generator, device=device) for shape in ((tokens, width), (tokens, width), (width,))
    )
    tensors = product.bfloat16().requires_grad_(), bias.requires_grad_(), dy.bfloat16()
    triton = partial(forward_and_backward, gelu.gelu_bias, *tensors)
    plain = partial(forward_and_backward, torch.compile(gelu.plain_gelu_bias, dynamic=False), *tensors)
    with torch.cuda.device_of(product):
        try:
            results = triton()
        except Exception:  # whatever a broken kernel raises
            return False
        try:
            expected = plain()
        except Exception:  # whatever a broken compiler raises
            plain = partial(forward_and_backward, gelu.plain_gelu_bias, *tensors)
            expected = plain()
        for value, reference in zip(results, expected, strict=True):
            value, reference = value.float(), reference.float()
            if not (value - reference).abs().max() <= TOLERANCE * reference.abs().max():  # true of NaN, too
                return False
        times = [(seconds(triton), seconds(plain)) for _ in range(ROUNDS)]
    return median(time for time, _ in times) <= median(time for _, time in times)


def forward_and_backward(function: GeluBias, product: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """The output y of a GELU with bias, and the gradients of product and bias for the output's gradient dy."""
    y = function(product, bias)
    return y, *torch.autograd.grad(y, (product, bias), dy)


def seconds(work: Callable[[], object]) -> float:
    """The mean time of a call in seconds, after a few calls that are not timed; the device is synchronized."""
    from torch.utils.benchmark import Timer  # half a second, and only CUDA needs it

    return Timer("work()", globals={"work": work}).timeit(CALLS).mean
