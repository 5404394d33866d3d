"""Files and folders that are either whole or absent, whatever stops the process or the machine.

A file is written under a temporary name, flushed to the disk and renamed. A folder is built the same way, closed by a
manifest with the size and sha256 of every file, and only then renamed. Readers never see a half.
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
    """JSON with keys in their own order and non-finite numbers as null; for what is not UTF-8, in ASCII with escapes.

    Half a UTF-16 pair, which stands in a file name that the system's locale cannot read, is escaped.
    """
    unicode = encoding.lower().replace("-", "") == "utf8"
    text = json.dumps(plain(value), indent=indent, ensure_ascii=not unicode, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_json(path: Path) -> Any:
    """The file's value. Raises RunError naming the file if it is missing or no JSON."""
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
    """Replace a file by UTF-8 in one step. Raises RunError if its folder is not there."""
    write_bytes(path, text.encode("utf-8"))


def replaceable(path: Path) -> Path:
    """The path behind links, to be written to. Raises RunError where something else stands, or there is no folder."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise RunError(f"{path}: it is there and is not a file; give the name of a file")
    if not path.parent.is_dir():
        raise RunError(f"{path.parent}: no such folder; make it first")
    return path


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file in one step. Raises as `new_file` does."""
    with new_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file to write, which replaces `path` when the block ends well and vanishes when it does not.

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
    """A place for a new folder: nothing is there, or an empty folder that is nobody's. Raises RunError otherwise."""
    if path.is_symlink() or path.resolve() == Path.cwd():
        raise RunError(f"{path}: a link, or the folder that you are in; give the name of a new folder")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise RunError(f"{path}: it is there already; choose another name, or remove it")
    return path.resolve()


@contextlib.contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn a full disk into one message that names the folder and what is free on it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free
        raise TrainingFailed(
            f"{path}: no room to write it ({error.strerror}; {free / 1e6:,.0f} MB free), and nothing half-written is "
            "left; free some space, or choose another disk"
        ) from None


@contextlib.contextmanager
def new_folder(final: Path, manifest: bool = True) -> Iterator[Path]:
    """A temporary folder to fill, which becomes `final` when the block ends well and vanishes when it does not.

    With `manifest` it is one that `fault` can verify.
    """
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with room_for(final):
            try:
                temporary.mkdir(parents=True)
            except OSError as error:
                raise RunError(f"{final}: cannot be made ({error.strerror}); choose another place") from None
            yield temporary
            files = sorted(path for path in temporary.iterdir() if path.is_file())
            for path in files:
                sync(path)
            if manifest:
                said = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
                (temporary / MANIFEST).write_text(to_json(said), encoding="utf-8")
                sync(temporary / MANIFEST)
            sync(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.rename(temporary, final)
            sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fault(folder: Path, names: Collection[str] | None = None) -> str | None:
    """What is wrong with a folder that `new_folder` wrote; None when every file is as its manifest says.

    Every file has to be there with its size; sha256 is compared for `names` alone, for every file if None.
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
    except (RunError, AttributeError, KeyError, TypeError, OSError) as error:
        return f"{folder / MANIFEST}: unreadable ({error})"
    return None


def remove_leftovers(folder: Path, ours: bool = False) -> None:
    """Remove the temporary files and folders of processes that are no longer there, and of our own earlier work.

    With `ours` the caller holds the folder's lock, so that whatever is left there is dead.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _TEMPORARY.match(path.name)
        if match and (ours or int(match[1]) == os.getpid() or not alive(int(match[1]))):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def alive(pid: int) -> bool:
    """Whether a process of that number exists."""
    if os.name == "nt":  # signal 0 is no mere question there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OSError):
        return True
    return True
