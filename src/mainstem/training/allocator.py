"""glibc's malloc set for training: freed memory is kept for the next step, or returned to the system at once.

The settings hold for the whole process, also after training, until the other function is called: `mallopt` sets them
and cannot read what was set before, so nothing could be restored. They change speed and memory, and no number.
"""

import ctypes
import sys

# mallopt(3): glibc's numbers
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4


def keep_freed() -> bool:
    """Let the process keep the memory that it frees, and take it from one heap.

    Else glibc returns what a step frees to the system and takes it anew, page by page, at the next one. It holds until
    `return_freed`. Returns whether the C library is one that can be told.
    """
    return _told({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20})


def return_freed() -> bool:
    """Let every tensor of 1 MiB or more be memory of its own, which goes back to the system when it is freed.

    Else what is kept lies scattered over one heap, between holes that nothing fits in, and little is saved where
    little is kept. It costs the pages that `keep_freed` saves, and has to be told before much was taken: what the heap
    holds already it keeps. Returns whether the C library is one that can be told.
    """
    return _told({_MMAP_MAX: 1 << 16, _MMAP_THRESHOLD: 1 << 20, _TRIM_THRESHOLD: 1 << 20, _TOP_PAD: 1 << 17})


def _told(asked: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return sum(mallopt(parameter, value) for parameter, value in asked.items()) == len(asked)
