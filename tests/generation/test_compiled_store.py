"""The cache folder of the compiled step: whole or not there, made once, and never in the way of a text."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

import mainstem
from mainstem.errors import RunError
from mainstem.generation.compiled import store
from mainstem.generation.decoding import generate_ids
from test_imports import MODULES, imports

pytestmark = pytest.mark.usefixtures("compiled_step")


def test_a_folder_that_is_not_whole_is_not_there(tmp_path, monkeypatch):
    good = store.folder()
    assert store.ready()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not store.ready()
    copy = store.folder()
    for harm in ("truncate", "remove", "unlisted"):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(good, copy)
        assert store.ready()
        victim = next(copy.rglob("*.nbc"))
        if harm == "truncate":
            victim.write_bytes(victim.read_bytes()[:1000])
        elif harm == "remove":
            victim.unlink()
        else:
            (copy / store.READY).unlink()
        assert not store.ready()
        store._load.cache_clear()
        assert store.load("fp32") is None
    store._load.cache_clear()


def test_its_name_says_what_it_was_made_from(tmp_path, monkeypatch):
    file, names = tmp_path / "source.py", []
    monkeypatch.setattr(store, "SOURCES", [*store.SOURCES, str(file.with_suffix(""))])
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        os.utime(file, (0, 0))
        names.append(store.folder())
    assert len({*names}) == 2


def test_every_file_that_is_compiled_is_one_of_its_sources():
    """From the step's own on: those that these import, and so on from those that have compiled functions themselves."""
    found, left = set(), {"mainstem.generation.compiled.step"}
    while left:
        name = left.pop()
        found.add(name)
        of = imports(MODULES[name])
        if any(module.split(".")[0] == "numba" for module in of):
            left |= (of & MODULES.keys()) - found
    assert found == {f"mainstem.{source.replace('/', '.')}" for source in store.SOURCES}


def test_one_process_compiles_at_a_time(tmp_path, monkeypatch):
    """Who comes second waits as long as it was told to; a lock whose process died stops nobody."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []
    monkeypatch.setattr(store, "_compile", lambda into, every: made.append(into) or (into / "x.nbc").write_text("x"))
    path = store.folder()
    path.parent.mkdir()
    assert not store.underway()
    with FileLock(path.with_suffix(".lock")):
        assert store.underway()
        assert not store.build()
        assert not made
    path.with_suffix(".lock").write_text("left by a process that died")
    assert not store.underway()
    assert store.build()
    assert len(made) == 1
    assert store.ready()
    assert store.build()
    assert len(made) == 1


def test_what_was_compiled_can_be_removed(tmp_path, monkeypatch):
    """Every version's, and marks of failure; what a process is compiling stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = store.base()
    for name in ("kernels-old", "kernels-busy", "unrelated"):
        (base / name).mkdir(parents=True)
    (base / "kernels-old.failed").touch()
    with FileLock(base / "kernels-busy.lock"):
        assert store.remove() == [base / "kernels-old"]
    assert {path.name for path in base.iterdir()} >= {"kernels-busy", "unrelated"}
    assert not (base / "kernels-old.failed").exists()


def test_the_process_in_the_background_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """A model's folder may hold a `random.py`; standing in it must not run it."""
    cache, here = tmp_path / "cache", tmp_path / "model"
    here.mkdir()
    for name in ("random", "json", "numpy", "numba", "platformdirs", "mainstem"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'FIRED')!r}, 'w')\nraise ImportError")
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(Path(mainstem.__file__).parents[1])]))
    started = []
    popen = subprocess.Popen

    def recorded(line, **options):
        started.append(popen([*line[:-2], "-c", "import random, json, numpy, mainstem"], **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    assert store.start()
    assert started[0].wait() == 0
    assert not (tmp_path / "FIRED").exists()


def test_no_room_for_it_is_no_fault(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    store._load.cache_clear()
    assert not store.ready()
    assert not store.start()
    assert store.load("fp32") is None
    store._load.cache_clear()


@pytest.mark.parametrize("name", store.SETTINGS)
def test_what_numba_is_told_of_the_processor_is_in_its_name(monkeypatch, name):
    """Else Numba would miss what lies there, compile while a text waits, and write into the folder."""
    plain = store.folder()
    monkeypatch.setenv(name, "0")
    assert store.folder() != plain


def test_the_features_of_the_processor_are_in_its_name(monkeypatch):
    from llvmlite import binding

    plain, few = store.folder(), binding.get_host_cpu_features()
    few["avx2"] = not few.get("avx2")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: few)
    assert store.folder() != plain


def test_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert store.base() == tmp_path / "x" / "mainstem"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "n"))
    assert store.base() == tmp_path / "n" / "mainstem"


@pytest.mark.parametrize("lack", ["home", "sources", "numba"])
def test_what_is_missing_stops_no_text(lively, monkeypatch, lack):
    def missing(*arguments):
        raise OSError("a library that cannot be opened") if lack == "numba" else RuntimeError("no home")

    if lack == "home":
        monkeypatch.setattr(store.platformdirs, "user_cache_path", missing)
    elif lack == "sources":
        monkeypatch.setattr(store, "SOURCES", ("generation/compiled/not_there",))
    else:
        monkeypatch.setattr(store.importlib, "import_module", missing)
    store._load.cache_clear()
    assert store.folder() is None
    assert (store.ready(), store.underway(), store.failure()) == (False, False, None)
    assert not store.build()
    assert not store.start()
    assert len(generate_ids(lively(), [[1]], max_new_tokens=3)[0]) == 3
    store._load.cache_clear()


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
    assert store.start()
    assert len(started) == 1
    monkeypatch.setattr(store, "_compile", failing)
    with pytest.raises(RunError, match=r"could not be built \(Numba needs another NumPy\); check that numba"):
        store.build()
    (mark,) = (tmp_path / "mainstem").glob("*.failed")
    assert store.failure() == "Numba needs another NumPy; mainstem compile tries again"
    assert not store.start()
    assert len(started) == 1
    mark.unlink()
    assert store.failure() is None
    assert store.start()
    mark.touch()  # for want of room for the reason
    assert "mainstem compile" in store.failure()
    monkeypatch.setattr(store, "_compile", lambda into, every: (into / "x.nbc").write_text("x"))
    assert store.build()
    assert store.failure() is None


def test_nothing_is_started_where_nothing_can_be_written(tmp_path, monkeypatch, started):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not store.start()
    assert not started
