"""How much is written, and how large the stream is: number by number, and against what training watches."""

import math

import pytest
import torch
from hypothesis import given

from mainstem.stream.analysis.writes import levels, writes
from mainstem.stream.capture import capture
from mainstem.training.device import Device
from mainstem.training.vitals import Vitals
from models import ROWS, B, T, build, configs, error, few, small, tokens

RAGGED = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]


def trace_of(config, ids=None):
    model = build(config)
    return capture(model, tokens(model.config) if ids is None else ids)


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


def test_a_model_without_blocks():
    trace = trace_of(small(n_layer=0))
    assert writes(trace) == []
    assert [level.point for level in levels(trace)] == ["resid_final"]


def test_a_model_of_few_digits_is_measured_in_float32():
    """Each mean is that of the recorded numbers, not of what bfloat16 makes of their sums."""
    model = build(small("sandwich"), torch.bfloat16)
    trace = capture(model, tokens(model.config))
    for row, level in zip(writes(trace), levels(trace)[:-1], strict=True):
        layer, kind = row.label.split("_", 1)
        write, read = trace[f"blocks.{layer}.{kind}"].double(), trace[level.point].double()
        assert row.length.dtype == level.norm.dtype == torch.float32
        assert row.means["ratio"] == pytest.approx((write.norm(dim=-1) / read.norm(dim=-1)).mean().item(), rel=1e-5)
        assert level.means["std"] == pytest.approx(read.std(-1, correction=0).mean().item(), rel=1e-5)
