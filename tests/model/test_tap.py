"""The tap: what is watched, that watching changes nothing, and what a changed point does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.config import NORMS
from mainstem.model.tap import Recorder
from models import ROWS, B, Change, T, build, configs, error, few, record, small, tokens
from reference import norm_of


def run(model, ids, tap=None):
    """Logits and gradients under one seed."""
    torch.manual_seed(5)
    model.zero_grad()
    logits = model(ids, tap=tap)
    logits.square().mean().backward()
    return [logits, *(parameter.grad for parameter in model.parameters())]


@few
@given(st.data(), st.booleans())
@pytest.mark.parametrize("residual", ROWS)
def test_watching_changes_nothing(residual, data, training):
    """Law 3: logits and gradients with every point recorded are those without, to the bit; also under dropout."""
    config = data.draw(configs(residual=residual, dropout=0.3))
    model = build(config, torch.float32).train(training)
    ids = tokens(config)
    tap = Recorder(model.points())

    for alone, watched in zip(run(model, ids), run(model, ids, tap), strict=True):
        assert (alone is None and watched is None) or torch.equal(alone, watched)
    assert list(tap.values) == model.points()  # each of them, in the order of the forward pass


@few
@given(configs())
def test_lens_at_the_last_point_is_the_logits(config):
    """Law 2, to the bit."""
    model = build(config)
    points = record(model, tokens(config))
    assert torch.equal(model.unembed(points["resid_final"]), points["logits"])


@few
@given(configs())
def test_a_pattern_written_back_gives_the_fused_product(config):
    """The plain path, softmax(q k^T) v, and PyTorch's fused one agree; in float32, one product of theirs."""
    model, ids = build(config), tokens(config)
    unchanged = Change({f"blocks.{i}.attn.pattern": lambda pattern: pattern.clone() for i in range(config.n_layer)})
    assert error(model(ids, tap=unchanged), model(ids)) < 1e-12

    single, plain = build(config, torch.float32), {}
    keep = {"blocks.0.attn.pattern": lambda p: p.clone(), "blocks.0.attn.z": lambda z: plain.setdefault("z", z)}
    single(ids, tap=Change(keep))
    assert error(plain["z"], record(single, ids)["blocks.0.attn.z"]) < 1e-6


@few
@given(configs())
def test_patterns_are_causal_averages(config):
    points = record(build(config), tokens(config))
    for index in range(config.n_layer):
        pattern = points[f"blocks.{index}.attn.pattern"]
        assert pattern.shape == (B, config.n_head, T, T)
        assert error(pattern.sum(-1), torch.ones(B, config.n_head, T)) < 1e-12
        assert not pattern.triu(1).any()


def test_q_and_k_are_what_enters_the_product():
    """After QK-norm and rotation: the pattern follows from them alone."""
    config = small(position="rotary", qk_norm=True, attn_scale=0.7)
    points = record(build(config), tokens(config))
    q, k, v, z, pattern = (points[f"blocks.1.attn.{name}"] for name in ("q", "k", "v", "z", "pattern"))
    scores = 0.7 * torch.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    assert error(scores.softmax(-1), pattern) < 1e-12
    assert error(torch.einsum("bhqk,bkhd->bqhd", pattern, v), z) < 1e-12


@pytest.mark.parametrize("norm", NORMS)
def test_qk_norm_is_a_norm_over_each_heads_query_and_key(norm):
    config = small(norm=norm, qk_norm=True)
    model = build(config)
    points, attn = record(model, tokens(config)), model.blocks[0].attn
    read = model.blocks[0].res_1.ln_in(points["blocks.0.resid_pre"])
    q, k, v = attn.c_attn(read).unflatten(-1, (3, 2, 6)).unbind(2)  # (B, T, H, D)
    assert error(points["blocks.0.attn.q"], norm_of(attn.q_norm)(q)) < 1e-14
    assert error(points["blocks.0.attn.k"], norm_of(attn.k_norm)(k)) < 1e-14
    assert error(points["blocks.0.attn.v"], v) < 1e-14


@pytest.mark.parametrize("point", build(small("sandwich")).points())
def test_every_point_but_statistics_can_be_changed(point):
    """A point put to zero changes the logits; a norm's statistics are read only."""
    model = build(small("sandwich"))
    ids = tokens(model.config)
    changed = model(ids, tap=Change({point: torch.zeros_like}))
    assert torch.equal(changed, model(ids)) == point.endswith((".mean", ".scale"))


def test_points_not_asked_for_are_not_computed():
    model = build(small())
    tap = Recorder(["blocks.1.attn_out"])
    model(tokens(model.config), tap=tap)
    assert list(tap.values) == ["blocks.1.attn_out"]


def test_a_tap_is_bound_to_a_pass_once_for_all_of_its_points():
    """Also for those of the last norm, which are read when the stream is unembedded."""

    class Bound(Recorder):
        def for_pass(self, offset, length, partial):
            passes.append((offset, length, partial))

    passes, model = [], build(small())
    tap = Bound(model.points())
    model(tokens(model.config), tap=tap)
    assert passes == [(0, T, False)]
    assert not tap.values
