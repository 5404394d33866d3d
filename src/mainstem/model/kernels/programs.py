"""The programs that run on the device, in Triton. Importing this file needs Triton; nothing else here does.

Every program works on a tile of ROWS rows and BLOCK columns, both powers of two, with what lies outside the tensor
masked. Tensors are contiguous, (rows, width). Numbers are read into float32, computed there, and rounded once, when
they are stored. Sums over rows are kept in `partial`, a row a program, and added up afterwards in a fixed order.
"""

import triton
import triton.language as tl

CUBIC = tl.constexpr(0.044715)
TWICE_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
FLAT = tl.constexpr(16.0)  # beyond it tanh-GELU is x or 0 in float32, and its cubic is kept from overflowing


@triton.jit
def gelu_gate(x):
    """(1 + tanh u) / 2 and its derivative, u = sqrt(2 / pi) (x + 0.044715 x^3): tanh-GELU is x times the first.

    The first is the logistic function of 2 u, by the exponential of -|2 u|, which neither overflows nor cancels.
    """
    near = tl.minimum(tl.maximum(x, -FLAT, tl.PropagateNan.ALL), FLAT, tl.PropagateNan.ALL)
    z = TWICE_SCALE * near * (1.0 + CUBIC * near * near)
    e = tl.exp(-tl.abs(z))
    larger = 1.0 / (1.0 + e)
    slope = TWICE_SCALE * (1.0 + 3.0 * CUBIC * near * near) * e * larger * larger
    return tl.where(z >= 0.0, larger, e * larger), slope


@triton.jit
def gelu_bias_forward(x_ptr, bias_ptr, y_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = gelu(x + bias), a tile a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    gate, _ = gelu_gate(x)
    tl.store(y_ptr + at, x * gate, mask=inside)


@triton.jit
def gelu_bias_backward(
    x_ptr, bias_ptr, dy_ptr, dx_ptr, partial_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """dx = dy gelu'(x + bias), and each program's share of its sum over rows: program p takes tiles p, p + P, ..."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        gate, slope = gelu_gate(x)
        dx = dy * (gate + x * slope)
        tl.store(dx_ptr + at, dx, mask=inside)
        total += dx
    tl.store(partial_ptr + program.to(tl.int64) * width + column, tl.sum(total, axis=0), mask=column < width)


@triton.jit
def add_norm_forward(
    x_ptr, write_ptr, gain_ptr, bias_ptr, stream_ptr, normed_ptr, mean_ptr, inverse_ptr, rows, width, eps,
    CENTRED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """stream = x + write; normed = gain (stream - mean) inverse + bias, of the stream as it is stored.

    The mean is that of a row, 0 unless CENTRED; `inverse` is 1 / sqrt(mean square of the rest + eps).
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    stream = x + tl.load(write_ptr + at, mask=inside, other=0.0).to(tl.float32)
    stream = stream.to(stream_ptr.dtype.element_ty)
    tl.store(stream_ptr + at, stream, mask=inside)
    rest = stream.to(tl.float32)
    if CENTRED:
        mean = tl.sum(rest, axis=1) / width
        rest = tl.where(inside, rest - mean[:, None], 0.0)
        tl.store(mean_ptr + row, mean, mask=row < rows)
    inverse = 1.0 / tl.sqrt(tl.sum(rest * rest, axis=1) / width + eps)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    normed = rest * inverse[:, None]
    normed *= tl.load(gain_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        normed += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(normed_ptr + at, normed, mask=inside)


@triton.jit
def add_norm_backward(
    stream_ptr, gain_ptr, mean_ptr, inverse_ptr, dstream_ptr, dnormed_ptr, dx_ptr, dwrite_ptr, partial_ptr,
    rows, width, CENTRED: tl.constexpr, ARRIVES: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = the gradient that ARRIVES at the stream, plus that through the norm; dwrite is the same in its own type.

    `partial` is (2, programs, width): each program's share of dgain, then of dbias.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    gain = tl.load(gain_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    dgain, dbias = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        unit = tl.load(stream_ptr + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)[:, None]
        if CENTRED:
            unit = tl.where(inside, unit - tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None], 0.0)
        unit *= inverse
        dnormed = tl.load(dnormed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dgain += dnormed * unit
        dbias += dnormed
        dunit = dnormed * gain
        dx = dunit - unit * (tl.sum(dunit * unit, axis=1) / width)[:, None]
        if CENTRED:
            dx -= (tl.sum(dunit, axis=1) / width)[:, None]
        dx *= inverse
        if ARRIVES:
            dx += tl.load(dstream_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx, mask=inside)
        if SPLIT:
            tl.store(dwrite_ptr + at, dx, mask=inside)
    at = program.to(tl.int64) * width + column
    tl.store(partial_ptr + at, tl.sum(dgain, axis=0), mask=column < width)
    tl.store(partial_ptr + programs.to(tl.int64) * width + at, tl.sum(dbias, axis=0), mask=column < width)
