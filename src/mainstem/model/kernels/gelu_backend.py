"""Who computes what stands between the products: PyTorch, or a loop of ours where it is there and not slower."""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from mainstem.model.gpt import GPT
from mainstem.model.kernels import choice, gelu
from mainstem.model.mlp import MLP

GELU = "gelu_bias"
GeluBias = Callable[[Tensor, Tensor], Tensor]


def choose_gelu(model: GPT, device: torch.device, tokens: int, compiled: bool = False) -> str:
    """Give every MLP with a biased tanh-GELU the loop that is fastest on the device; the model stays the same function.

    Args:
        model: on the device, float32.
        device: the CPU takes Numba's loop, if Numba is there; CUDA takes Triton's, if it is measured to be as fast.
        tokens: B T of a micro-batch, the shape that is measured.
        compiled: whether the blocks will be compiled; Numba's loop cannot be part of that.

    Returns whose it is, for the record: `torch`, `numba` or `triton`.
    """
    config, name, loop = model.config, "torch", None
    if config.activation == "gelu_tanh" and config.bias and config.d_mlp:
        if device.type == "cpu" and not compiled:
            name, loop = "numba", _on_cpu()
        elif device.type == "cuda" and choice.choose(config, tokens, device, names=(GELU,))[GELU].takes_ours:
            name, loop = "triton", gelu.gelu_bias
    for block in model.blocks if loop is not None else ():
        assert isinstance(block.mlp, MLP)
        block.mlp.gelu_bias = loop
    return name if loop is not None else "torch"


def _on_cpu() -> GeluBias | None:
    try:
        return importlib.import_module("mainstem.model.kernels.gelu_cpu").gelu_bias
    except Exception:  # no Numba, or a fault of it, which only makes training faster
        return None
