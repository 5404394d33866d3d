"""Law 11: norms, activations and rotation are the formulas of their papers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.config import NORMS
from mainstem.model.attention import rotate, rotation
from mainstem.model.mlp import ACTIVATIONS, MLP
from mainstem.model.norms import NormKind
from models import build, error, few, normal, small, stir, tokens
from reference import gelu_tanh, layer_norm, rms_norm

X = torch.linspace(-8, 8, 160_001, dtype=torch.float64)


@few
@given(st.booleans(), st.sampled_from((1e-5, 1e-6, 0.1)))
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_their_formulas(norm, bias, eps):
    module = NormKind(norm, eps, bias).make(12, "ln")
    stir(module)
    x = 3 + 2 * normal(2, 5, 12)
    if norm == "layernorm":
        expected = layer_norm(x, module.weight, module.bias if bias else 0, eps)
    else:
        expected = rms_norm(x, module.weight, eps)
    assert error(module(x), expected) < 1e-14


def test_a_new_layernorm_gives_each_token_mean_0_and_variance_1():
    y = NormKind().make(12, "ln").double()(5 + 3 * normal(2, 5, 12))
    assert y.mean(-1).abs().max() < 1e-14
    assert (y.var(-1, correction=0) - 1).abs().max() < 1e-4  # short of 1 by eps / variance


def test_tanh_gelu_and_its_derivative():
    x = X.clone().requires_grad_()
    y = ACTIVATIONS["gelu_tanh"](x)
    assert error(y, gelu_tanh(X)) < 1e-15

    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (X + a * X**3))
    derivative = 0.5 * (1 + t) + 0.5 * X * (1 - t**2) * c * (1 + 3 * a * X**2)
    assert error(torch.autograd.grad(y.sum(), x)[0], derivative) < 1e-14


def test_gelu_is_x_phi_of_x_and_tanh_misses_it_by_4_73e_4():
    exact = X * 0.5 * (1 + torch.erf(X / math.sqrt(2)))
    assert error(ACTIVATIONS["gelu"](X), exact) < 1e-15
    assert (ACTIVATIONS["gelu_tanh"](X) - exact).abs().max().item() == pytest.approx(4.73e-4, abs=5e-7)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("relu", lambda h: h.clamp(min=0)),
        ("relu2", lambda h: h.clamp(min=0) ** 2),
        ("swiglu", lambda h: h[..., :16] * torch.sigmoid(h[..., :16]) * h[..., 16:]),
        ("geglu", lambda h: h[..., :16] * 0.5 * (1 + torch.erf(h[..., :16] / math.sqrt(2))) * h[..., 16:]),
    ],
)
def test_mlp_is_two_products_around_its_activation(activation, formula):
    mlp = MLP(small(activation=activation, d_mlp=16).resolved())
    stir(mlp)
    x = normal(2, 5, 12)
    h = x @ mlp.c_fc.weight.T + mlp.c_fc.bias  # gated: gate, then up
    assert error(mlp(x), formula(h) @ mlp.c_proj.weight.T + mlp.c_proj.bias) < 1e-14


def test_rotation_turns_pairs_and_shows_only_distance():
    """Su et al. 2021, equation 16: (R_m q).(R_n k) depends on m - n."""
    cos, sin = rotation(torch.arange(8)[None], 6, 100.0, torch.float64)  # (1, T, 1, D / 2)
    assert cos[0, 5, 0].tolist() == pytest.approx([math.cos(5 / 100 ** (2 * i / 6)) for i in range(3)], abs=1e-15)
    q, k = (rotate(normal(2, 1, 1, 6)[row].expand(1, 8, 1, 6), cos, sin)[0, :, 0] for row in (0, 1))  # (T, D)
    products = q @ k.T
    assert error(products[1:, 1:], products[:-1, :-1]) < 1e-14
    assert error(q.norm(dim=-1), q[0].norm().expand(8)) < 1e-14


def test_rotary_logits_do_not_move_with_a_shift():
    """Padding in front shifts every position, and a model that sees only distances does not notice."""
    model = build(small(position="rotary"))
    ids = tokens(model.config, length=5)
    shifted = torch.cat([ids[:, :1], ids], 1)
    hidden = torch.ones_like(shifted, dtype=torch.bool)
    hidden[:, 0] = False
    assert error(model(shifted, mask=hidden)[:, 1:], model(ids)) < 1e-12
