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

from mainstem import atomic
from mainstem.errors import RunError
from mainstem.generation import packed
from mainstem.model.quantized import Weights

SOURCES = (
    "generation/kernels", "generation/lanes", "generation/packed", "model/kernels/address", "model/kernels/arithmetic",
)  # fmt: skip
"""The files that the compiled step is made from."""
SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")
"""Of the environment: those by which Numba compiles for another processor than this."""
READY = "ready.json"
"""Lists what Numba wrote below the folder, with its sha256."""
PATIENCE = 600
"""Seconds after which another process's work on the folder is taken for dead."""


def base() -> Path:
    """Where compiled code is kept: below NUMBA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache, whichever is set first.

    A relative XDG_CACHE_HOME counts for nothing, as its specification has it. Raises RuntimeError without a home.
    """
    if own := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(own) / "mainstem"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "mainstem"


def folder() -> Path | None:
    """The folder of this version on this machine; None without Numba, without a home, and without the sources."""
    try:
        versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
        llvm = importlib.import_module("llvmlite.binding")
        cpu = [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
        files = [Path(__file__).parents[1] / f"{name}.py" for name in SOURCES]
        sources = [f"{file} {file.stat().st_mtime_ns} {file.read_bytes()!r}" for file in files]
        settings = [f"{name}={os.environ.get(name)}" for name in SETTINGS]
        facts = [*versions, *cpu, *settings, sys.version, *sources]
        return base() / f"kernels-{hashlib.sha256(''.join(facts).encode()).hexdigest()[:16]}"
    except Exception:  # whatever is missing or broken, texts are generated without it
        return None


def ready() -> bool:
    """Whether the compiled step lies there whole."""
    found = folder()
    return found is not None and _sound(found)


def _sound(found: Path) -> bool:
    with contextlib.suppress(Exception):  # whatever is wrong with it, it is made again
        if atomic.fault(found) is None:
            files = atomic.read_json(found / READY)
            return bool(files) and all(atomic.sha256(found / name) == sha for name, sha in files.items())
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


def build() -> bool:
    """Compile everything into the folder; takes many seconds. Whether it lies there whole afterwards.

    It does not without Numba, nor while another process is at it. Raises RunError if it fails, and leaves a mark of it.
    """
    found = folder()
    if found is None or _sound(found):
        return found is not None
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        return _build(found)
    except Exception as error:  # of Numba, or of the disk
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        with contextlib.suppress(OSError):
            _mark(found).write_text(reason, encoding="utf-8")
        fix = f"see that numba fits numpy, and that {found.parent} can be written to and has room"
        raise RunError(f"the compiled step could not be made ({reason}); {fix}") from error


def _build(found: Path) -> bool:
    lock = _lock(found)
    if not _take(lock):
        return False
    try:
        _mark(found).unlink(missing_ok=True)
        atomic.remove_leftovers(found.parent)
        with atomic.new_folder(found) as temporary:
            _compile(temporary, ("fp32", "bf16", "int8"))
            files = [path for path in temporary.rglob("*") if path.is_file()]
            shas = {path.relative_to(temporary).as_posix(): atomic.sha256(path) for path in files}
            (temporary / READY).write_text(atomic.to_json(shas), encoding="utf-8")
    finally:
        lock.unlink(missing_ok=True)
    return True


def _mark(found: Path) -> Path:
    """The file that says why the folder could not be made."""
    return found.with_suffix(".failed")


def _lock(found: Path) -> Path:
    """The file that says who makes the folder."""
    return found.with_suffix(".lock")


def _held(lock: Path) -> bool:
    """Whether somebody alive works."""
    with contextlib.suppress(OSError, ValueError):
        pid, age = int(lock.read_text(encoding="utf-8") or 0), time.time() - lock.stat().st_mtime
        return pid > 0 and atomic.alive(pid) and age < PATIENCE
    return False


def underway() -> bool:
    """Whether a living process is compiling."""
    found = folder()
    return found is not None and _held(_lock(found))


def failure() -> str | None:
    """Why compiling failed before, and what to do to have it tried again; None if it did not."""
    found = folder()
    with contextlib.suppress(OSError, ValueError):
        if found is not None:
            reason = _mark(found).read_text(encoding="utf-8") or "the reason could not be written"
            return f"{reason}; remove {_mark(found)} to have it tried again"
    return None


def _take(lock: Path) -> bool:
    """Make the file that says who works; False if somebody alive does."""
    if _held(lock):
        return False
    lock.unlink(missing_ok=True)
    try:
        with open(lock, "x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def start() -> bool:
    """Have the step compiled by another process, which outlives this one; whether it was started. Never raises.

    It is not where the folder cannot be written to, nor where compiling has failed before.
    """
    with contextlib.suppress(Exception):
        found = folder()
        if found is not None and not _mark(found).exists():
            found.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(found.parent, os.W_OK):
                return False
            nothing: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            subprocess.Popen([sys.executable, "-m", __name__], start_new_session=True, **nothing)
            return True
    return False


if __name__ == "__main__":
    os.nice(10) if hasattr(os, "nice") else None
    build()
