"""What is taken back: against rows compared one by one, and where it is known beforehand."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from known import eraser
from mainstem.errors import ConfigError
from mainstem.stream.analysis.erasure import Erasure, erasure
from mainstem.stream.capture import capture
from models import ROWS, build, configs, error, few, small, tokens

a_few = settings(few, max_examples=4)  # for each row of the table
RAGGED = [[3, 1, 4, 1, 5], [9, 2]]


def trace_of(config, ids=None):
    model = build(config)
    return capture(model, tokens(model.config) if ids is None else ids)


@pytest.mark.parametrize("blank", [False, True])
def test_an_eraser_is_found(blank):
    """L1H0 writes the negative of what L0H0 wrote, no more; also if token 1 holds nothing to copy."""
    model = eraser()
    with torch.no_grad():
        model.wte.weight[1] *= not blank
    for by, labels in (("branch", ("1_attn_out", "0_attn_out")), ("head", ("L1H0", "L0H0"))):
        (only,) = erasure(capture(model, torch.tensor([[3, 1, 4, 1, 2, 0]])), by=by).top(5)
        assert (only.later, only.earlier) == only[:2] == labels
        assert only.share == only[2] == pytest.approx(1, abs=1e-12)
        assert only.cosine == only[3] == pytest.approx(-1, abs=1e-12)
        assert only.taken == pytest.approx(only.earlier_length, abs=1e-12)
        assert only.later_length == pytest.approx(only.earlier_length, abs=1e-12)


@a_few
@given(st.data(), st.sampled_from(("branch", "head")), st.sampled_from((None, 0, 4, -1)))
@pytest.mark.parametrize("residual", ROWS)
def test_erasure_is_the_plain_comparison_of_rows(residual, data, by, pos):
    trace = trace_of(data.draw(configs(residual=residual)))
    terms, found = trace.decompose(by=by), erasure(trace, by, pos)
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
    trace = trace_of(small("deepnorm"), RAGGED)
    model = trace.model
    alone = [erasure(capture(model, torch.tensor([row])), by="head") for row in RAGGED]
    squares = sum(len(row) * one.length.square() for row, one in zip(RAGGED, alone, strict=True))
    products = sum(len(row) * one.share * one.length.square() for row, one in zip(RAGGED, alone, strict=True))
    assert error(erasure(trace, by="head").share, products / squares) < 1e-10


def test_heads_of_one_block_do_not_erase_each_other():
    found = erasure(trace_of(small("pre")), by="head")
    pairs = {(found.labels[i], found.labels[j]) for i, j in found.after.nonzero().tolist()}
    assert ("L1H0", "L0H1") in pairs
    assert not {("L1H0", "L1H1"), ("L0H1", "L1H0"), ("L1H0", "1_attn.b_O"), ("pos_embed", "embed")} & pairs


@a_few
@given(st.data(), st.sampled_from(("branch", "head")))
@pytest.mark.parametrize("residual", ROWS)
def test_the_top_is_what_is_taken_back_beyond_chance(residual, data, by):
    """Every pair below -chance whose earlier write is no bias, and no other; the longest first."""
    found = erasure(trace_of(data.draw(configs(residual=residual))), by=by)
    assert found.chance == pytest.approx(2 / math.sqrt(12))
    found = replace(found, chance=0.02)  # of random weights little is beyond chance
    expected = {
        (later, earlier): -found.cosine[i, j].item() * found.length[i].item()
        for i, later in enumerate(found.labels)
        for j, earlier in enumerate(found.labels)
        if found.after[i, j] and found.cosine[i, j] < -found.chance and "b_" not in earlier and "bias" not in earlier
    }
    top = found.top(10**6)
    assert {(pair.later, pair.earlier): pytest.approx(pair.taken) for pair in top} == expected
    assert [pair.taken for pair in top] == sorted((pair.taken for pair in top), reverse=True)
    assert found.top(2) == top[:2]
    for pair in top:
        assert pair.taken == pytest.approx(pair.share * pair.earlier_length)
        assert pair.later_length == pytest.approx(found.length[found.labels.index(pair.later)].item())


def test_a_large_share_of_a_tiny_write_is_little():
    """The long write opposes the tiny one by chance, and a bias is no earlier write: neither pair is named."""
    labels = ["pos_embed", "0_attn_out", "0_attn.b_V", "1_mlp_out"]
    length = torch.tensor([0.4, 4.0, 0.4, 10.0])
    cosine = torch.tensor([[0.0, 0, 0, 0], [-0.3, 0, 0, 0], [0, 0, 0, 0], [-0.07, -0.5, -0.5, 0]])
    share = -cosine * length[:, None] / length
    found = Erasure(labels, cosine != 0, share, cosine, length, chance=2 / math.sqrt(128))
    assert share[3, 0] > 1.7
    first, second = found.top(5)
    assert first[:2] == ("1_mlp_out", "0_attn_out")
    assert (first.share, first.taken, first.later_length, first.earlier_length) == pytest.approx((1.25, 5, 10, 4))
    assert second[:2] == ("0_attn_out", "pos_embed")
    assert (second.share, second.taken) == pytest.approx((3, 1.2))


def test_a_long_text_is_worked_through_in_parts(monkeypatch):
    trace = trace_of(small("sandwich"))
    whole = erasure(trace, by="head")
    monkeypatch.setattr("mainstem.stream.analysis.erasure.CHUNK", 1)
    parts = erasure(trace, by="head")
    assert error(parts.share, whole.share) < 1e-12
    assert (parts.cosine - whole.cosine).abs().max() < 1e-12
    assert error(parts.length, whole.length) < 1e-12


def test_a_stream_of_nothing_and_a_model_without_blocks():
    model = build(small("none"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = erasure(capture(model, tokens(model.config)), by="head")
    assert not found.share.any()
    assert found.top(5) == erasure(trace_of(small(n_layer=0))).top(5) == []


def test_a_model_of_few_digits_is_summed_in_float32():
    """Products of bfloat16 rows, exactly summed: cosines are those of the rows as they are."""
    model = build(small(), torch.bfloat16)
    trace = capture(model, tokens(model.config))
    rows = trace.decompose().values.double().flatten(1)
    found = erasure(trace)
    assert error(found.length.double(), rows.norm(dim=1) / math.sqrt(trace.ids.numel())) < 1e-5
    cosine = torch.nn.functional.cosine_similarity(rows[:, None], rows, dim=-1)
    assert ((found.cosine - cosine) * found.after).abs().max() < 1e-5


def test_what_an_erasure_does_not_know():
    trace = trace_of(small())
    with pytest.raises(ConfigError, match="by: unknown value 'neuron'; valid: branch, head"):
        erasure(trace, by="neuron")
    with pytest.raises(ConfigError, match="pos: 9 is out of range"):
        erasure(trace, pos=9)
