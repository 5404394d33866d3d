"""The memory that a look inside takes at its peak, each in a process of its own.

The peak is the highest resident size while it works, less that before it starts, when the model is built, a first short
look has loaded what looks need, and what was freed is handed back. Only Linux counts it; elsewhere it is None.
"""

import ctypes
import gc
import multiprocessing
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from benchmarks.peer import find
from benchmarks.subject import Subject
from mainstem.stream.capture import capture

Value = TypeVar("Value")
_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Taken:
    """Bytes."""

    peak: int | None
    """The highest resident size while it worked, less that before."""
    held: int
    """The tensors that it left; one that has several names counts once."""


def alone(function: Callable[..., Value], *arguments: Any) -> Value:
    """What a function of a module returns in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def ours(subject: Subject) -> Taken:
    """A capture, and every head's part of every position's next token."""
    model = subject.model()

    def look(ids: Tensor, targets: Tensor) -> Iterable[Tensor]:
        trace = capture(model, ids)
        why = trace.attribution(targets, by="head", pos=None)
        return [*trace.values.values(), why.values, why.total]

    ids, targets = subject.text()
    look(ids[:, :2], targets[:, :2])
    return taken(lambda: look(ids, targets))


def peers(subject: Subject) -> Taken | None:
    """TransformerLens's cache of everything; None if it cannot be compared."""
    ids, _ = subject.text()
    peer = find(subject.model(), ids).peer
    if peer is None:
        return None
    peer.cache(ids[:, :2])
    return taken(lambda: peer.cache(ids).values())


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
