"""What attention moves, by token and by word: against vectors moved one by one."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.errors import ConfigError
from mainstem.stream.analysis.flow import flow, grouped, moved, rollout
from mainstem.stream.capture import capture
from mainstem.text.units import Unit
from models import ROWS, B, T, build, configs, error, few, small, tokens

a_few = settings(few, max_examples=4)  # for each row of the table


def trace_of(config):
    model = build(config)
    return capture(model, tokens(model.config))


@torch.no_grad()
def sent_plainly(trace, layer):
    """What each head moves from each key to each query, as it is added: (B, H, T, T, C)."""
    block = trace.model.blocks[layer]
    v, pattern = trace["v", layer], trace["pattern", layer]
    weight = block.attn.c_proj.weight.unflatten(1, v.shape[2:])  # (C, H, D)
    sent = torch.einsum("bhqk,bkhd,chd->bhqkc", pattern, v, weight)
    if list(block.res_1.ln_out.parameters()):
        if trace.model.config.norm == "layernorm":
            sent = sent - sent.mean(-1, keepdim=True)
        scale = trace[f"blocks.{layer}.res_1.ln_out.scale"]  # (B, T, 1)
        sent = block.res_1.ln_out.weight * sent / scale[:, None, :, :, None]
    return block.res_1.gain(sent)


@a_few
@given(st.data())
@pytest.mark.parametrize("residual", ROWS)
def test_flow_is_the_length_of_what_is_moved(residual, data):
    """By head and for all heads together, through `ln_out` and gain."""
    trace = trace_of(data.draw(configs(residual=residual)))
    for layer in range(trace.model.config.n_layer):
        sent = sent_plainly(trace, layer)
        assert torch.equal(flow(trace, layer).values, trace["pattern", layer])
        assert error(flow(trace, layer, "value").values, sent.norm(dim=-1)) < 1e-10
        assert error(moved(trace, layer), sent.sum(1).norm(dim=-1)) < 1e-10


def test_what_is_moved_and_the_biases_are_the_write():
    """So that `sent_plainly` is held to the model as well."""
    for residual in ROWS:
        trace = trace_of(small(residual, norm="rmsnorm"))
        block = trace.model.blocks[1]
        bias = block.attn.c_proj.bias
        if list(block.res_1.ln_out.parameters()):
            bias = block.res_1.ln_out.weight * bias / trace["blocks.1.res_1.ln_out.scale"]
        total = sent_plainly(trace, 1).sum((1, 3)) + block.res_1.gain(bias)
        assert error(total, trace["attn_out", 1]) < 1e-12


def test_a_long_text_is_worked_through_in_parts(monkeypatch):
    trace = trace_of(small("sandwich"))
    whole = moved(trace, 1)
    monkeypatch.setattr("mainstem.stream.analysis.flow.CHUNK", 1)
    assert error(moved(trace, 1), whole) < 1e-14


def test_a_block_or_a_weighting_that_is_not_there():
    trace = trace_of(small())
    with pytest.raises(ConfigError, match="there is no block 3; the model has 3"):
        flow(trace, 3)
    with pytest.raises(ConfigError, match="did you mean 'value'"):
        flow(trace, 0, "values")
    assert torch.equal(moved(trace, -1), moved(trace, 2))


@few
@given(configs())
def test_rollout_is_causal_and_each_row_sums_to_1(config):
    found = rollout(trace_of(config))
    assert found.shape == (config.n_layer + 1, B, T, T)
    assert error(found.sum(-1), torch.ones(found.shape[:-1])) < 1e-12
    assert not found.triu(1).any()
    assert torch.equal(found[0], torch.eye(T).double().expand(B, T, T))


@pytest.mark.parametrize(("residual", "skip"), [("pre", 1.0), ("no_skip", 0.0), ("deepnorm", 6**0.25)])
def test_rollout_carries_a_position_by_the_skip(residual, skip):
    trace = trace_of(small(residual))
    expected = torch.eye(T).double()
    for layer in range(3):
        attention = trace["pattern", layer].mean(1)
        expected = (skip * torch.eye(T).double() + attention) / (skip + 1) @ expected
        assert error(rollout(trace)[layer + 1], expected) < 1e-12


def test_rollout_of_a_model_without_blocks():
    trace = trace_of(small(n_layer=0))
    assert rollout(trace).shape == (1, B, T, T)
    with pytest.raises(ConfigError, match="there is no block 0; the model has 0"):
        flow(trace, 0)


def test_a_model_of_few_digits_is_followed_in_float32():
    """Rows of the pattern in bfloat16 sum to 1 within three digits; those of the rollout within float32's."""
    model = build(small(), torch.bfloat16)
    trace = capture(model, tokens(model.config))
    found = rollout(trace)
    assert found.dtype == flow(trace, 1).values.dtype == moved(trace, 1).dtype == torch.float32
    assert error(found.sum(-1), torch.ones(found.shape[:-1])) < 1e-6


def test_units_sum_their_keys_and_average_their_queries():
    matrix = torch.arange(16.0).double().reshape(4, 4)
    units = [Unit("a", 0, 1), Unit("b", 1, 4)]
    assert grouped(matrix, units).tolist() == [[0, 6], [8, 30]]
    assert grouped(matrix, units, "last").tolist() == [[0, 6], [12, 42]]


@few
@given(st.lists(st.integers(1, T - 1), unique=True), st.sampled_from(("mean", "last")))
def test_units_that_are_the_text_leave_a_row_its_sum(cuts, reduce):
    edges = [0, *sorted(cuts), T]
    units = [Unit("", first, last) for first, last in pairwise(edges)]
    pattern = flow(trace_of(small()), 1).values
    by_unit = grouped(pattern, units, reduce)
    assert by_unit.shape == (*pattern.shape[:2], len(units), len(units))
    assert error(by_unit.sum(-1), torch.ones(by_unit.shape[:-1])) < 1e-12
    if len(units) == T:
        assert error(by_unit, pattern) < 1e-15


def test_a_unit_that_is_not_of_the_text():
    with pytest.raises(ConfigError, match="'long' is tokens 2 to 5, of 4"):
        grouped(torch.eye(4), [Unit("long", 2, 5)])
    with pytest.raises(ConfigError, match="unknown value 'means'; did you mean 'mean'"):
        grouped(torch.eye(4), [Unit("a", 0, 1)], "means")
