"""What a step frees is there at the next one, or is the system's again."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mainstem.training import allocator
from training_runs import cut, finish, training

FAULTS = """
import resource, sys, torch
from mainstem.training import allocator

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(1 << size) for size in map(int, sys.argv[2:])]
    while held:
        held.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1]:
    assert getattr(allocator, sys.argv[1])()
print([faults() for _ in range(8)][-1])
"""


def faults(setting, *sizes):
    """Of a later round of tensors of 2^size numbers, in a process of its own, told at its start."""
    line = [sys.executable, "-c", FAULTS, setting, *map(str, sizes)]
    own = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}  # pages of one size
    return int(subprocess.run(line, capture_output=True, text=True, check=True, env=own).stdout)


GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such setting")


@pytest.mark.slow
@GLIBC
def test_freed_memory_is_kept():
    """Tensors of many megabytes, which glibc gives back at once."""
    sizes = (24, 20, 24, 23, 20, 24)
    assert faults("keep_freed", *sizes) < faults("", *sizes) / 10


@pytest.mark.slow
@GLIBC
def test_freed_memory_is_returned():
    """Tensors of a few megabytes, which glibc may learn to keep: each comes anew, as the kernel's pages tell."""
    sizes = (22, 20, 22, 21, 20, 22)
    assert faults("keep_freed", *sizes) < faults("return_freed", *sizes) / 10


@pytest.mark.parametrize(("recompute", "expected"), [(False, "keep_freed"), (True, "return_freed")])
def test_a_run_tells_the_allocator_at_its_start(data, tmp_path, monkeypatch, recompute, expected):
    """Memory is kept for the next step; with activation checkpointing it goes back."""
    told = []
    for name in ("keep_freed", "return_freed"):
        monkeypatch.setattr(allocator, name, lambda name=name: told.append(name) or True)
    finish(training(tmp_path / "run", cut(data), recompute=recompute, steps=1))
    assert told == [expected]


@pytest.mark.parametrize(
    ("setting", "parameters"),
    [("keep_freed", {-4: 0, -1: 2**31 - 1, -2: 2**26}), ("return_freed", {-4: 2**16, -3: 2**20, -1: 2**20, -2: 2**17})],
)
def test_glibc_is_told_by_mallopt(monkeypatch, setting, parameters):
    """By glibc's numbers of malloc.h: M_TRIM_THRESHOLD -1, M_TOP_PAD -2, M_MMAP_THRESHOLD -3, M_MMAP_MAX -4."""
    told = {}
    library = SimpleNamespace(mallopt=lambda parameter, value: told.update({parameter: value}) or 1)
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    assert getattr(allocator, setting)()
    assert told == parameters


@pytest.mark.parametrize("system", ["win32", "darwin", "linux"])
def test_other_systems_and_libraries_are_left_alone(monkeypatch, system):
    def library(name):
        if system != "linux":
            raise TypeError("argument of type 'NoneType' is not iterable")  # as on Windows
        return object()

    monkeypatch.setattr(allocator.sys, "platform", system)
    monkeypatch.setattr(allocator.ctypes, "CDLL", library)
    assert not allocator.keep_freed()
    assert not allocator.return_freed()
