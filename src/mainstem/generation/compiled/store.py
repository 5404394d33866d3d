"""The compiled step on disk: compiled once by a background process, then loaded.

Compiling takes many seconds, so generation does not wait for it: `load` loads a complete folder from the user's cache,
and `start` compiles one in the background for the next time. The folder's name is a hash of sources, versions and
processor.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from filelock import FileLock, Timeout

from mainstem import atomic
from mainstem.errors import RunError
from mainstem.generation.compiled import records
from mainstem.model.quantized import Weights

SOURCES = (
    "generation/compiled/step", "generation/compiled/simd", "generation/compiled/records", "model/kernels/address",
    "model/kernels/arithmetic",
)  # fmt: skip
"""The source files of the compiled step."""
SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")
"""Environment variables that set the processor for which Numba compiles."""
READY = "ready.json"
"""The file that lists Numba's files in the folder, with their sha256."""


def base() -> Path:
    """The folder of compiled code: below NUMBA_CACHE_DIR if that is set, else in the user's cache folder.

    Raises RuntimeError without a home folder.
    """
    if own := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(own) / "mainstem"
    return platformdirs.user_cache_path("mainstem", appauthor=False)


def folder() -> Path | None:
    """The folder of this version on this machine; None without Numba, a home folder or the sources."""
    try:
        versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
        llvm = importlib.import_module("llvmlite.binding")
        cpu = [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
        files = [Path(__file__).parents[2] / f"{name}.py" for name in SOURCES]
        sources = [f"{file} {file.stat().st_mtime_ns} {file.read_bytes()!r}" for file in files]
        settings = [f"{name}={os.environ.get(name)}" for name in SETTINGS]
        facts = [*versions, *cpu, *settings, sys.version, *sources]
        return base() / f"kernels-{hashlib.sha256(''.join(facts).encode()).hexdigest()[:16]}"
    except Exception:  # whatever the cause, PyTorch generates without it
        return None


def ready() -> bool:
    """Whether the compiled step is on disk, complete and valid."""
    path = folder()
    return path is not None and _verified(path)


def _verified(path: Path) -> bool:
    with contextlib.suppress(Exception):  # whatever the cause, it is compiled again
        if atomic.fault(path) is None:
            files = atomic.read_json(path / READY)
            return bool(files) and all(atomic.sha256(path / name) == sha for name, sha in files.items())
    return False


def load(weights: Weights) -> Callable[..., bool] | None:
    """The compiled step for weights of this storage; None if it is not available, whatever the reason.

    What is not there yet is looked for again at the next text.
    """
    path = folder()
    return None if path is None or not path.is_dir() else _load(path, weights)


@functools.cache
def _load(path: Path, weights: Weights) -> Callable[..., bool] | None:
    if not _verified(path):
        return None
    try:
        return _compile(path, (weights,))
    except Exception:  # an error of Numba; PyTorch generates without it
        return None


def _compile(into: Path, every: tuple[Weights, ...]) -> Callable[..., bool]:
    """The step, compiled for each storage of weights, or loaded from the folder."""
    numba = importlib.import_module("numba")
    step = importlib.import_module("mainstem.generation.compiled.step")
    with _numba_writes_to(numba, into):
        step.step.enable_caching()
    step.step.disable_compile(False)
    for weights in every:
        likes: list[Any] = [np.zeros(1, records.STORED[weights])]
        likes += [np.zeros(1, record) for record in (records.MODEL, records.BLOCK, records.POSITION, records.WORK)]
        step.step.compile((*map(numba.typeof, likes), numba.int64))
    step.step.disable_compile()  # a call with other types raises instead of compiling
    return step.step


@contextlib.contextmanager
def _numba_writes_to(numba: Any, path: Path) -> Iterator[None]:
    """Set Numba's cache folder within the `with` block."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(path)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def build(patience: float = 0) -> bool:
    """Compile the step into the folder, which takes many seconds. Returns whether the folder is complete afterwards.

    It is not without Numba, nor where another process compiles for longer than `patience` seconds. Raises RunError if
    compiling fails, and writes a file with the reason.
    """
    path = folder()
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path).acquire(timeout=patience):
            if not _verified(path):
                _build(path)
        return True
    except Timeout:
        return False
    except Exception as error:  # of Numba, or of the disk
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        with contextlib.suppress(OSError):
            _failure(path).write_text(reason, encoding="utf-8")
        fix = f"check that numba fits numpy, and that {path.parent} is writable and has space"
        raise RunError(f"the compiled decoder could not be built ({reason}); {fix}") from error


def _build(path: Path) -> None:
    _failure(path).unlink(missing_ok=True)
    atomic.remove_leftovers(path.parent)
    with atomic.new_folder(path) as temporary:
        _compile(temporary, ("fp32", "bf16", "int8"))
        files = [file for file in temporary.rglob("*") if file.is_file()]
        shas = {file.relative_to(temporary).as_posix(): atomic.sha256(file) for file in files}
        (temporary / READY).write_text(atomic.to_json(shas), encoding="utf-8")


def _failure(path: Path) -> Path:
    """The file with the reason why compiling failed."""
    return path.with_suffix(".failed")


def _lock(path: Path) -> FileLock:
    """The lock of the process that compiles; the system releases it when the process ends."""
    return FileLock(path.with_suffix(".lock"))


def underway() -> bool:
    """Whether a process is compiling."""
    path = folder()
    if path is None or not path.with_suffix(".lock").exists():
        return False
    try:
        with _lock(path).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def failure() -> str | None:
    """Why compiling failed before, and how to try again; None if it did not."""
    path = folder()
    with contextlib.suppress(OSError, ValueError):
        if path is not None:
            reason = _failure(path).read_text(encoding="utf-8") or "the reason could not be written"
            return f"{reason}; mainstem compile tries again"
    return None


def start() -> bool:
    """Start a background process that compiles the step and outlives this one. Returns whether it was started.

    It is not started where the folder is not writable or compiling has failed before. The process imports nothing from
    the current folder (-P) and runs in the cache folder. Never raises.
    """
    with contextlib.suppress(Exception):
        path = folder()
        if path is not None and not _failure(path).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                return False
            nothing: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            line = [sys.executable, "-P", "-m", __name__]
            subprocess.Popen(line, cwd=path.parent, start_new_session=True, **nothing)
            return True
    return False


def remove() -> list[Path]:
    """Remove compiled code of every version, and failure files. Returns the folders that were removed.

    A folder that a process is compiling stays.
    """
    removed = []
    for path in sorted(base().glob("kernels-*")):
        if path.is_dir():
            with contextlib.suppress(Timeout), _lock(path).acquire(timeout=0):
                shutil.rmtree(path)
                removed.append(path)
        elif path.suffix == ".failed":
            path.unlink()
    return removed


if __name__ == "__main__":
    os.nice(10) if hasattr(os, "nice") else None
    build()
