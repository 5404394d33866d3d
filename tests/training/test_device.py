"""One policy for where and how a model runs."""

import contextlib

import pytest
import torch

from mainstem.errors import ConfigError
from mainstem.training.device import Device


@pytest.fixture
def machine(monkeypatch):
    """Makes a machine with so many CUDA devices, with bfloat16 or not, and an MPS device or none."""

    def make(cuda=0, bf16=False, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return make


@pytest.mark.parametrize(
    ("has", "chosen"),
    [({}, "cpu"), ({"mps": True}, "mps"), ({"cuda": 1}, "cuda"), ({"cuda": 2, "mps": True}, "cuda")],
)
def test_auto_takes_the_best_that_is_there(machine, has, chosen):
    machine(**has)
    assert Device.choose().device.type == chosen


def test_a_cpu_is_plain_float32(machine):
    machine()
    device = Device.choose("cpu")
    assert device.fused
    assert isinstance(device.autocast(), contextlib.nullcontext)


def test_mps_has_neither_autocast_nor_a_fused_optimizer(machine):
    """It is neither a CPU nor CUDA."""
    machine(mps=True)
    device = Device.choose("mps")
    assert not device.fused
    assert isinstance(device.autocast(), contextlib.nullcontext)


@pytest.mark.parametrize(("bf16", "dtype"), [(True, torch.bfloat16), (False, None)])
def test_cuda_computes_in_bfloat16_where_it_can(machine, bf16, dtype):
    machine(cuda=2, bf16=bf16)
    device = Device.choose("cuda:1")
    assert (device.device.index, device.autocast_dtype, device.fused) == (1, dtype, True)


@pytest.mark.parametrize("name", ["cuda:7", "cuda", "mps", "cpu:3", "meta", "xpu"])
def test_a_device_that_is_absent_is_refused(machine, name):
    machine()
    with pytest.raises(ConfigError, match=f"'{name}' is not on this machine .* try cpu"):
        Device.choose(name)


def test_the_eighth_of_two_is_refused(machine):
    machine(cuda=2)
    with pytest.raises(ConfigError, match="it has 2 of them"):
        Device.choose("cuda:7")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:-1", "cuda:x", "cpu:"])
def test_a_name_that_is_no_device_is_refused(name):
    with pytest.raises(ConfigError, match="is not a device; choose auto, cpu, cuda, cuda:1 or mps"):
        Device.choose(name)
