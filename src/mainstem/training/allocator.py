"""The C library's allocator, told that a training step asks again for what the last one gave back."""

import ctypes
import sys

# mallopt(3): glibc's numbers, and values that mean never and a step of 64 MiB
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed() -> bool:
    """Let the process keep the memory that it frees, and take it from one heap.

    Else glibc returns what a step frees to the system and takes it anew, page by page, at the next one. It holds for
    the rest of the process. Returns whether the C library is one that can be told.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    asked = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20}
    return sum(mallopt(parameter, value) for parameter, value in asked.items()) == len(asked)
