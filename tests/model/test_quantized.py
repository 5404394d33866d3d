"""Quantized weights: how far a weight moves, and that all else reads what the model computes with."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mainstem.circuits.composition import composition
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.quantized import LEVELS, Matrix, QuantizedLinear, quantize, tensors, weights_of
from mainstem.stream.capture import capture
from models import build, configs, error, few, normal, small, tokens

NARROW = pytest.mark.parametrize("weights", ["bf16", "int8"])


def narrowed(matrix, weights):
    """The matrix of a model whose embedding it is, narrow."""
    model = GPT(small(vocab_size=matrix.shape[0], d_model=matrix.shape[1], n_head=1))
    with torch.no_grad():
        model.wte.weight.copy_(matrix)
    return quantize(model, weights).wte


@few
@given(st.integers(0, 2**31), st.floats(-30, 30))
def test_int8_moves_a_weight_by_half_a_step_at_most(seed, magnitude):
    matrix = torch.randn(11, 8, generator=torch.Generator().manual_seed(seed)) * 10**magnitude
    matrix[3], matrix[4, 1:] = 0, 0
    layer = narrowed(matrix, "int8")
    scale = layer.matrix.scale[:, None].double()
    assert ((layer.weight.double() - matrix.double()).abs() <= scale / 2 * (1 + 1e-5)).all()
    assert torch.allclose(layer.matrix.scale, matrix.abs().amax(1) / LEVELS)
    assert (layer.weight[3] == 0).all()
    assert (layer.matrix.stored.abs().amax(1)[[0, 4]] == LEVELS).all()


def test_rows_too_small_for_a_scale_become_zero():
    layer = narrowed(torch.full((11, 8), 1e-45), "int8")
    assert (layer.weight == 0).all()


def test_bf16_rounds_to_eight_bits():
    matrix = torch.randn(11, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(narrowed(matrix, "bf16").weight, matrix.bfloat16().float())


def widened(source, model):
    """The plain model with a narrow one's weights."""
    plain = copy.deepcopy(source)
    with torch.no_grad():
        for name, layer in plain.named_modules():
            if isinstance(layer, nn.Linear) or name == "wte":
                layer.weight.copy_(model.get_submodule(name).weight)
    return plain


@few
@given(configs(), st.sampled_from(("bf16", "int8")))
def test_a_narrow_model_is_the_plain_one_with_its_weights(config, weights):
    """And the source is untouched, to the bit."""
    source = build(config, torch.float32)
    before = copy.deepcopy(source.state_dict())
    model = quantize(source, weights)
    after = source.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    mine = {p.data_ptr() for p in source.parameters()}
    assert not mine & {tensor.data_ptr() for tensor in tensors(model).values()}
    assert weights_of(source) == "fp32"
    assert weights_of(model) == weights
    ids = tokens(config)
    assert torch.equal(model(ids), widened(source, model)(ids))
    assert not torch.equal(model.wte.weight, source.wte.weight)


@NARROW
def test_a_tie_is_one_matrix_wherever_it_goes(weights):
    model = quantize(build(small(), torch.float32), weights)
    logits = model(tokens(model.config))
    for each in (model, copy.deepcopy(model), copy.deepcopy(model).double()):
        assert each.lm_head.matrix is each.wte.matrix
        assert error(each(tokens(model.config)), logits) < 1e-5
    assert "lm_head.weight" not in tensors(model)


@NARROW
def test_sums_close_over_narrow_weights(weights):
    model = quantize(build(small("sandwich"), torch.float32), weights).double()
    assert capture(model, tokens(model.config)).attribution(token=3).closing_error < 1e-10


@few
@given(configs(), st.sampled_from(("bf16", "int8")))
def test_what_reads_weights_reads_these(config, weights):
    source = build(config)
    model = quantize(source, weights).double()
    plain = widened(source, model)
    mine, theirs = (capture(each, tokens(config)) for each in (model, plain))
    for by in ("branch", "head", "neuron"):
        assert error(mine.attribution(3, by=by).values, theirs.attribution(3, by=by).values) < 1e-10
    assert error(mine.lens(3).logit, theirs.lens(3).logit) < 1e-10


@NARROW
@pytest.mark.parametrize("residual", ["pre", "sandwich", "rezero"])
def test_composition_is_that_of_the_widened_weights(residual, weights):
    source = build(small(residual))
    model = quantize(source, weights).double()
    mine, theirs = composition(model), composition(widened(source, model))
    assert mine.labels == theirs.labels
    for mode, scores in theirs.scores.items():
        assert scores.isfinite().any()
        assert torch.allclose(mine.scores[mode], scores, rtol=1e-10, atol=1e-10, equal_nan=True)


@NARROW
@pytest.mark.parametrize("changes", [{}, {"n_layer": 0, "residual": "post", "position": "none"}])
def test_a_write_to_a_narrow_matrix_is_seen(changes, weights):
    """Also where nothing of a model is left wide."""
    model = quantize(build(small(**changes), torch.float32), weights)
    trace = capture(model, tokens(model.config))
    assert trace.attribution(3).closing_error < 1e-5
    model.wte.matrix.stored[2, 1] += 1
    with pytest.raises(ConfigError, match="weights have changed since this capture"):
        trace.attribution(3)


@NARROW
def test_a_narrow_layer_is_a_product_with_its_widened_matrix(weights):
    layer = quantize(build(small(), torch.float32), weights).blocks[0].mlp.c_fc
    x = normal(3, 12).float()
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@NARROW
def test_a_state_dict_gives_back_the_same_model(weights):
    model = quantize(build(small(), torch.float32), weights)
    other = quantize(build(small(), torch.float32, by=0.3), weights)
    ids = tokens(model.config)
    assert not torch.equal(other(ids), model(ids))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), model(ids))


@NARROW
def test_it_is_not_trained(weights):
    source = build(small(), torch.float32).train()
    model = quantize(source, weights)
    assert source.training
    assert not any(module.training for module in model.modules())
    with pytest.raises(ConfigError, match=f"{weights} weights cannot be trained; use the model"):
        model.train()
    with pytest.raises((AttributeError, KeyError)):
        model.lm_head.weight = nn.Parameter(torch.zeros(11, 12))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_nonsense_is_refused():
    model = build(small(), torch.float32)
    with pytest.raises(ConfigError, match="weights: unknown value 'int4'; did you mean 'int8'"):
        quantize(model, "int4")
    with pytest.raises(ConfigError, match="the model is int8 already"):
        quantize(quantize(model, "int8"), "bf16")
    with torch.no_grad():
        model.blocks[1].attn.c_proj.weight[2, 1] = float("nan")
    for weights in ("bf16", "int8"):
        with pytest.raises(ConfigError, match=rf"blocks\.1\.attn\.c_proj has weights that {weights} cannot represent"):
            quantize(model, weights)


def test_its_printed_form_says_what_it_is():
    layer = QuantizedLinear(Matrix(torch.zeros(3, 4, dtype=torch.int8), torch.ones(3)))
    assert "3" in repr(layer)
