"""Law 1 for direct logit attribution: rows that sum to the logit, and are what their labels name."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import induction, periodic
from mainstem.errors import ConfigError, DataError
from mainstem.stream.attribution import sources
from mainstem.stream.capture import capture
from mainstem.stream.decompose import UNITS
from mainstem.text.tokenizer import Bytes
from models import ROWS, build, configs, error, few, small, tokens

PRECISIONS = st.sampled_from([(torch.float64, 1e-10), (torch.float32, 1e-4)])


@few
@given(st.data(), PRECISIONS, st.sampled_from(UNITS), st.sampled_from((None, 5)))
@pytest.mark.parametrize("residual", ROWS)
def test_rows_sum_to_the_logit(residual, data, precision, by, foil):
    dtype, tolerance = precision
    model = build(data.draw(configs(residual=residual)), dtype)
    ids = tokens(model.config)
    why = capture(model, ids).attribution(3, foil, by=by)
    logits = model(ids)[:, -1]
    assert error(why.total, logits[:, 3] - (0 if foil is None else logits[:, foil])) < tolerance
    assert why.closing_error <= tolerance
    assert why.values.shape == (len(why.labels), 2)


@few
@given(configs())
def test_every_position_and_its_own_token(config):
    """A token for each row and position: the sum is the logit of the token that came next."""
    model = build(config)
    ids = tokens(config)
    following = torch.roll(ids, -1, dims=1)
    why = capture(model, ids).attribution(following, pos=None)
    assert error(why.values.sum(0), model(ids).gather(-1, following[..., None])[..., 0]) < 1e-10
    one = capture(model, ids).attribution(following[:, 2], pos=2)
    assert error(one.values, why.values[:, :, 2]) < 1e-10


@few
@given(configs(residual="none"))
def test_the_last_write_is_its_gradient(config):
    """Without norms, what the last branch adds to a logit is <write, d logit / d write>."""
    trace = capture(build(config), tokens(config), metric=lambda logits: logits[:, -1, 3])
    last = ("mlp_out" if config.d_mlp else "attn_out", -1)
    expected = (trace[last] * trace.gradient(last)).sum((1, 2))
    why = trace.attribution(3, by="branch")
    assert error(why[f"{config.n_layer - 1}_{last[0]}"], expected) < 1e-10


@few
@given(configs())
def test_sources_sum_to_what_the_heads_read(config):
    """By source position: their sum is the heads' rows and the values' bias."""
    trace = capture(build(config), tokens(config))
    why = trace.attribution(3, foil=1)
    by_source = sources(trace, 3, 1)
    assert by_source.shape == (config.n_layer, 2, config.n_head, 7)
    for layer in range(config.n_layer):
        rows = [label for label in why.labels if label.startswith(f"L{layer}H") or label == f"{layer}_attn.b_V"]
        expected = sum(why[label] for label in rows)
        assert (by_source[layer].sum((1, 2)) - expected).abs().max() < 1e-10 * (1 + why.values.abs().max())


def test_a_text_is_a_token():
    model, tokenizer = build(small(vocab_size=257)), Bytes()
    trace = capture(model, "hello", tokenizer=tokenizer)
    assert torch.equal(trace.attribution("a", foil="b").values, trace.attribution(97, foil=98).values)
    with pytest.raises(DataError, match="가"):
        trace.attribution("가")


@pytest.mark.parametrize(
    ("token", "foil", "words"),
    [
        (11, None, ["token", "11", "0..10"]),
        (3, -1, ["foil", "-1"]),
        ("a", None, ["tokenizer="]),
        (torch.tensor([-5, 3]), None, ["-5"]),
        (torch.tensor([1, 2, 3]), None, ["(3,)", "(2, 7)"]),
        (1.5, None, ["float32"]),
    ],
)
def test_errors(token, foil, words):
    trace = capture(build(small()), tokens(small()))
    with pytest.raises(ConfigError) as caught:
        trace.attribution(token, foil)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("pos", range(6, 10))  # at 10 what follows has been read twice
def test_the_induction_model_says_the_next_token_by_its_second_head_alone(pos):
    """Its logit is the weight with which that head reads what followed the earlier occurrence: e^b / (e^b + pos)."""
    ids = periodic(V=7, T=16, period=5)
    trace = capture(induction(V=7, T=16, beta=12.0), ids)
    why = trace.attribution(int(ids[0, pos + 1]), pos=pos)
    weight = trace["pattern", 1][0, 0, pos, pos - 4].item()
    assert abs(weight - math.exp(12) / (math.exp(12) + pos)) < 1e-6
    for label in ("embed", "pos_embed", "L0H0"):
        assert why[label].item() == 0
    assert abs(why["L1H0"].item() - weight) < 1e-12
    assert why.closing_error < 1e-12
