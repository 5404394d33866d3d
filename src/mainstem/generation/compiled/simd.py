"""Inner products of stored weights and activations, as Numba intrinsics in LLVM vector code.

The product of a row of weights and a vector is LANES partial sums, each over every LANES-th term in order; these are
added pairwise, and then the remaining terms one by one. The order is the same in every tile below, so the product of a
position is bit-identical in any batch. No flag lets the compiler reorder it, and non-finite values stay non-finite.

A weight is converted to float32 where it is used: bfloat16 by a shift, int8 by conversion. Needs Numba (extra `fast`).
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mainstem.model.kernels.arithmetic import fused

LANES = 16
WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
"""Whether the registers hold 16 sums of LANES; else 4."""

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_STORED = {types.float32: _F32, types.uint16: _I16, types.int8: _I8}  # float32, bfloat16 by its bits, int8


def product(rows: int, positions: int) -> Any:
    """A function (like, w, w_step, x, x_step, out, out_step, n, ahead) that fills a tile of products.

    The product of row r and position p goes to out + 4 r + p out_step. `like` is an array of the type in which weights
    are stored; the rest are addresses or bytes, but n, the length of a row. Meanwhile n weights at `ahead` are
    prefetched into the CPU's cache; the address need not be valid.
    """

    @intrinsic
    def tile(typing, like, w, w_step, x, x_step, out, out_step, n, ahead):
        def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
            w, w_step, x, x_step, out, out_step, n, ahead = arguments[1:]
            ws = [builder.add(w, builder.mul(w_step, _I64(r))) for r in range(rows)]
            xs = [builder.add(x, builder.mul(x_step, _I64(p))) for p in range(positions)]
            for i, total in enumerate(_products(builder, _STORED[like.dtype], ws, xs, n, ahead)):
                at = builder.add(out, _I64(4 * (i // positions)))
                at = builder.add(at, builder.mul(out_step, _I64(i % positions)))
                builder.store(total, builder.inttoptr(at, _F32.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 8), code

    return tile


@intrinsic
def inner(typing, x, y, n):
    """The inner product of n float32 at address x with n at y."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        x, y, n = arguments
        return _products(builder, _F32, [x], [y], n)[0]

    return types.float32(*[types.int64] * 3), code


def _products(
    builder: ir.IRBuilder,
    stored: ir.Type,
    ws: list[ir.Value],
    xs: list[ir.Value],
    n: ir.Value,
    ahead: ir.Value | None = None,
) -> list[ir.Value]:
    """The inner products of every row at `ws` with every vector at `xs`, in the order of rows, then vectors."""
    size, whole = _I64(_bytes(stored)), builder.and_(n, _I64(-LANES))

    def add_terms(k: ir.Value, lanes: int, sums: list[ir.Value]) -> None:
        w_now = [_widened(builder, stored, builder.add(at, builder.mul(k, size)), lanes) for at in ws]
        x_now = [_widened(builder, _F32, builder.add(at, builder.mul(k, _I64(4))), lanes) for at in xs]
        for i, total in enumerate(sums):
            term = w_now[i // len(xs)], x_now[i % len(xs)]
            builder.store(fused(builder, *term, builder.load(total)), total)

    nothing = ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)
    totals = [cgutils.alloca_once(builder, nothing.type) for _ in range(len(ws) * len(xs))]
    for total in totals:
        builder.store(nothing, total)
    with cgutils.for_range_slice(builder, _I64(0), whole, _I64(LANES)) as (k, _):
        if ahead is not None:
            _prefetch(builder, builder.add(ahead, builder.mul(k, size)))
        add_terms(k, LANES, totals)
    sums = [cgutils.alloca_once(builder, _F32) for _ in totals]
    for value, total in zip(_halved(builder, [builder.load(total) for total in totals]), sums, strict=True):
        builder.store(value, total)
    with cgutils.for_range_slice(builder, whole, n, _I64(1)) as (k, _):
        add_terms(k, 1, sums)
    return [builder.load(total) for total in sums]


def _bytes(stored: ir.Type) -> int:
    return 4 if stored is _F32 else stored.width // 8


def _widened(builder: ir.IRBuilder, stored: ir.Type, address: ir.Value, lanes: int) -> ir.Value:
    """The stored weights at an address, `lanes` of them or one, as float32."""

    def of(kind: ir.Type) -> ir.Type:
        return kind if lanes == 1 else ir.VectorType(kind, lanes)

    value = builder.load(builder.inttoptr(address, of(stored).as_pointer()), align=_bytes(stored))
    if stored is _I8:
        return builder.sitofp(builder.sext(value, of(_I32)), of(_F32))
    if stored is _I16:
        sixteen = ir.Constant(of(_I32), 16 if lanes == 1 else [16] * lanes)
        return builder.bitcast(builder.shl(builder.zext(value, of(_I32)), sixteen), of(_F32))
    return value


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.inttoptr(address, pointer), _I32(0), _I32(3), _I32(1)])  # to read, all levels, data


def _halved(builder: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """The sum of each vector's lanes, by adding halves down to one lane.

    Two vectors are joined before their halves are added: the same sums in half the steps.
    """

    def lanes(one: ir.Value, other: ir.Value, chosen: list[int]) -> ir.Value:
        return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_I32, len(chosen)), chosen))

    width = LANES  # of what is left of one sum
    while width > 1:
        pairs, vectors = [vectors[i : i + 2] for i in range(0, len(vectors), 2)], []
        for pair in pairs:
            held = len(pair) * pair[0].type.count // width
            low = [width * i + lane for i in range(held) for lane in range(width // 2)]
            high = [lane + width // 2 for lane in low]
            vectors.append(builder.fadd(lanes(pair[0], pair[-1], low), lanes(pair[0], pair[-1], high)))
        width //= 2
    return [builder.extract_element(vector, _I32(i)) for vector in vectors for i in range(vector.type.count)]


@intrinsic
def widened(typing, like, address):
    """The stored weight at an address, as float32; `like` is an array of the stored type."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        return _widened(builder, _STORED[like.dtype], arguments[1], 1)

    return types.float32(like, types.int64), code
