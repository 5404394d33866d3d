"""PyTorch's own threads, lent to a compiled loop.

A second pool of threads beside PyTorch's would fight with it for the same cores, since threads that have just finished
a product wait for the next by spinning. So a loop is handed to the OpenMP library that PyTorch brings with it; where
there is none, the calling thread does all of it. Which thread does what decides nothing: pieces are claimed.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit

from mainstem.model.kernels.address import add_to

CLAIMED, PIECES, FIRST = range(3)
"""The order of a loop's work: pieces claimed so far, pieces in all, and from FIRST on what the loop wants to know."""


@njit
def claim(work):
    """The number of a piece of `work`, an address, that nobody else has."""
    return add_to(work + 8 * CLAIMED, 1)


def _openmp() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, data, threads, flags)` of the library that is loaded, if PyTorch's threads are its."""
    try:
        parallel = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
    except (OSError, AttributeError):  # not loaded, so PyTorch's threads are another library's
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


_parallel = _openmp()


def run(loop: Any, pieces: int, facts: Sequence[int]) -> None:
    """Do `pieces` pieces of a loop on all of PyTorch's threads.

    Args:
        loop: a `numba.cfunc` of the address of its work, which claims pieces until none is left.
        pieces: in all.
        facts: addresses and sizes, which the loop finds from FIRST on.
    """
    work = np.array((0, pieces, *facts), np.int64)
    if _parallel is None:
        loop.ctypes(work.ctypes.data)
    else:
        _parallel(loop.address, work.ctypes.data, torch.get_num_threads(), 0)
