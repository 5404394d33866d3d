"""The cache folder of the compiled step: whole or not there, made once, and never in the way of a text."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mainstem.errors import RunError
from mainstem.generation import compiled
from mainstem.generation.decoding import generate_ids
from test_imports import MODULES, imports

pytestmark = pytest.mark.usefixtures("compiled_step")


def test_a_folder_that_is_not_whole_is_not_there(tmp_path, monkeypatch):
    good = compiled.folder()
    assert compiled.ready()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not compiled.ready()
    copy = compiled.folder()
    for harm in ("truncate", "remove", "unlisted"):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(good, copy)
        assert compiled.ready()
        victim = next(copy.rglob("*.nbc"))
        if harm == "truncate":
            victim.write_bytes(victim.read_bytes()[:1000])
        elif harm == "remove":
            victim.unlink()
        else:
            (copy / compiled.READY).unlink()
        assert not compiled.ready()
        compiled.load.cache_clear()
        assert compiled.load("fp32") is None
    compiled.load.cache_clear()


def test_its_name_says_what_it_was_made_from(tmp_path, monkeypatch):
    file, names = tmp_path / "source.py", []
    monkeypatch.setattr(compiled, "SOURCES", [*compiled.SOURCES, str(file.with_suffix(""))])
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        os.utime(file, (0, 0))
        names.append(compiled.folder())
    assert len({*names}) == 2


def test_every_file_that_is_compiled_is_one_of_its_sources():
    """From the step's own on: those that these import, and so on from those that have compiled functions themselves."""
    found, left = set(), {"mainstem.generation.kernels"}
    while left:
        name = left.pop()
        found.add(name)
        of = imports(MODULES[name])
        if any(module.split(".")[0] == "numba" for module in of):
            left |= (of & MODULES.keys()) - found
    assert found == {f"mainstem.{source.replace('/', '.')}" for source in compiled.SOURCES}


def test_one_process_compiles_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []
    monkeypatch.setattr(compiled, "_compile", lambda into, every: made.append(into) or (into / "x.nbc").write_text("x"))
    lock = compiled.folder().with_suffix(".lock")
    lock.parent.mkdir()
    lock.write_text(str(os.getpid()))
    assert compiled.underway()
    assert not compiled.build()
    assert not made
    lock.write_text("999999999")  # of nobody
    assert not compiled.underway()
    assert compiled.build()
    assert len(made) == 1
    assert not lock.exists()
    assert compiled.ready()
    assert compiled.build()
    assert len(made) == 1


def test_no_room_for_it_is_no_fault(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    compiled.load.cache_clear()
    assert not compiled.ready()
    assert not compiled.start()
    assert compiled.load("fp32") is None
    compiled.load.cache_clear()


@pytest.mark.parametrize("name", compiled.SETTINGS)
def test_what_numba_is_told_of_the_processor_is_in_its_name(monkeypatch, name):
    """Else Numba would miss what lies there, compile while a text waits, and write into the folder."""
    plain = compiled.folder()
    monkeypatch.setenv(name, "0")
    assert compiled.folder() != plain


def test_the_features_of_the_processor_are_in_its_name(monkeypatch):
    from llvmlite import binding

    plain, few = compiled.folder(), binding.get_host_cpu_features()
    few["avx2"] = not few.get("avx2")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: few)
    assert compiled.folder() != plain


def test_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for own in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", own)
        assert compiled.base() == tmp_path / ".cache" / "mainstem"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert compiled.base() == tmp_path / "x" / "mainstem"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "n"))
    assert compiled.base() == tmp_path / "n" / "mainstem"


@pytest.mark.parametrize("lack", ["home", "sources", "numba"])
def test_what_is_missing_stops_no_text(lively, monkeypatch, lack):
    def missing(*arguments):
        raise OSError("a library that cannot be opened") if lack == "numba" else RuntimeError("no home")

    if lack == "home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", missing)
    elif lack == "sources":
        monkeypatch.setattr(compiled, "SOURCES", ("generation/not_there",))
    else:
        monkeypatch.setattr(compiled.importlib, "import_module", missing)
    compiled.load.cache_clear()
    assert compiled.folder() is None
    assert (compiled.ready(), compiled.underway(), compiled.failure()) == (False, False, None)
    assert not compiled.build()
    assert not compiled.start()
    assert len(generate_ids(lively(), [[1]], max_new_tokens=3)[0]) == 3
    compiled.load.cache_clear()


@pytest.fixture
def started(monkeypatch):
    """The processes that would have been started."""
    found = []
    monkeypatch.setattr(subprocess, "Popen", lambda *argv, **options: found.append(argv))
    return found


def test_what_failed_is_not_tried_again_until_the_mark_is_gone(tmp_path, monkeypatch, started):
    def failing(into, every):
        raise ImportError("Numba needs another NumPy\nand more")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.start()
    assert len(started) == 1
    monkeypatch.setattr(compiled, "_compile", failing)
    with pytest.raises(RunError, match=r"could not be made \(Numba needs another NumPy\); see that numba fits numpy"):
        compiled.build()
    (mark,) = (tmp_path / "mainstem").iterdir()
    assert compiled.failure() == f"Numba needs another NumPy; remove {mark} to have it tried again"
    assert not compiled.start()
    assert len(started) == 1
    mark.unlink()
    assert compiled.failure() is None
    assert compiled.start()
    mark.touch()  # for want of room for the reason
    assert "remove" in compiled.failure()
    monkeypatch.setattr(compiled, "_compile", lambda into, every: (into / "x.nbc").write_text("x"))
    assert compiled.build()
    assert compiled.failure() is None


def test_nothing_is_started_where_nothing_can_be_written(tmp_path, monkeypatch, started):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not compiled.start()
    assert not started
