"""The compiled step in the user's cache folder: made once by a process of its own, then opened in a moment.

Compiling takes many seconds, so no text waits for it: `load` only opens what lies there whole, and `start` has it made
for the next time. A folder's name says what it was made from, so another version, interpreter or processor has another.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mainstem import durable
from mainstem.generation import packed
from mainstem.model.quantize import Weights

SOURCES = ("lanes", "kernels", "packed")
READY = "ready.json"
"""Lists what Numba wrote below the folder, with its sha256."""
PATIENCE = 600
"""Seconds after which another process's work on the folder is taken for dead."""


def base() -> Path:
    """Where compiled code is kept: below NUMBA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache, whichever is set first."""
    own = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(own) if own else Path.home() / ".cache") / "mainstem"


def folder() -> Path | None:
    """The folder of this version on this machine; None without Numba."""
    try:
        versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
        cpu = importlib.import_module("llvmlite.binding").get_host_cpu_name()
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return None
    files = [Path(__file__).with_name(f"{name}.py") for name in SOURCES]
    sources = [f"{file} {file.stat().st_mtime_ns} {file.read_bytes()!r}" for file in files]
    facts = [*versions, cpu, sys.version, *sources]
    return base() / f"kernels-{hashlib.sha256(''.join(facts).encode()).hexdigest()[:16]}"


def ready() -> bool:
    """Whether the compiled step lies there whole."""
    found = folder()
    return found is not None and _sound(found)


def _sound(found: Path) -> bool:
    with contextlib.suppress(Exception):  # whatever is wrong with it, it is made again
        if durable.fault(found) is None:
            files = durable.read_json(found / READY)
            return bool(files) and all(durable.sha256(found / name) == sha for name, sha in files.items())
    return False


@functools.cache
def load(weights: Weights) -> Callable[..., bool] | None:
    """The compiled step for weights that are stored so; None if it is not there, whatever the reason."""
    found = folder()
    if found is None or not _sound(found):
        return None
    try:
        return _compile(found, (weights,))
    except Exception:  # of Numba, which only makes texts faster
        return None


def _compile(into: Path, every: tuple[Weights, ...]) -> Callable[..., bool]:
    """The step, compiled for each kind of weights, or taken from the folder if it is there."""
    numba = importlib.import_module("numba")
    kernels = importlib.import_module("mainstem.generation.kernels")
    with _numba_writes_to(numba, into):
        kernels.step.enable_caching()
    kernels.step.disable_compile(False)
    for weights in every:
        likes: list[Any] = [np.zeros(1, packed.STORED[weights])]
        likes += [np.zeros(1, record) for record in (packed.MODEL, packed.BLOCK, packed.POSITION, packed.WORK)]
        kernels.step.compile((*map(numba.typeof, likes), numba.int64))
    kernels.step.disable_compile()  # no call waits for a compiler: one that fits nothing here raises
    return kernels.step


@contextlib.contextmanager
def _numba_writes_to(numba: Any, path: Path) -> Iterator[None]:
    """Numba's cache folder for the functions that are given one here; after it, as it was."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(path)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def build() -> None:
    """Compile everything into the folder, unless another process is at it. Takes many seconds."""
    found = folder()
    if found is None or _sound(found):
        return
    found.parent.mkdir(parents=True, exist_ok=True)
    lock = found.with_suffix(".lock")
    if not _take(lock):
        return
    try:
        durable.remove_leftovers(found.parent)
        with durable.whole_folder(found) as temporary:
            _compile(temporary, ("fp32", "bf16", "int8"))
            files = [path for path in temporary.rglob("*") if path.is_file()]
            shas = {path.relative_to(temporary).as_posix(): durable.sha256(path) for path in files}
            (temporary / READY).write_text(durable.to_json(shas), encoding="utf-8")
    finally:
        lock.unlink(missing_ok=True)


def _take(lock: Path) -> bool:
    """Make the file that says who works; False if somebody alive does."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        pid, age = int(lock.read_text(encoding="utf-8") or 0), time.time() - lock.stat().st_mtime
        if pid and durable.alive(pid) and age < PATIENCE:
            return False
        lock.unlink(missing_ok=True)
    try:
        with open(lock, "x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def start() -> bool:
    """Have the step compiled by another process, which outlives this one; whether it was started. Never raises."""
    with contextlib.suppress(Exception):
        found = folder()
        if found is not None:
            found.parent.mkdir(parents=True, exist_ok=True)
            nothing: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            subprocess.Popen([sys.executable, "-m", __name__], start_new_session=True, **nothing)
            return True
    return False


if __name__ == "__main__":
    os.nice(10) if hasattr(os, "nice") else None
    build()
