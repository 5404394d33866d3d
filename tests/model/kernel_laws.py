"""What our kernels must be: run by `test_kernels`, in Triton's interpreter on a CPU and, where there is one, on CUDA.

By hand: `TRITON_INTERPRET=1 python -m pytest tests/model/kernel_laws.py`.
"""

import math
import os

import pytest
import torch

from mainstem.errors import ConfigError
from mainstem.model.kernels.choice import choose
from mainstem.model.kernels.gelu import gelu_bias
from mainstem.model.kernels.norm import add_norm, plain_add_norm
from models import error, small

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
F32, BF16 = torch.float32, torch.bfloat16
ULP = 2**-7 if INTERPRETED else 2**-8
"""The relative error of a bfloat16: a device rounds to nearest, the interpreter cuts off."""
EXACT = 2e-6
"""float32 against float64, as a share of the largest value."""
SHAPES = [(1, 1), (3, 5), (1, 768), (2, 3, 130), (7, 1500), (700, 7)]
"""One row, one column, odd widths, more columns than a tile of GELU's, more tiles than programs."""
NORMS = [("layernorm", True), ("layernorm", False), ("rmsnorm", False)]


def normal(*shape, dtype=F32, seed=0):
    """Standard normal numbers, the same at every call, at which gradients can be asked for."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype).requires_grad_()


def passes(form, inputs, arriving):
    """Outputs of a form, then the gradient of each input; what arrives takes the outputs' types."""
    outputs = several(form(*inputs))
    arriving = [a.to(output.dtype) for a, output in zip(arriving, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, arriving)]


def several(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs


def wide(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def norm_inputs(shape, biased, x_dtype=F32, write_dtype=F32):
    width = shape[-1]
    inputs = [normal(*shape, dtype=x_dtype), normal(*shape, dtype=write_dtype, seed=1), normal(width, seed=2)]
    return inputs + [normal(width, seed=3)] * biased


def normed(form, norm, dtype=None, eps=1e-5):
    """Of x, write, gain and, where there is one, bias."""
    return lambda x, write, gain, bias=None: form(x, write, gain, bias, eps, norm, dtype)


def gelu(x):
    """The formula, in x's type, and its derivative."""
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + a * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * c * (1 + 3 * a * x**2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_and_its_gradients_are_the_formula(shape):
    inputs, dy = [normal(*shape), normal(shape[-1], seed=1)], normal(*shape, seed=2).detach()
    y, dx, db = passes(gelu_bias, inputs, [dy])
    value, slope = gelu((inputs[0] + inputs[1]).detach().double())
    assert error(y, value) < EXACT
    assert error(dx, dy * slope) < EXACT
    assert error(db, (dy * slope).flatten(0, -2).sum(0)) < EXACT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_in_bfloat16_is_rounded_once(shape):
    inputs, dy = [normal(*shape, dtype=BF16), normal(shape[-1], seed=1)], normal(*shape, dtype=BF16, seed=2).detach()
    y, dx, db = passes(gelu_bias, inputs, [dy])
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


def test_gelu_of_very_large_values_is_x_or_nothing():
    x = torch.tensor([[-math.inf, -3e38, -1e20, -1e3, -20.0, 0.0, 20.0, 1e3, 1e20, 3e38]], device=DEVICE)[:, 1:]
    x.requires_grad_()
    y = gelu_bias(x, torch.zeros(9, device=DEVICE))
    assert y[0, 5:].equal(x[0, 5:])
    assert y[0, :5].abs().max() < 1e-30
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx[0].tolist() == pytest.approx([0, 0, 0, 0, 0.5, 1, 1, 1, 1], abs=1e-30)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_not_a_number_stays_none(dtype):
    x = torch.tensor([[1.0, math.nan]], device=DEVICE, dtype=dtype).requires_grad_()
    y = gelu_bias(x, torch.zeros(2, device=DEVICE))
    (dx,) = torch.autograd.grad(y.sum(), x)
    for values in (y, dx):
        assert values.isnan().tolist() == [[False, True]]
    _, n = add_norm(x, x, torch.ones(2, device=DEVICE), None, 1e-5)
    assert n.isnan().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("norm", "biased"), NORMS)
def test_norms_and_their_gradients_are_those_of_float64(shape, norm, biased):
    inputs, arriving = norm_inputs(shape, biased), [normal(*shape, seed=4).detach(), normal(*shape, seed=5).detach()]
    ours = passes(normed(add_norm, norm), inputs, arriving)
    exact = passes(normed(plain_add_norm, norm), wide(inputs), arriving)
    for value, expected in zip(ours, exact, strict=True):
        assert (value - expected).abs().max() < EXACT * (1 + expected.abs().max())
    assert ours[2].equal(ours[3])  # x and write receive the same


@pytest.mark.parametrize(("norm", "biased"), NORMS)
def test_the_formula_of_the_norms(norm, biased):
    """The plain form, too, is held to the papers."""
    x, write, gain, *bias = norm_inputs((4, 6), biased)
    stream, y = normed(add_norm, norm)(x, write, gain, *bias)
    s = x.double() + write.double()
    mean = s.mean(-1, keepdim=True) if norm == "layernorm" else 0
    expected = gain * (s - mean) / ((s - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt() + sum(bias)
    assert error(stream, s) < EXACT
    assert error(y, expected) < EXACT


@pytest.mark.parametrize(("norm", "biased"), NORMS)
@pytest.mark.parametrize(("x_dtype", "write_dtype"), [(F32, BF16), (BF16, BF16), (BF16, F32)])
def test_norms_in_bfloat16_are_rounded_once(norm, biased, x_dtype, write_dtype):
    """A bfloat16 write to a float32 stream is what autocast gives; the normed stream goes to a product."""
    inputs = norm_inputs((9, 130), biased, x_dtype, write_dtype)
    ds, dn = normal(9, 130, seed=4).detach(), normal(9, 130, dtype=BF16, seed=5).detach()
    stream, y, dx, dwrite, *rest = passes(normed(add_norm, norm, BF16), inputs, [ds, dn])
    wider = torch.promote_types(x_dtype, write_dtype)
    assert (stream.dtype, y.dtype, dx.dtype, dwrite.dtype) == (wider, BF16, x_dtype, write_dtype)
    s = inputs[0].detach().double() + inputs[1].detach().double()
    assert ((stream - s).abs() <= (ULP if wider == BF16 else 1e-6) * s.abs()).all()
    again = [stream.detach().double(), torch.zeros_like(s), *wide(inputs[2:])]  # the norm is of what was stored
    exact = passes(normed(plain_add_norm, norm), [t.requires_grad_() for t in again], [ds.to(wider), dn])
    assert ((y - exact[1]).abs() <= ULP * exact[1].abs() + 1e-5).all()
    for value, expected in ((dx, exact[2]), (dwrite, exact[2])):
        assert ((value - expected).abs() <= (ULP if value.dtype == BF16 else 1e-6) * expected.abs() + 1e-5).all()
    for value, expected in zip(rest, exact[4:], strict=True):
        assert error(value, expected) < 1e-5


FORMS = {f"{norm} {biased}": (normed(add_norm, norm), biased) for norm, biased in NORMS} | {"gelu": (gelu_bias, None)}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_finite_differences(name):
    """Of float32, so to the accuracy that its steps allow."""
    form, biased = FORMS[name]
    inputs = [normal(3, 5), normal(5, seed=1)] if biased is None else norm_inputs((3, 5), biased)
    weights = [normal(3, 5, seed=6).detach().double(), normal(3, 5, seed=7).detach().double()]

    def total(*at):
        return sum((output.double() * weight).sum() for output, weight in zip(several(form(*at)), weights))  # noqa: B905

    for place, gradient in enumerate(torch.autograd.grad(total(*inputs), inputs)):
        direction = normal(*inputs[place].shape, seed=8).detach()
        ahead, behind = (
            total(*(x + sign * 1e-2 * direction if at == place else x for at, x in enumerate(inputs)))
            for sign in (1, -1)
        )
        expected = (ahead - behind).item() / 2e-2
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(("norm", "biased"), NORMS)
def test_a_gradient_that_does_not_arrive_is_none(norm, biased):
    """At the stream (nothing reads it on), or at the norm (nothing reads that)."""
    inputs = norm_inputs((3, 5), biased)
    for output in (0, 1):
        ours, exact = (
            torch.autograd.grad(normed(form, norm)(*at)[output].sum(), at, allow_unused=True)
            for form, at in ((add_norm, inputs), (plain_add_norm, wide(inputs)))
        )
        for value, expected in zip(ours, exact, strict=True):
            assert (value is None) == (expected is None)
            assert value is None or (value - expected).abs().max() < 1e-5 * (1 + expected.abs().max())


@pytest.mark.parametrize(("norm", "biased"), NORMS)
def test_rows_of_zeros_and_of_large_values(norm, biased):
    x, write, gain, *bias = norm_inputs((4, 130), biased)
    scale = torch.tensor([0.0, 1e-12, 1e4, 1e15], device=DEVICE)[:, None]
    inputs = [(scale * x).detach().requires_grad_(), (scale * write).detach().requires_grad_(), gain, *bias]
    arriving = [torch.zeros(4, 130, device=DEVICE), normal(4, 130, seed=5).detach()]
    ours = passes(normed(add_norm, norm), inputs, arriving)
    exact = passes(normed(plain_add_norm, norm), wide(inputs), arriving)
    assert all(value.isfinite().all() for value in ours)
    for value, expected in zip(ours, exact, strict=True):  # row by row: their gradients are of all sizes
        rows = expected.abs().amax(-1, keepdim=True)
        assert ((value - expected).abs() <= 1e-5 * rows.clamp(min=1e-30)).all()


def test_a_stream_far_from_zero_keeps_its_norm():
    """The variance is of what is left after the mean, and not a difference of squares."""
    inputs = norm_inputs((4, 768), True)
    far = [(inputs[0] + 1e4).detach(), *inputs[1:]]
    _, ours = normed(add_norm, "layernorm")(*far)
    stream = (far[0] + far[1]).detach()
    _, exact = normed(plain_add_norm, "layernorm")(*wide([stream, torch.zeros_like(stream), *far[2:]]))
    assert error(ours, exact) < 1e-3


def test_any_strides_will_do():
    x, dy = normal(6, 4, 10).transpose(0, 2), normal(10, 4, 6, seed=2).transpose(1, 2).transpose(1, 2)
    bias, write = normal(12, seed=1)[::2], normal(1, 1, 6, seed=3).expand(10, 4, 6)
    assert gelu_bias(x, bias).equal(gelu_bias(x.contiguous(), bias.contiguous()))
    for value, expected in zip(
        add_norm(x, write, bias, bias, 1e-5),
        add_norm(x.contiguous(), write.contiguous(), bias.contiguous(), bias.contiguous(), 1e-5),
        strict=True,
    ):
        assert value.equal(expected)
    transposed = dy.detach().transpose(0, 2).contiguous().transpose(0, 2)
    ours, exact = (torch.autograd.grad(gelu_bias(x, bias), (x, bias), d) for d in (transposed, dy.detach()))
    assert all(a.equal(b) for a, b in zip(ours, exact, strict=True))


def test_no_rows_are_no_work():
    x, bias = normal(0, 5), normal(5)
    y, dx, db = passes(gelu_bias, [x, bias], [torch.zeros(0, 5, device=DEVICE)])
    assert (y.shape, dx.shape, db.tolist()) == ((0, 5), (0, 5), [0.0] * 5)
    stream, _, dx, _, dgain = passes(normed(add_norm, "rmsnorm"), [x, x + 0, bias], [dx, dx])
    assert (stream.shape, dx.shape, dgain.tolist()) == ((0, 5), (0, 5), [0.0] * 5)


def test_the_same_numbers_give_the_same_bits():
    inputs, arriving = norm_inputs((700, 33), True), [normal(700, 33, seed=s).detach() for s in (4, 5)]
    calls = [passes(normed(add_norm, "layernorm"), inputs, arriving) for _ in range(2)]
    calls[0] += passes(gelu_bias, [inputs[0], inputs[3]], arriving[:1])
    calls[1] += passes(gelu_bias, [inputs[0], inputs[3]], arriving[:1])
    assert all(a.equal(b) for a, b in zip(*calls, strict=True))


def test_what_the_programs_do_not_hold_is_refused():
    x, gain = normal(3, 5), normal(5)
    for call, message in (
        (lambda: gelu_bias(x.double(), gain), r"gelu_bias: x is torch.float64; give float32.*plain_gelu_bias"),
        (lambda: gelu_bias(x, gain[:4]), r"gelu_bias: bias has shape \(4,\); it must be \(5,\)"),
        (lambda: add_norm(x, x[:2], gain, None, 1e-5), r"add_norm: write has shape \(2, 5\); it must be \(3, 5\)"),
        (lambda: add_norm(x, x, gain[1:], None, 1e-5), r"add_norm: gain has shape"),
        (lambda: add_norm(x, x, gain, None, 1e-5, "rmsnrm"), "did you mean.*rmsnorm"),
        (lambda: add_norm(x, x, gain, gain, 1e-5, "rmsnorm"), "rmsnorm has no bias"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_pytorch_finds_nothing_wrong_with_the_operations():
    """Schema, what is returned for shapes alone, and gradients through a traced graph."""
    x, gain = normal(3, 5), normal(5)
    ops = torch.ops.mainstem
    torch.library.opcheck(ops.gelu_bias.default, (x, gain))
    torch.library.opcheck(ops.add_norm.default, (x, normal(3, 5, dtype=BF16), gain, gain, 1e-5, True, BF16))
    torch.library.opcheck(ops.add_norm.default, (x, x, gain, None, 1e-5, False, F32))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_graph_holds_them_whole():
    """One graph, the same bits as without a compiler, forward and backward."""
    x, write, gain, bias = norm_inputs((3, 5), True)

    def both(x, write, gain, bias):
        stream, normal = add_norm(x, write, gain, bias, 1e-5)
        return stream + gelu_bias(normal, bias)

    compiled = torch.compile(both, backend="aot_eager" if INTERPRETED else "inductor", fullgraph=True)
    ours, theirs = (passes(form, [x, write, gain, bias], [normal(3, 5, seed=4).detach()]) for form in (both, compiled))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ours", "taken"), [(1.0, True), (2.0, True), (2.1, False)])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_the_choice_is_ours_where_ours_is_as_fast(norm, ours, taken):
    """Real kernels, whose results are compared, and a clock that says what it likes."""
    times = iter([ours, 2.0] * 6)
    found = choose(small(norm=norm), 6, DEVICE, timer=lambda work: next(times), compiler=lambda form: form)
    assert set(found) == {"gelu_bias", "add_norm"}
    assert {choice.takes_ours for choice in found.values()} == {taken}
    assert not any(choice.fault for choice in found.values())


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_on_a_device_the_choice_is_measured():
    for choice in choose(small(d_model=128), 512, DEVICE).values():
        assert choice.fault == ""
        assert choice.ours > 0
        assert choice.theirs is None or choice.theirs > 0
