"""tanh-GELU of a product and its bias on the CPU, by Numba (extra `fast`): one pass forward, one backward.

PyTorch's own spends most of its time in tanh, and has one more pass for the bias in each direction. The bias's gradient
is summed by chunks of rows, in order, so that results are bit-identical with any number of threads.

Every process compiles the loops anew, which takes about a second: Numba's disk cache notices changes in a loop's own
file alone, and these loops call functions of other files.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import cfunc, njit, types
from torch import Tensor

from mainstem.model.kernels import openmp
from mainstem.model.kernels.address import floats, words
from mainstem.model.kernels.arithmetic import CUBE, ONE, SLOPE, gelu_tanh, logistic
from mainstem.model.kernels.openmp import ARGUMENTS, PIECES, claim

_loop = njit(fastmath={"contract"}, error_model="numpy")
_body = cfunc(types.void(types.int64), error_model="numpy")

CHUNKS = 16
"""Chunks of rows: each is one piece of the loop, and has its own partial sum of the bias's gradient."""
THREE = np.float32(3)


@_loop
def _gelu_row(product, bias, y):
    for j in range(len(y)):
        y[j] = gelu_tanh(product[j] + bias[j])


@_loop
def _gelu_row_backward(product, bias, dy, dx, dbias):
    for j in range(len(dx)):
        x = product[j] + bias[j]
        square = x * x
        gate = logistic(x * (ONE + CUBE * square) * SLOPE)
        value = dy[j] * (gate + x * gate * (ONE - gate) * SLOPE * (ONE + THREE * CUBE * square))
        dx[j] = value
        dbias[j] += value


@_body
def _forward(work):
    values = words(work, ARGUMENTS + 5)
    pieces, rows, width = values[PIECES], values[ARGUMENTS], values[ARGUMENTS + 1]
    product, bias, y = values[ARGUMENTS + 2], floats(values[ARGUMENTS + 3], width), values[ARGUMENTS + 4]
    piece = claim(work)
    while piece < pieces:
        for i in range(rows * piece // pieces, rows * (piece + 1) // pieces):
            offset = 4 * width * i
            _gelu_row(floats(product + offset, width), bias, floats(y + offset, width))
        piece = claim(work)


@_body
def _backward(work):
    values = words(work, ARGUMENTS + 7)
    pieces, rows, width = values[PIECES], values[ARGUMENTS], values[ARGUMENTS + 1]
    product, bias = values[ARGUMENTS + 2], floats(values[ARGUMENTS + 3], width)
    dy, dx, partial = values[ARGUMENTS + 4], values[ARGUMENTS + 5], values[ARGUMENTS + 6]
    piece = claim(work)
    while piece < pieces:
        dbias = floats(partial + 4 * width * piece, width)
        dbias[:] = 0
        for i in range(rows * piece // pieces, rows * (piece + 1) // pieces):
            offset = 4 * width * i
            _gelu_row_backward(
                floats(product + offset, width), bias, floats(dy + offset, width),
                floats(dx + offset, width), dbias,
            )  # fmt: skip
        piece = claim(work)


class _GeluBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        product, bias = product.contiguous(), bias.contiguous()
        y, width = torch.empty_like(product), len(bias)
        openmp.run(_forward, CHUNKS, (y.numel() // width, width, product.data_ptr(), bias.data_ptr(), y.data_ptr()))
        ctx.save_for_backward(product, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        product, bias = ctx.saved_tensors
        dy, dx, width = dy.contiguous(), torch.empty_like(product), len(bias)
        partial = product.new_empty(CHUNKS, width)
        tensors = (product, bias, dy, dx, partial)
        openmp.run(_backward, CHUNKS, (dx.numel() // width, width, *(tensor.data_ptr() for tensor in tensors)))
        return dx, partial.sum(0)


def gelu_bias(product: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(product + bias), (..., M), of a product (..., M) and a bias (M,). Differentiable once, for both.

    Tensors that are not float32 on the CPU, as under autocast, are computed by PyTorch.
    """
    if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in (product, bias)):
        return F.gelu(product + bias, approximate="tanh")
    return _GeluBias.apply(product, bias)
