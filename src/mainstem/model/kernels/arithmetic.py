"""float32 arithmetic for compiled loops: a b + c, e^x, the logistic function and tanh-GELU.

Every operation is explicit, and no flag lets the compiler fuse or reorder them. So results are bit-identical in vector
and scalar code, and non-finite values stay non-finite. Needs Numba (extra `fast`).
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.polynomial import Chebyshev, Polynomial

_f = np.float32
ONE = _f(1)
SLOPE, CUBE = _f(2 * math.sqrt(2 / math.pi)), _f(0.044715)
"""tanh-GELU is x logistic(SLOPE (x + CUBE x^3))."""
LOWEST, HIGHEST = _f(-87), _f(88)
"""Between them 2^n is a normal float32, and e^x is not infinite."""
LOG2_E, LN2_HIGH, LN2_LOW = _f(1 / math.log(2)), _f(0.693359375), _f(math.log(2) - 0.693359375)
_HALF = math.log(2) / 2
COEFFICIENTS = tuple(map(_f, Chebyshev.interpolate(np.exp, 6, [-_HALF, _HALF]).convert(kind=Polynomial).coef))
"""Coefficients of r^0 to r^6 of the Chebyshev interpolant of e^r, within 1e-8 of it for |r| <= ln 2 / 2."""
ROUND = _f(3 << 22)
"""Added to a float32 of moderate size, it leaves the nearest integer in the low bits."""


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """LLVM code of a b + c, float32 or vectors, rounded once where the CPU has fused multiply-add."""
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.{suffix}"), [a, b, c])


@intrinsic
def multiply_add(typing, a, b, c):
    """The value a b + c, rounded once where the CPU has fused multiply-add."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        return fused(builder, *arguments)

    return types.float32(*[types.float32] * 3), code


@intrinsic
def _power_of_two(typing, shifted):
    """2^n, where n is in the low bits of `shifted`, which become the exponent of a float32."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        word = ir.IntType(32)
        exponent = builder.add(builder.bitcast(arguments[0], word), word(127))
        return builder.bitcast(builder.shl(exponent, word(23)), ir.FloatType())

    return types.float32(types.float32), code


@njit
def exp(x):
    """e^x within 2 units in the last place, x clamped to [-87, 88]; NaN stays NaN.

    e^x = 2^n e^r with |r| <= ln 2 / 2, and e^r is a polynomial.
    """
    x = LOWEST if x < LOWEST else x
    x = HIGHEST if x > HIGHEST else x
    shifted = multiply_add(x, LOG2_E, ROUND)
    n = shifted - ROUND
    r = multiply_add(n, -LN2_LOW, multiply_add(n, -LN2_HIGH, x))
    y = multiply_add(COEFFICIENTS[6], r, COEFFICIENTS[5])
    y = multiply_add(y, r, COEFFICIENTS[4])
    y = multiply_add(y, r, COEFFICIENTS[3])
    y = multiply_add(y, r, COEFFICIENTS[2])
    y = multiply_add(y, r, COEFFICIENTS[1])
    y = multiply_add(y, r, COEFFICIENTS[0])
    return y * _power_of_two(shifted)


@njit(error_model="numpy")
def logistic(x):
    """The logistic function 1 / (1 + e^-x)."""
    return ONE / (ONE + exp(-x))


@njit(error_model="numpy")
def gelu_tanh(x):
    """x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), with one exponential (Hendrycks and Gimpel 2016)."""
    return x / (ONE + exp(x * multiply_add(CUBE, x * x, ONE) * -SLOPE))
