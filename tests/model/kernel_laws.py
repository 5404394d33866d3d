"""Laws of the Triton kernel of tanh-GELU: run by `test_kernels`, in Triton's interpreter and on a CUDA device if any.

By hand: `TRITON_INTERPRET=1 python -m pytest tests/model/kernel_laws.py`.
"""

import math
import os

import pytest
import torch

from mainstem.errors import ConfigError
from mainstem.model.kernels import gelu_backend
from mainstem.model.kernels.gelu import gelu_bias
from mainstem.model.kernels.gelu_backend import forward_and_backward, triton_is_as_fast
from models import error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
F32, BF16 = torch.float32, torch.bfloat16
ULP = 2**-7 if INTERPRETED else 2**-8
"""The relative error of a bfloat16: a device rounds to nearest, the interpreter cuts off."""
EXACT = 2e-6
"""float32 against float64, as a share of the largest value."""
SHAPES = [(1, 1), (3, 5), (1, 768), (2, 3, 130), (7, 1500), (700, 7)]
"""One row, one column, odd widths, more columns than a tile, more tiles than programs."""


def normal(*shape, dtype=F32, seed=0):
    """Standard normal numbers, the same at every call, at which gradients can be asked for."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype).requires_grad_()


def gelu(x):
    """The formula, in x's type, and its derivative."""
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + a * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * c * (1 + 3 * a * x**2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_and_its_gradients_are_the_formula(shape):
    inputs, dy = [normal(*shape), normal(shape[-1], seed=1)], normal(*shape, seed=2).detach()
    y, dx, db = forward_and_backward(gelu_bias, *inputs, dy)
    value, slope = gelu((inputs[0] + inputs[1]).detach().double())
    assert error(y, value) < EXACT
    assert error(dx, dy * slope) < EXACT
    assert error(db, (dy * slope).flatten(0, -2).sum(0)) < EXACT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_in_bfloat16_is_rounded_once(shape):
    inputs, dy = [normal(*shape, dtype=BF16), normal(shape[-1], seed=1)], normal(*shape, dtype=BF16, seed=2).detach()
    y, dx, db = forward_and_backward(gelu_bias, *inputs, dy)
    assert (y.dtype, dx.dtype, db.dtype) == (BF16, BF16, F32)
    value, slope = gelu(inputs[0].detach().double() + inputs[1].detach().double())
    for rounded, exact in ((y, value), (dx, dy.double() * slope)):
        assert ((rounded - exact).abs() <= ULP * exact.abs() + 1e-6).all()
    assert error(db, (dy.double() * slope).flatten(0, -2).sum(0)) < EXACT  # of what was not rounded


def test_gelu_misses_x_phi_of_x_by_4_73e_4():
    """Law 11."""
    x = torch.linspace(-8, 8, 32_001, device=DEVICE)
    exact = x.double() * 0.5 * (1 + torch.erf(x.double() / math.sqrt(2)))
    y = gelu_bias(x[:, None], torch.zeros(1, device=DEVICE))[:, 0]
    assert (y - exact).abs().max().item() == pytest.approx(4.73e-4, abs=1e-6)


def test_gelu_of_very_large_values_is_x_or_zero():
    x = torch.tensor([[-math.inf, -3e38, -1e20, -1e3, -20.0, 0.0, 20.0, 1e3, 1e20, 3e38]], device=DEVICE)[:, 1:]
    x.requires_grad_()
    y = gelu_bias(x, torch.zeros(9, device=DEVICE))
    assert y[0, 5:].equal(x[0, 5:])
    assert y[0, :5].abs().max() < 1e-30
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx[0].tolist() == pytest.approx([0, 0, 0, 0, 0.5, 1, 1, 1, 1], abs=1e-30)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nan_stays_nan(dtype):
    x = torch.tensor([[1.0, math.nan]], device=DEVICE, dtype=dtype).requires_grad_()
    y = gelu_bias(x, torch.zeros(2, device=DEVICE))
    (dx,) = torch.autograd.grad(y.sum(), x)
    for values in (y, dx):
        assert values.isnan().tolist() == [[False, True]]


def test_gradients_are_finite_differences():
    """In float32, so to the accuracy that its steps allow."""
    inputs, weight = [normal(3, 5), normal(5, seed=1)], normal(3, 5, seed=6).detach().double()

    def total(*tensors):
        return (gelu_bias(*tensors).double() * weight).sum()

    for place, gradient in enumerate(torch.autograd.grad(total(*inputs), inputs)):
        direction = normal(*inputs[place].shape, seed=8).detach()
        ahead, behind = (
            total(*(x + sign * 1e-2 * direction if i == place else x for i, x in enumerate(inputs))) for sign in (1, -1)
        )
        expected = (ahead - behind).item() / 2e-2
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_any_strides_will_do():
    x, dy = normal(6, 4, 10).transpose(0, 2), normal(10, 4, 6, seed=2).detach()
    bias = normal(12, seed=1)[::2]
    assert gelu_bias(x, bias).equal(gelu_bias(x.contiguous(), bias.contiguous()))
    transposed = dy.transpose(0, 2).contiguous().transpose(0, 2)
    values = (torch.autograd.grad(gelu_bias(x, bias), (x, bias), gradient) for gradient in (transposed, dy))
    assert all(a.equal(b) for a, b in zip(*values, strict=True))


def test_no_rows_are_no_work():
    y, dx, db = forward_and_backward(gelu_bias, normal(0, 5), normal(5), torch.zeros(0, 5, device=DEVICE))
    assert (y.shape, dx.shape, db.tolist()) == ((0, 5), (0, 5), [0.0] * 5)


def test_the_same_numbers_give_the_same_bits():
    x, bias, dy = normal(700, 33), normal(33, seed=3), normal(700, 33, seed=4).detach()
    calls = [forward_and_backward(gelu_bias, x, bias, dy) for _ in range(2)]
    assert all(a.equal(b) for a, b in zip(*calls, strict=True))


def test_other_types_and_shapes_are_refused():
    x, bias = normal(3, 5), normal(5)
    for call, message in (
        (lambda: gelu_bias(x.double(), bias), r"gelu_bias: x is torch.float64; give float32.*plain_gelu_bias"),
        (lambda: gelu_bias(x, bias.half()), r"gelu_bias: bias is torch.float16; give float32.*plain_gelu_bias"),
        (lambda: gelu_bias(x, bias[:4]), r"gelu_bias: bias has shape \(4,\); it must be \(5,\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_pytorch_finds_nothing_wrong_with_the_operation():
    """Schema, shapes and types without data, and gradients through a traced graph."""
    torch.library.opcheck(torch.ops.mainstem.gelu_bias.default, (normal(3, 5), normal(5)))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_graph_has_it_as_one_operation():
    """One graph, the same numbers as without a compiler, forward and backward."""
    tensors = normal(3, 5), normal(5, seed=3), normal(3, 5, seed=4).detach()

    def scaled(x, bias):
        return 2 * gelu_bias(x + 1, bias)

    compiled = torch.compile(scaled, backend="aot_eager" if INTERPRETED else "inductor", fullgraph=True)
    for a, b in zip(*(forward_and_backward(form, *tensors) for form in (scaled, compiled)), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("triton", "taken"), [(1.0, True), (2.0, True), (2.1, False)])
def test_triton_is_taken_where_it_equals_the_plain_form_and_is_as_fast(monkeypatch, triton, taken):
    """The real kernel, and a clock whose times are given."""
    times = iter([triton, 2.0] * gelu_backend.ROUNDS)
    monkeypatch.setattr(gelu_backend, "seconds", lambda work: next(times))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    assert triton_is_as_fast(6, 32, torch.device(DEVICE)) == taken


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_on_a_device_both_are_timed():
    assert gelu_backend.seconds(lambda: gelu_bias(normal(512, 512), normal(512))) > 0
    assert triton_is_as_fast(512, 512, torch.device(DEVICE)) in (True, False)
