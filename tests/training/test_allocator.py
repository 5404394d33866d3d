"""What a step frees is there at the next one, or is the system's again."""

import os
import platform
import subprocess
import sys

import pytest

from mainstem.training import allocator

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such setting")
def test_freed_memory_is_kept():
    """Tensors of many megabytes, which glibc gives back at once."""
    sizes = (24, 20, 24, 23, 20, 24)
    assert faults("keep_freed", *sizes) < faults("", *sizes) / 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such setting")
def test_freed_memory_is_returned():
    """Tensors of a few megabytes, which glibc may learn to keep: each comes anew, as the kernel's pages tell."""
    sizes = (22, 20, 22, 21, 20, 22)
    assert faults("keep_freed", *sizes) < faults("return_freed", *sizes) / 10


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
