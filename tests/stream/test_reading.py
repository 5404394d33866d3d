"""Readings of one pass, each against a plain recomputation; and what is known beforehand."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from known import eraser
from mainstem.errors import ConfigError
from mainstem.stream import reading
from mainstem.stream.capture import capture
from mainstem.stream.reading import erasure, flow, grouped, levels, moved, rollout, writes
from mainstem.text.units import Unit
from mainstem.training.device import Device
from mainstem.training.vitals import Vitals
from models import ROWS, B, T, build, configs, error, few, small, tokens

a_few = settings(few, max_examples=4)  # for each row of the table
RAGGED = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]


def trace_of(config, ids=None, **options):
    model = build(config)
    return capture(model, tokens(model.config) if ids is None else ids, **options)


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


# Writes and levels


@few
@given(configs())
def test_a_write_is_measured_against_what_its_branch_read(config):
    trace = trace_of(config)
    rows = writes(trace)
    kinds = ("attn", "mlp") if trace.model.config.d_mlp else ("attn",)
    assert [row.label for row in rows] == [f"{i}_{kind}_out" for i in range(config.n_layer) for kind in kinds]
    for row in rows:
        layer, kind = int(row.label[0]), row.label[2:-4]
        write, read = trace[f"{kind}_out", layer], trace["resid_pre" if kind == "attn" else "resid_mid", layer]
        assert error(row.length, write.square().sum(-1).sqrt()) < 1e-12
        assert error(row.ratio, (write.square().sum(-1) / read.square().sum(-1)).sqrt()) < 1e-12
        unit_write, unit_read = write / row.length[..., None], read / read.norm(dim=-1, keepdim=True)
        assert (row.cosine - (unit_write * unit_read).sum(-1)).abs().max() < 1e-12
        assert row.means == {name: getattr(row, name).mean().item() for name in ("length", "ratio", "cosine")}


@pytest.mark.parametrize("residual", ROWS)
def test_they_are_the_numbers_of_vitals(residual):
    model = build(small(residual))
    ids = tokens(model.config)
    watched = Vitals(model, ids[:, :-1], ids[:, 1:], Device.choose("cpu")).rows(0)
    for row in writes(capture(model, ids[:, :-1])):
        layer, kind = int(row.label[0]), row.label[2:-4]
        assert row.means["ratio"] == pytest.approx(watched[layer][f"{kind}_write"], rel=1e-5)
        assert row.means["cosine"] == pytest.approx(watched[layer][f"{kind}_cos"], abs=1e-5)


@few
@given(configs(d_mlp=-1))
def test_levels_are_of_every_point_that_is_read(config):
    trace = trace_of(config)
    names = [f"blocks.{i}.{name}" for i in range(config.n_layer) for name in ("resid_pre", "resid_mid")]
    assert [level.point for level in levels(trace)] == [*names, "resid_final"]
    for level in levels(trace):
        for b in range(B):
            for t in range(T):
                values = trace[level.point][b, t].tolist()
                mean = sum(values) / len(values)
                assert level.mean[b, t].item() == pytest.approx(mean, abs=1e-12)
                assert level.norm[b, t].item() == pytest.approx(math.sqrt(sum(v * v for v in values)))
                std = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
                assert level.std[b, t].item() == pytest.approx(std)


@pytest.mark.parametrize("residual", ROWS)
def test_padding_is_left_out_of_every_mean(residual):
    """The means of a padded batch are those over the tokens of its rows, each run alone."""
    trace = trace_of(small(residual), RAGGED)
    alone = [capture(trace.model, torch.tensor([row])) for row in RAGGED]
    for read, name in ((writes, "ratio"), (levels, "norm")):
        for together, *rows in zip(read(trace), *map(read, alone), strict=True):
            expected = torch.cat([getattr(row, name)[0] for row in rows]).mean().item()
            assert together.means[name] == pytest.approx(expected, rel=1e-10)


def test_a_stream_or_a_write_of_nothing_is_no_division_by_zero():
    model = build(small("none"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    trace = capture(model, tokens(model.config))
    assert all(row.means == {"length": 0, "ratio": 0, "cosine": 0} for row in writes(trace))
    assert not erasure(trace, by="head").share.any()


def test_a_model_without_blocks():
    trace = trace_of(small(n_layer=0))
    assert writes(trace) == erasure(trace).top(5) == []
    assert [level.point for level in levels(trace)] == ["resid_final"]
    assert rollout(trace).shape == (1, B, T, T)
    with pytest.raises(ConfigError, match="there is no block 0; the model has 0"):
        flow(trace, 0)


# Flow


@a_few
@given(st.data())
@pytest.mark.parametrize("residual", ROWS)
def test_flow_is_the_length_of_what_is_moved(residual, data):
    """By head and for all heads together, through `ln_out` and gain."""
    trace = trace_of(data.draw(configs(residual=residual)))
    for layer in range(trace.model.config.n_layer):
        sent = sent_plainly(trace, layer)
        assert torch.equal(flow(trace, layer), trace["pattern", layer])
        assert error(flow(trace, layer, "value"), sent.norm(dim=-1)) < 1e-10
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
    whole, pairs = moved(trace, 1), erasure(trace, by="head")
    monkeypatch.setattr(reading, "CHUNK", 1)
    assert error(moved(trace, 1), whole) < 1e-14
    parts = erasure(trace, by="head")
    assert error(parts.share, pairs.share) < 1e-12
    assert (parts.cosine - pairs.cosine).abs().max() < 1e-12
    assert error(parts.length, pairs.length) < 1e-12


def test_a_block_or_a_weighting_that_is_not_there():
    trace = trace_of(small())
    with pytest.raises(ConfigError, match="there is no block 3; the model has 3"):
        flow(trace, 3)
    with pytest.raises(ConfigError, match="did you mean 'value'"):
        flow(trace, 0, "values")
    assert torch.equal(moved(trace, -1), moved(trace, 2))


# Rollout


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


# By word


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
    pattern = flow(trace_of(small()), 1)
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


# Erasure


@pytest.mark.parametrize("blank", [False, True])
def test_an_eraser_is_found(blank):
    """L1H0 writes the negative of what L0H0 wrote, no more; also if token 1 holds nothing to copy."""
    model = eraser()
    with torch.no_grad():
        model.wte.weight[1] *= not blank
    for by, labels in (("branch", ("1_attn_out", "0_attn_out")), ("head", ("L1H0", "L0H0"))):
        found = erasure(capture(model, torch.tensor([[3, 1, 4, 1, 2, 0]])), by=by)
        for order in ("share", "cosine"):
            first, second, *_ = found.top(5, order)
            assert (first.later, first.earlier) == labels
            assert first.share == pytest.approx(1, abs=1e-12)
            assert first.cosine == pytest.approx(-1, abs=1e-12)
            assert abs(second.share) < 1e-12


@a_few
@given(st.data(), st.sampled_from(("branch", "head")), st.sampled_from((None, 0, 4, -1)))
@pytest.mark.parametrize("residual", ROWS)
def test_erasure_is_the_plain_comparison_of_rows(residual, data, by, pos):
    trace = trace_of(data.draw(configs(residual=residual)))
    terms, found = trace.decompose(by=by), erasure(trace, pos, by)
    rows = terms.values if pos is None else terms.values[:, :, [pos]]
    assert found.labels == terms.labels
    for i, later in enumerate(rows):
        for j, earlier in enumerate(rows):
            share = cosine = torch.zeros(())
            if written(found.labels[i]) > written(found.labels[j]):
                square, product = earlier.square().sum(-1), (later * earlier).sum(-1)
                share = -product.sum() / square.sum() if square.sum() else share
                lengths = later.flatten().norm() * earlier.flatten().norm()
                cosine = product.sum() / lengths if lengths else cosine
            assert abs(found.share[i, j] - share) <= 1e-10 * max(1, abs(share))
            assert abs(found.cosine[i, j] - cosine) < 1e-10
        assert found.length[i] == pytest.approx(later.square().sum(-1).mean().sqrt().item(), rel=1e-10)


def written(label):
    """(block, attention or MLP, write or the norm's bias after it); the embeddings come first."""
    if "embed" in label:
        return (-1, 0, 0)
    layer = int(label[1:].split("H")[0] if label[0] == "L" else label.split("_")[0])
    return (layer, "mlp" in label, "ln_add" in label)


def test_padding_is_left_out_of_an_erasure():
    """A row of padding before the text changes nothing."""
    trace = trace_of(small("deepnorm"), RAGGED[:2])
    model = trace.model
    alone = [erasure(capture(model, torch.tensor([row])), by="head") for row in RAGGED[:2]]
    squares = sum(len(row) * one.length.square() for row, one in zip(RAGGED, alone, strict=False))
    products = sum(len(row) * one.share * one.length.square() for row, one in zip(RAGGED, alone, strict=False))
    assert error(erasure(trace, by="head").share, products / squares) < 1e-10


def test_heads_of_one_block_do_not_erase_each_other():
    found = erasure(trace_of(small("pre")), by="head")
    pairs = {(pair.later, pair.earlier) for pair in found.top(10**6)}
    assert len(pairs) == int(found.after.sum())
    assert ("L1H0", "L0H1") in pairs
    assert not {("L1H0", "L1H1"), ("L0H1", "L1H0"), ("L1H0", "1_attn.b_O"), ("pos_embed", "embed")} & pairs
    shares = [pair.share for pair in found.top(10**6)]
    assert shares == sorted(shares, reverse=True)


def test_what_an_erasure_does_not_know():
    trace = trace_of(small())
    with pytest.raises(ConfigError, match="by: unknown value 'neuron'; valid: branch, head"):
        erasure(trace, by="neuron")
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        erasure(trace).top(3, "cosines")
    with pytest.raises(ConfigError, match="pos: 9 is out of range"):
        erasure(trace, 9)
