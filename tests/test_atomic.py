"""Whole or absent: what readers of a file or folder may rely on, whatever struck the writer."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mainstem import atomic
from mainstem.errors import RunError, TrainingFailed

FULL = OSError(errno.ENOSPC, "No space left on device")


def make(final, strike=None):
    """A folder of one file, and of two if nothing strikes between them."""
    with atomic.new_folder(final) as folder:
        (folder / "a.bin").write_bytes(b"new")
        if strike is not None:
            raise strike
        (folder / "b.bin").write_bytes(b"new")


@pytest.fixture
def whole(tmp_path):
    """A finished folder of two files."""
    with atomic.new_folder(tmp_path / "whole") as folder:
        (folder / "a.bin").write_bytes(bytes(range(20)))
        (folder / "b.json").write_text('{"강": 1}', encoding="utf-8")
    return tmp_path / "whole"


@pytest.fixture(scope="module")
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_becomes_whole_with_its_manifest(whole):
    assert sorted(path.name for path in whole.parent.iterdir()) == ["whole"]
    manifest = json.loads((whole / atomic.MANIFEST).read_text())
    assert {name: row["bytes"] for name, row in manifest.items()} == {"a.bin": 20, "b.json": 10}
    assert manifest["a.bin"]["sha256"] == atomic.sha256(whole / "a.bin")
    assert atomic.fault(whole) is None


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_between_files_leaves_what_was_there(whole, stop):
    with pytest.raises(stop):
        make(whole, stop())
    assert sorted(path.name for path in whole.parent.iterdir()) == ["whole"]
    assert atomic.fault(whole) is None
    assert (whole / "a.bin").read_bytes() == bytes(range(20))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_full_disk_between_files_leaves_nothing_and_says_so(tmp_path, number):
    final = tmp_path / "deep" / "folder"
    with pytest.raises(TrainingFailed, match=r"folder: no space left .*MB free.*partial.*another disk") as raised:
        make(final, OSError(number, "no room"))
    assert raised.value.exit_code == 1
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.parametrize("call", range(4))
def test_a_full_disk_while_flushing_leaves_nothing(tmp_path, monkeypatch, call):
    """Flushed in turn: two files, the manifest, the folder; then it is renamed, and its parent is flushed."""
    calls, flush = iter(range(9)), atomic.sync

    def sync(path):
        if next(calls) == call:
            raise FULL
        flush(path)

    monkeypatch.setattr(atomic, "sync", sync)
    with pytest.raises(TrainingFailed):
        make(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_every_file_and_the_folder_are_flushed_before_the_name_is_given(tmp_path, monkeypatch):
    flushed, final = [], tmp_path / "folder"

    def sync(path):
        flushed.append((path.name, final.exists()))

    monkeypatch.setattr(atomic, "sync", sync)
    make(final)
    names = ("a.bin", "b.bin", atomic.MANIFEST, f".folder.tmp-{os.getpid()}")
    before = [(name, False) for name in names]
    assert flushed == [*before, (tmp_path.name, True)]


def test_an_error_of_another_kind_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(PermissionError):
        make(tmp_path / "folder", PermissionError(errno.EACCES, "no"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "last.json"
    atomic.write_text(path, "옛것")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(FULL))
    with pytest.raises(TrainingFailed, match=r"last\.json: no space"):
        atomic.write_text(path, "새것")
    assert path.read_text(encoding="utf-8") == "옛것"
    assert list(tmp_path.iterdir()) == [path]


def test_a_flipped_bit_in_any_byte_of_any_file_is_found(whole):
    """The manifest's own bits too."""
    for path in whole.iterdir():
        sound = path.read_bytes()
        for bit in range(0, 8 * len(sound), 3):
            harmed = bytearray(sound)
            harmed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(harmed)
            assert atomic.fault(whole) is not None, f"{path.name}, bit {bit}"
        path.write_bytes(sound)
    assert atomic.fault(whole) is None


def test_any_cut_of_any_file_is_found(whole):
    for path in whole.iterdir():
        sound = path.read_bytes()
        for size in range(len(sound)):
            path.write_bytes(sound[:size])
            assert atomic.fault(whole) is not None, f"{path.name}, {size} bytes"
        path.write_bytes(sound)
    assert atomic.fault(whole) is None


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: (f / "a.bin").unlink(), r"a\.bin: missing"),
        (lambda f: (f / "a.bin").write_bytes(b"123"), r"a\.bin: 3 bytes where 20 were written"),
        (lambda f: (f / "a.bin").write_bytes(bytes(20)), r"a\.bin: its sha256 is not"),
        (lambda f: (f / atomic.MANIFEST).unlink(), r"no manifest\.json, so it was never finished"),
        (lambda f: (f / atomic.MANIFEST).write_bytes(b"{}"), r"manifest\.json: lists no file"),
        *(
            (lambda f, garbage=garbage: (f / atomic.MANIFEST).write_bytes(garbage), r"manifest\.json: unreadable")
            for garbage in (b"", b"{", b"\xff\xfe", b"[1]", b"true", b"3", b'{"a.bin": 1}', b'{"a.bin": {}}')
        ),
    ],
)
def test_a_fault_is_named(whole, harm, said):
    harm(whole)
    assert re.search(said, atomic.fault(whole))


def test_a_missing_folder_is_a_fault(tmp_path):
    assert "no such folder" in atomic.fault(tmp_path / "nowhere")


def test_leftovers_of_the_dead_and_of_ourselves_go_and_those_of_the_living_stay(tmp_path, dead_pid):
    living = os.getppid()
    for pid in (dead_pid, os.getpid(), living):
        (tmp_path / f".step-00000001.tmp-{pid}").mkdir()
        (tmp_path / f".step-00000001.tmp-{pid}" / "model").write_bytes(b"half")
        (tmp_path / f".last.json.tmp-{pid}").write_bytes(b"half")
    for name in ("step-00000001", ".hidden", f"x.tmp-{dead_pid}", ".step.tmp-x"):
        (tmp_path / name).mkdir()
    atomic.remove_leftovers(tmp_path)
    kept = {f".step-00000001.tmp-{living}", f".last.json.tmp-{living}"}
    assert {path.name for path in tmp_path.iterdir()} == kept | {
        "step-00000001", ".hidden", f"x.tmp-{dead_pid}", ".step.tmp-x"
    }  # fmt: skip
    atomic.remove_leftovers(tmp_path / "nowhere")


def test_alive_tells_the_living_from_the_dead(dead_pid):
    assert atomic.alive(os.getpid())
    assert not atomic.alive(dead_pid)


def test_json_is_valid_everywhere():
    """Non-finite numbers are null, Korean stays Korean, order is kept."""
    value = {"b": float("nan"), "a": [float("inf"), {"x": -float("inf")}, (1.5, "강")], "n": None, "t": True}
    text = atomic.to_json(value, indent=None)
    assert text == '{"b": null, "a": [null, {"x": null}, [1.5, "강"]], "n": null, "t": true}'


def test_json_holds_a_file_name_that_no_locale_can_read(tmp_path):
    """Python makes halves of UTF-16 pairs of its bytes; they come back as they are."""
    name = "강.txt".encode().decode("ascii", "surrogateescape")
    atomic.write_text(tmp_path / "run.json", atomic.to_json({"data": [name]}))
    assert atomic.read_json(tmp_path / "run.json") == {"data": [name]}


@pytest.mark.parametrize(("content", "said"), [(None, "not found"), (b"{", "as JSON"), (b"\xff", "as JSON")])
def test_a_json_file_that_cannot_be_read_is_named(tmp_path, content, said):
    if content is not None:
        (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(RunError, match=rf"f\.json: .*{said}"):
        atomic.read_json(tmp_path / "f.json")


def test_only_files_are_replaced(tmp_path):
    """A device, a pipe or a folder of that name stays what it is; behind a link it is the target that is written."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(RunError, match="not a file"):
            atomic.write_bytes(path, b"x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    atomic.write_bytes(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"x"


def test_json_for_a_stream_that_is_not_utf8_loses_nothing():
    value = {"text": "보았다"}
    assert json.loads(atomic.to_json(value, encoding="ascii")) == value
    assert atomic.to_json(value, encoding="ascii").isascii()
    assert "보았다" in atomic.to_json(value, encoding="UTF-8")


def test_a_new_folder_takes_nobodys_place(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path / "empty")
    for path, said in (("../link", "a link"), (".", "the folder that you are in"), ("../file", "already exists")):
        with pytest.raises(RunError, match=said):
            atomic.unused(Path(path))
    monkeypatch.chdir(tmp_path)
    assert atomic.unused(Path("empty")) == tmp_path.resolve() / "empty"
    assert atomic.unused(Path("new")) == tmp_path.resolve() / "new"
