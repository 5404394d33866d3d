"""What a step frees is there at the next one."""

import platform
import subprocess
import sys

import pytest

from mainstem.training import allocator

FAULTS = """
import resource, torch
from mainstem.training import allocator

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(1 << size) for size in (24, 20, 24, 23, 20, 24)]
    while held:
        held.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = [faults() for _ in range(8)]
assert allocator.keep_freed()
kept = [faults() for _ in range(8)]
print(plain[-1], kept[-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such setting")
def test_freed_memory_is_kept():
    """In a process of its own, since it holds for good: no page is fetched twice."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    plain, kept = map(int, done.stdout.split())
    assert kept < plain / 10  # before, all of it comes anew


@pytest.mark.parametrize("system", ["win32", "darwin", "linux"])
def test_other_systems_and_libraries_are_left_alone(monkeypatch, system):
    def library(name):
        if system != "linux":
            raise TypeError("argument of type 'NoneType' is not iterable")  # as on Windows
        return object()

    monkeypatch.setattr(allocator.sys, "platform", system)
    monkeypatch.setattr(allocator.ctypes, "CDLL", library)
    assert not allocator.keep_freed()
