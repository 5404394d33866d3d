"""Compiled loops on PyTorch's own OpenMP threads.

A second thread pool beside PyTorch's would compete with it for the same cores, because threads that have finished a
product wait for the next one by spinning. So a loop is run by the OpenMP library that PyTorch has loaded; where that is
not GNU's, the calling thread runs all of it. The result does not depend on which thread computes what.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit

from mainstem.model.kernels.address import add_to

CLAIMED, PIECES, ARGUMENTS = range(3)
"""Positions in a loop's work array, int64: pieces claimed so far, pieces in all, and the first of its arguments."""


@njit
def claim(work):
    """The number of the next piece that no thread has claimed yet; `work` is the address of the work array."""
    return add_to(work + 8 * CLAIMED, 1)


def _gnu_openmp() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, data, threads, flags)` of GNU's OpenMP, if the process has loaded it."""
    try:
        parallel = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
    except (OSError, AttributeError):  # not loaded: PyTorch's threads are those of another library
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


_parallel = _gnu_openmp()


def run(loop: Any, pieces: int, arguments: Sequence[int]) -> None:
    """Run a loop of `pieces` pieces on all of PyTorch's threads; returns when every piece is done.

    Args:
        loop: a `numba.cfunc` of the address of its work array, which claims pieces until none is left.
        pieces: how many pieces there are.
        arguments: addresses and sizes, which the loop reads from position ARGUMENTS of its work array.
    """
    work = np.array((0, pieces, *arguments), np.int64)
    if _parallel is None:
        loop.ctypes(work.ctypes.data)
    else:
        _parallel(loop.address, work.ctypes.data, torch.get_num_threads(), 0)
