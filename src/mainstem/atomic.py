"""Atomic writes of files and folders: after a crash or a power failure each is complete or absent.

A file is written under a temporary name, flushed to the disk and renamed. A folder is built the same way: it gets a
manifest with the size and sha256 of every file before it is renamed. Readers never see a partial file or folder.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from mainstem.errors import RunError, TrainingFailed

MANIFEST = "manifest.json"
_TEMPORARY = re.compile(r"^\..+\.tmp-(\d+)$")


def sha256(path: Path) -> str:
    """The file's sha256 in hex, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain(value: Any) -> Any:
    """The value with every non-finite float as None, so that the JSON is valid everywhere."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def to_json(value: Any, indent: int | None = 1, encoding: str = "utf-8") -> str:
    """The value as JSON, with keys in their order and non-finite numbers as null; ASCII with escapes unless UTF-8.

    A lone surrogate, as in a file name that the system's locale cannot decode, is escaped.
    """
    unicode = encoding.lower().replace("-", "") == "utf8"
    text = json.dumps(plain(value), indent=indent, ensure_ascii=not unicode, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises RunError with the file's name if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: not found") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: not readable as JSON ({error}); restore the file from a copy") from None


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders; its renames are durable enough
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, atomically. Raises RunError if its folder does not exist."""
    write_bytes(path, text.encode("utf-8"))


def replaceable(path: Path) -> Path:
    """The path of a file to write, links resolved. Raises RunError if it is not a file or its folder is missing."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise RunError(f"{path}: exists and is not a file; give the name of a file")
    if not path.parent.is_dir():
        raise RunError(f"{path.parent}: no such folder; create it first")
    return path


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically. Raises as `new_file` does."""
    with new_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file, which replaces `path` when the `with` block succeeds and is removed when it fails.

    Raises RunError as `replaceable` does, TrainingFailed on a full disk.
    """
    path = replaceable(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with room_for(path):
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def unused(path: Path) -> Path:
    """The path of a new folder, links resolved. Raises RunError unless it does not exist or is an empty folder."""
    if path.is_symlink() or path.resolve() == Path.cwd():
        raise RunError(f"{path}: a link, or the folder that you are in; give the name of a new folder")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise RunError(f"{path}: already exists; choose another name, or remove it")
    return path.resolve()


@contextlib.contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn a full disk into TrainingFailed with the path and the free space."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free
        raise TrainingFailed(
            f"{path}: no space left to write it ({error.strerror}; {free / 1e6:,.0f} MB free); no partial file "
            "remains; free some space, or choose another disk"
        ) from None


@contextlib.contextmanager
def new_folder(final: Path, manifest: bool = True) -> Iterator[Path]:
    """A temporary folder, which becomes `final` when the `with` block succeeds and is removed when it fails.

    With `manifest` it gets a manifest, which `fault` verifies.
    """
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with room_for(final):
            try:
                temporary.mkdir(parents=True)
            except OSError as error:
                raise RunError(f"{final}: cannot be created ({error.strerror}); choose another path") from None
            yield temporary
            files = sorted(path for path in temporary.iterdir() if path.is_file())
            for path in files:
                sync(path)
            if manifest:
                entries = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
                (temporary / MANIFEST).write_text(to_json(entries), encoding="utf-8")
                sync(temporary / MANIFEST)
            sync(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.rename(temporary, final)
            sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fault(folder: Path, names: Collection[str] | None = None, optional: Collection[str] = ()) -> str | None:
    """The first fault of a folder against its manifest; None if there is none.

    Every file must exist with its size. The sha256 is compared for the files in `names`, for every file if None; one of
    `names` that the manifest leaves out is a fault, unless it is `optional`, such as a file that may be put in by hand.
    """
    if not folder.is_dir():
        return f"{folder}: no such folder"
    if not (folder / MANIFEST).is_file():
        return f"{folder}: no {MANIFEST}, so it was never finished"
    try:
        manifest = read_json(folder / MANIFEST)
        if not manifest:
            return f"{folder / MANIFEST}: lists no file"
        for name, entry in manifest.items():
            path = folder / name
            if not path.is_file():
                return f"{path}: missing"
            if (size := path.stat().st_size) != entry["bytes"]:
                return f"{path}: {size} bytes where {entry['bytes']} were written"
            if (names is None or name in names) and sha256(path) != entry["sha256"]:
                return f"{path}: its sha256 is not the one that was written"
        for name in set(names or ()).difference(manifest, optional):
            if (folder / name).exists():
                return f"{folder / name}: {MANIFEST} does not list it, so it cannot be verified"
    except (RunError, AttributeError, KeyError, TypeError, OSError) as error:
        return f"{folder / MANIFEST}: unreadable ({error})"
    return None


def remove_leftovers(folder: Path, ours: bool = False) -> None:
    """Remove temporary files and folders of processes that have ended, and of this process.

    With `ours` the caller holds the folder's lock, so all of them are leftovers.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _TEMPORARY.match(path.name)
        if match and (ours or int(match[1]) == os.getpid() or not alive(int(match[1]))):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def alive(pid: int) -> bool:
    """Whether a process with this id exists."""
    if os.name == "nt":  # signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OSError):
        return True
    return True
