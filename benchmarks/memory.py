"""The memory that work takes at its peak, to be counted in a process of its own.

The peak is the highest resident size while it works, less that before it starts, when what was
built before stands, and what was freed is handed back. Only Linux counts it; elsewhere it is None.
"""

import ctypes
import gc
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Taken:
    """Bytes."""

    peak: int | None
    """The highest resident size while it worked, less that before."""
    held: int
    """The tensors that it left; one that has several names counts once."""


def taken(work: Callable[[], Iterable[Tensor]]) -> Taken:
    """What work takes, and how much of it are the tensors that it returns."""
    gc.collect()
    before = _resident()
    left = list(work())
    peak = None if before is None else _status("VmHWM") - before
    return Taken(peak, sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in left}.values()))


def _resident() -> int | None:
    """The resident size now, from which the highest one is counted from here on; None where nobody counts."""
    if not (_PROCESS / "clear_refs").exists():
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # else what was freed would be used again unseen
        trim(0)
    (_PROCESS / "clear_refs").write_text("5")  # proc(5): the highest becomes the present one
    return _status("VmRSS")


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
