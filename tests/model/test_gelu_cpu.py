"""Numba's tanh-GELU with bias is the formula, in the model too."""

import importlib
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mainstem.model import kernels
from mainstem.model.kernels.gelu_backend import choose_gelu
from mainstem.model.tap import Recorder
from models import build, few, normal, record, small, tokens

pytest.importorskip("numba", reason="numba is an optional extra (`fast`)")
from mainstem.model.kernels import gelu_cpu, openmp

CPU = torch.device("cpu")


def plain(product, bias):
    return F.gelu(product + bias, approximate="tanh")


def far(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


@few
@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from([0.1, 3.0, 40.0]), st.integers(0, 1000))
def test_values_and_gradients(rows, width, spread, seed):
    draw = torch.Generator().manual_seed(seed)
    product, bias, dy = (torch.randn(*shape, generator=draw) for shape in ((rows, width), (width,), (rows, width)))
    ours = [(spread * product).requires_grad_(), bias.requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in ours]
    y, expected = gelu_cpu.gelu_bias(*ours), plain(*exact)
    assert far(y, expected) < 1e-6
    got = torch.autograd.grad(y, ours, dy)
    wanted = torch.autograd.grad(expected, exact, dy.double())
    for a, b, scale in zip(got, wanted, (1.0, rows**0.5), strict=True):
        assert (a - b).abs().max() < 2e-6 * scale * max(1.0, dy.abs().max().item()) + 1e-6 * b.abs().max()


def test_its_ends():
    """Far out it is x or 0, and what is not finite stays so, for the loop of training to see."""
    x = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 1e30, float("inf"), float("nan")]])
    y = gelu_cpu.gelu_bias(x, torch.zeros(8))[0]
    assert y[:4].abs().max() < 1e-8
    assert y[4:7].tolist() == [88.0, x[0, 5].item(), float("inf")]
    assert y[7].isnan()


@pytest.mark.parametrize("loop", [gelu_cpu._gelu_row, gelu_cpu._gelu_row_backward])
def test_its_loops_take_several_numbers_at_once(loop):
    (code,) = loop.inspect_llvm().values()
    assert re.search(r"fdiv [a-z ]*<\d+ x float>", code)


@pytest.mark.parametrize("lent", [True, False])
def test_any_number_of_threads_gives_the_same_bits(monkeypatch, lent):
    (product, dy), bias = normal(2, 37, 50).float(), normal(50).float()

    def both():
        ours = [product.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = gelu_cpu.gelu_bias(*ours)
        return [y, *torch.autograd.grad(y, ours, dy)]

    threads, first = torch.get_num_threads(), both()
    if not lent:
        monkeypatch.setattr(openmp, "_parallel", None)  # as where PyTorch brings another OpenMP
    try:
        torch.set_num_threads(1)
        assert all(a.equal(b) for a, b in zip(both(), first, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_rows_that_lie_elsewhere_are_read_right():
    product, bias = normal(9, 12).float().T.requires_grad_(), normal(18).float()[::2]
    exact = product.detach().double().requires_grad_()
    y, expected = gelu_cpu.gelu_bias(product, bias), plain(exact, bias.double())
    assert far(y, expected) < 1e-6
    (got,) = torch.autograd.grad(y, product, torch.ones(12, 9).T.reshape(9, 12).T)
    (wanted,) = torch.autograd.grad(expected, exact, torch.ones(12, 9, dtype=torch.float64))
    assert far(got, wanted) < 1e-6


@pytest.mark.parametrize("changes", [{}, {"residual": "post"}, {"dropout": 0.1}])
def test_a_model_with_the_loop_is_the_same_function(changes):
    config = small(activation="gelu_tanh", **changes)
    model, ids = build(config, torch.float32), tokens(config)
    expected = model(ids)
    assert choose_gelu(model, CPU, ids.numel()) == "numba"
    logits = model(ids)
    assert not logits.equal(expected)  # another rounding: it is the loop that ran
    assert far(logits, expected) < 1e-5
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_watching_a_model_with_the_loop_changes_nothing():
    config = small(activation="gelu_tanh")
    model, ids = build(config, torch.float32), tokens(config)
    choose_gelu(model, CPU, ids.numel())
    tap = Recorder(["blocks.0.mlp.pre", "blocks.1.mlp.post"])
    assert model(ids, tap=tap).equal(model(ids))
    seen = record(model, ids)
    assert far(seen["blocks.1.mlp.post"], F.gelu(seen["blocks.1.mlp.pre"], approximate="tanh")) < 1e-6


@pytest.mark.parametrize("changes", [{"activation": "relu"}, {"bias": False}, {"d_mlp": 0}, {"activation": "swiglu"}])
def test_other_models_stay_as_they_are(changes):
    assert choose_gelu(build(small(**changes), torch.float32), CPU, 8) == "torch"


def test_float64_takes_the_plain_form():
    config = small(activation="gelu_tanh")
    model, ids = build(config), tokens(config)
    expected = model(ids)
    choose_gelu(model, CPU, ids.numel())
    assert model(ids).equal(expected)


def test_autocast_takes_the_plain_form():
    """A product in bfloat16 is not what the loop can read."""
    config = small(activation="gelu_tanh")
    model, ids = build(config, torch.float32), tokens(config)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids)
        choose_gelu(model, CPU, ids.numel())
        assert far(model(ids).float(), expected.float()) < 0.05


def test_without_numba_it_is_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "mainstem.model.kernels.gelu_cpu", None)
    model = build(small(activation="gelu_tanh"), torch.float32)
    assert choose_gelu(model, CPU, 8) == "torch"
    assert all(block.mlp.gelu_bias is None for block in model.blocks)


def test_where_nothing_can_be_written_it_is_there(monkeypatch):
    """Numba refuses to keep compiled code then, at once."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    for name in ("address", "arithmetic", "openmp", "gelu_cpu"):
        monkeypatch.delitem(sys.modules, f"{kernels.__name__}.{name}")
        monkeypatch.delattr(kernels, name)
    model = build(small(activation="gelu_tanh"), torch.float32)
    assert choose_gelu(model, CPU, 8) == "numba"
    assert importlib.import_module(f"{kernels.__name__}.gelu_cpu") is not gelu_cpu
    product, bias = normal(3, 8).float(), normal(8).float()
    assert model.blocks[0].mlp.gelu_bias(product, bias).equal(gelu_cpu.gelu_bias(product, bias))


def test_compiled_blocks_are_not_given_a_loop():
    assert choose_gelu(build(small(activation="gelu_tanh"), torch.float32), CPU, 8, compiled=True) == "torch"
