"""tanh-GELU with bias as Triton programs. Only importing this module needs Triton; `launch.programs` does it.

Every program computes tiles of ROWS rows and BLOCK columns, both powers of two; elements outside the tensor are masked.
Tensors are contiguous, (rows, width). Values are converted to float32 when they are loaded and rounded once when they
are stored. `partial` is (programs, width), each program's sum over its rows; the caller adds these in a fixed order.
"""

import triton
import triton.language as tl

CUBIC = tl.constexpr(0.044715)
TWICE_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
FLAT = tl.constexpr(16.0)  # beyond it tanh-GELU is x or 0 in float32; x is clamped to it so that x^3 does not overflow


@triton.jit
def gelu_gate(x):
    """(1 + tanh u) / 2 and its derivative, u = sqrt(2 / pi) (x + 0.044715 x^3): tanh-GELU is x times the gate.

    The gate is the logistic function of 2 u, computed from e^-|2 u|, which neither overflows nor cancels.
    """
    clamped = tl.minimum(tl.maximum(x, -FLAT, tl.PropagateNan.ALL), FLAT, tl.PropagateNan.ALL)
    z = TWICE_SCALE * clamped * (1.0 + CUBIC * clamped * clamped)
    e = tl.exp(-tl.abs(z))
    larger = 1.0 / (1.0 + e)
    slope = TWICE_SCALE * (1.0 + 3.0 * CUBIC * clamped * clamped) * e * larger * larger
    return tl.where(z >= 0.0, larger, e * larger), slope


@triton.jit
def gelu_bias_forward(x_ptr, bias_ptr, y_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = gelu(x + bias), one tile per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    offset = row.to(tl.int64)[:, None] * width + column[None, :]
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    gate, _ = gelu_gate(x)
    tl.store(y_ptr + offset, x * gate, mask=mask)


@triton.jit
def gelu_bias_backward(
    x_ptr, bias_ptr, dy_ptr, dx_ptr, partial_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """dx = dy gelu'(x + bias), and its sums over rows: of P programs, program p computes the row tiles p, p + P, ..."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        gate, slope = gelu_gate(x)
        dx = dy * (gate + x * slope)
        tl.store(dx_ptr + offset, dx, mask=mask)
        total += dx
    tl.store(partial_ptr + program.to(tl.int64) * width + column, tl.sum(total, axis=0), mask=column < width)
