"""The benchmarks' processes, without processes: what is built, asked and answered is the same."""

import importlib

import pytest

from benchmarks import data, decode, inspect, processes, time_to_loss, train


class InThisProcess(processes.Process):
    """Builds and works here."""

    def __init__(self, build, *, ours, **arguments):
        module, function = build.split(":")
        self._works = getattr(importlib.import_module(module), function)(**arguments)

    def call(self, work, *arguments, keep=False):
        return processes.done(self._works[work], arguments, keep)

    def close(self):
        self._works = {}


@pytest.fixture
def in_this_process(monkeypatch):
    """No process of their own for the sides."""
    for module in (data, decode, inspect, processes, time_to_loss, train):
        monkeypatch.setattr(module, "Process", InThisProcess)
