"""Sides in processes of their own: the settings of each, what crosses, what fails; and what is timed."""

import gc
import os
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import processes
from benchmarks.processes import NotCompared, Process, Timed, alone, done
from mainstem.errors import ConfigError, TrainingFailed

SETTINGS = ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE", "OMP_WAIT_POLICY")


def side(fault=None):
    """What the processes of these tests build."""
    if fault == "missing":
        raise NotCompared("no such program")
    if fault == "wrong":
        raise ConfigError("rounds: 0 is not possible")
    print("a library greets")
    numbers = []
    return {
        "settings": lambda: {name: os.environ.get(name) for name in SETTINGS},
        "modules": lambda: sorted(name for name in sys.modules if name.startswith("mainstem")),
        "arrays": lambda: {"ones": torch.ones(2, 3), "twos": np.full(2, 2)},
        "count": lambda step: numbers.append(step) or sum(numbers),
        "part": lambda: Timed(2.5, [1, 2]),
        "end": lambda: os._exit(3),
    }


@pytest.fixture
def start(monkeypatch):
    """Starts a process with `side`, by a user who set nothing."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (Path(__file__).parent, *sys.path))))
    return lambda ours=False, **arguments: Process("test_processes:side", ours=ours, **arguments)


def test_a_side_crosses_the_border(start):
    with start() as process:
        assert process.value("settings") == dict.fromkeys(SETTINGS)
        arrays = process.value("arrays")
        assert arrays["ones"].tolist() == [[1, 1, 1]] * 2
        assert arrays["twos"].tolist() == [2, 2]
        assert process.call("arrays").value is None
        assert process.side("count", 3)(keep=True).value == 3
        assert process.value("count", 4) == 7
        assert process.call("part") == (2.5, [1, 2])
        assert process.call("count", 1).seconds < 2.5
        with pytest.raises(TrainingFailed, match="the process of test_processes:side ended"):
            process.call("end")


def test_ours_has_the_settings_of_the_command_line_and_leaves_none_behind(start):
    with start(ours=True) as process:
        assert process.value("settings") == {
            "GOMP_SPINCOUNT": "1000", "THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": None
        }  # fmt: skip
    assert not set(SETTINGS) & set(os.environ)


def test_what_cannot_be_built_is_told(start):
    with pytest.raises(NotCompared, match="no such program"):
        start(fault="missing")
    with pytest.raises(ConfigError, match="rounds: 0"):
        start(fault="wrong")


def test_alone_is_a_process_for_one_value(monkeypatch, in_this_process):
    assert alone("test_processes:side", "count", 5, ours=False) == 5


def test_a_result_is_freed_after_its_time_was_taken(monkeypatch):
    clock, freed = [0.0], []
    monkeypatch.setattr(processes.time, "perf_counter", lambda: clock[0])

    class Result:
        pass

    def work():
        clock[0] += 2
        result = Result()
        result.itself = result  # only the collector can free it
        weakref.finalize(result, freed.append, clock[0])
        return result

    try:
        gc.disable()
        assert [done(work, (), False).seconds for _ in range(3)] == [2, 2, 2]
        assert freed == [2, 4]
    finally:
        gc.enable()
