"""Access to memory by address in Numba loops: arrays, and atomic counters.

Nothing is checked: an address must belong to live memory. Needs Numba (extra `fast`).
"""

from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

_WORD = ir.IntType(64)


def _pointer_to(kind: Any) -> Any:
    """A function from an address to a pointer to `kind`, a type of Numba's."""

    @intrinsic
    def pointer(typing, address):
        def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), code

    return pointer


_float_at, _word_at = _pointer_to(types.float32), _pointer_to(types.int64)


@njit
def floats(address, n):
    """An array of n float32 at an address."""
    return carray(_float_at(address), (n,))


@njit
def words(address, n):
    """An array of n int64 at an address."""
    return carray(_word_at(address), (n,))


@intrinsic
def add_to(typing, address, value):
    """Atomically add to the int64 at an address; returns its previous value."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        at = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", at, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def seen_at(typing, address):
    """Atomically load the int64 at an address."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WORD.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), code
