"""tanh-GELU of a product and its bias on the CPU, by Numba (extra `fast`): one pass forward, one backward.

PyTorch's own spends most of its time in tanh, and has a pass more for the bias in each direction. The bias's gradient
is summed by chunks of rows, in order, so that any number of threads gives the same bits.
"""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from mainstem.model.kernels import team
from mainstem.model.kernels.team import FIRST, PIECES, claim, floats, words

_f = np.float32
_loop = njit(fastmath={"contract"}, error_model="numpy", cache=True)
_body = cfunc(types.void(types.int64), error_model="numpy", cache=True)

CHUNKS = 16
"""Of rows; the pieces that threads share, and the partial sums of a bias's gradient."""

SLOPE, CUBE = _f(2 * math.sqrt(2 / math.pi)), _f(0.044715)
ONE, THREE = _f(1), _f(3)
LOG2_E, LN2_HIGH, LN2_LOW = _f(1 / math.log(2)), _f(0.693359375), _f(math.log(2) - 0.693359375)
ROUND = _f(3 << 22)
"""Added to a float32 of moderate size, it leaves the nearest whole number in the low bits."""


@intrinsic
def _times_power_of_two(context, value, shifted):
    """value 2^n, n being the low bits of `shifted`: n is added to the exponent's bits."""

    def generate(context, builder, signature, arguments):
        word, power = ir.IntType(32), ir.Constant(ir.IntType(32), 23)
        value, shifted = (builder.bitcast(argument, word) for argument in arguments)
        return builder.bitcast(builder.add(value, builder.shl(shifted, power)), ir.FloatType())

    return types.float32(types.float32, types.float32), generate


@_loop
def exp(x):
    """e^x of a float32 within 2 units of the last place, x held between -87 and 88; NaN stays NaN.

    e^x = 2^n e^r with |r| <= ln 2 / 2, and e^r by its series.
    """
    x = _f(-87) if x < _f(-87) else x
    x = _f(88) if x > _f(88) else x
    shifted = x * LOG2_E + ROUND
    n = shifted - ROUND
    r = x - n * LN2_HIGH - n * LN2_LOW
    series = _f(1 / 5040) * r + _f(1 / 720)
    series = series * r + _f(1 / 120)
    series = series * r + _f(1 / 24)
    series = series * r + _f(1 / 6)
    series = series * r + _f(1 / 2)
    series = series * r + ONE
    series = series * r + ONE
    return _times_power_of_two(series, shifted)


@_loop
def _gelu_row(product, bias, y):
    """gelu(x) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)): the tanh form, with one exponential."""
    for j in range(len(y)):
        x = product[j] + bias[j]
        y[j] = x / (ONE + exp(-SLOPE * x * (ONE + CUBE * x * x)))


@_loop
def _gelu_row_backward(product, bias, dy, dx, dbias):
    for j in range(len(dx)):
        x = product[j] + bias[j]
        square = x * x
        gate = ONE / (ONE + exp(-SLOPE * x * (ONE + CUBE * square)))
        value = dy[j] * (gate + x * gate * (ONE - gate) * SLOPE * (ONE + THREE * CUBE * square))
        dx[j] = value
        dbias[j] += value


@_body
def _forward(work):
    facts = carray(words(work), (FIRST + 5,))
    pieces, rows, width = facts[PIECES], facts[FIRST], facts[FIRST + 1]
    product, bias, y = facts[FIRST + 2], carray(floats(facts[FIRST + 3]), (width,)), facts[FIRST + 4]
    piece = claim(work)
    while piece < pieces:
        for i in range(rows * piece // pieces, rows * (piece + 1) // pieces):
            at = 4 * width * i
            _gelu_row(carray(floats(product + at), (width,)), bias, carray(floats(y + at), (width,)))
        piece = claim(work)


@_body
def _backward(work):
    facts = carray(words(work), (FIRST + 7,))
    pieces, rows, width = facts[PIECES], facts[FIRST], facts[FIRST + 1]
    product, bias = facts[FIRST + 2], carray(floats(facts[FIRST + 3]), (width,))
    dy, dx, partial = facts[FIRST + 4], facts[FIRST + 5], facts[FIRST + 6]
    piece = claim(work)
    while piece < pieces:
        dbias = carray(floats(partial + 4 * width * piece), (width,))
        dbias[:] = 0
        for i in range(rows * piece // pieces, rows * (piece + 1) // pieces):
            at = 4 * width * i
            _gelu_row_backward(
                carray(floats(product + at), (width,)), bias, carray(floats(dy + at), (width,)),
                carray(floats(dx + at), (width,)), dbias,
            )  # fmt: skip
        piece = claim(work)


class _GeluBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        product, bias = product.contiguous(), bias.contiguous()
        y, width = torch.empty_like(product), len(bias)
        team.run(_forward, CHUNKS, (y.numel() // width, width, product.data_ptr(), bias.data_ptr(), y.data_ptr()))
        ctx.save_for_backward(product, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        product, bias = ctx.saved_tensors
        dy, dx, width = dy.contiguous(), torch.empty_like(product), len(bias)
        partial = product.new_empty(CHUNKS, width)
        tensors = (product, bias, dy, dx, partial)
        team.run(_backward, CHUNKS, (dx.numel() // width, width, *(tensor.data_ptr() for tensor in tensors)))
        return dx, partial.sum(0)


def gelu_bias(product: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(product + bias), (..., M); float32 on the CPU. Differentiable once, with respect to both."""
    return _GeluBias.apply(product, bias)
