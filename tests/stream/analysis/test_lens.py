"""The logit lens: the last depth is the model, every number is what its definition says, and no depth is read whole."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import known
from mainstem.errors import ConfigError
from mainstem.stream.analysis import lens as lens_file
from mainstem.stream.analysis.lens import depths, lens
from mainstem.stream.capture import capture
from mainstem.stream.decompose import NORMALISATIONS
from mainstem.text.tokenizer import Bytes
from models import ROWS, B, T, build, configs, error, few, small, tokens

PER_DEPTH = ("entropy", "kl", "rank", "probability", "logit", "top_ids", "top_probability")


def slow_logits(trace, point, norm):
    """One depth's logits, (B, T, V), by the formulas."""
    x, model = trace[point], trace.model
    if norm == "own" or "ln_f.scale" not in trace.values:
        return model.unembed(x)
    mean = 0 if model.config.norm == "rmsnorm" else x.mean(-1, keepdim=True)
    y = model.ln_f.weight * (x - mean) / trace["ln_f.scale"]
    return model.lm_head(y if getattr(model.ln_f, "bias", None) is None else y + model.ln_f.bias)


@few
@given(st.data(), st.sampled_from(NORMALISATIONS), st.sampled_from((torch.float32, torch.float64)))
@pytest.mark.parametrize("residual", ROWS)
def test_the_last_depth_is_the_model(residual, data, norm, dtype):
    """Law 2, to the bit, by either norm and with any map before."""
    model = build(data.draw(configs(residual=residual)), dtype)
    ids = tokens(model.config)
    logits, seen = model(ids), lens(capture(model, ids), norm=norm, tuned=lambda x, point: 2 * x)
    assert torch.equal(seen.logits("resid_final"), logits)
    assert torch.equal(seen.logits(("resid_post", -1)), logits)
    assert torch.equal(seen.token, logits.argmax(-1))
    assert torch.equal(seen.logit[-1], logits.amax(-1))
    assert torch.equal(seen.probability[-1], logits.log_softmax(-1).exp().amax(-1))
    assert not seen.kl[-1].any()
    assert (seen.rank[-1] == 1).all()
    assert seen.labels[-1] == "final"


@few
@given(configs(), st.sampled_from(NORMALISATIONS))
def test_every_number_is_its_definition(config, norm):
    """Against whole logits of every depth, (P, B, T, V), that the lens itself never holds."""
    model = build(config)
    ids = tokens(config)
    trace = capture(model, ids)
    token = tokens(config).roll(3, 1)
    seen = lens(trace, token, norm, top=4)
    z = torch.stack([slow_logits(trace, point, norm) for point in depths(model)])
    p, at = z.softmax(-1), token.expand(len(z), B, T)[..., None]

    assert seen.points == depths(model)
    assert all(error(seen.logits(point), z[i]) < 1e-12 for i, point in enumerate(seen.points))
    assert torch.equal(seen.rank, z.argsort(-1, descending=True).argsort(-1).gather(-1, at)[..., 0] + 1)
    assert error(seen.probability, p.gather(-1, at)[..., 0]) < 1e-12
    assert error(seen.logit, z.gather(-1, at)[..., 0]) < 1e-12
    assert error(seen.entropy, -(p * p.log()).sum(-1)) < 1e-12
    assert (seen.kl - (p[-1] * (p[-1] / p).log()).sum(-1)).abs().max() < 1e-12
    assert torch.equal(seen.top_ids, z.argsort(-1, descending=True)[..., :4])
    assert error(seen.top_probability, p.gather(-1, seen.top_ids)) < 1e-12
    losses = [F.cross_entropy(depth[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for depth in z]
    assert error(seen.cross_entropy, torch.stack(losses)) < 1e-12


@few
@given(configs(), st.booleans())
def test_a_token_wins_where_it_begins_to_lead_to_the_end(config, own_answer):
    seen = lens(capture(build(config), tokens(config)), None if own_answer else 3)
    P = len(seen.points)
    for row in range(B):
        for pos in range(T):
            leads = (seen.rank[:, row, pos] == 1).tolist()
            assert seen.won[row, pos] == min(i for i in range(P + 1) if all(leads[i:]))
    assert not own_answer or (seen.won < P).all()


def test_what_an_induction_model_says_is_known():
    """Nothing is in the span that the logits read until the second block writes there: uniform, then the answer.

    Equal logits are ranked by id, so that no token but the first leads while all are equal.
    """
    model = known.induction()
    ids = known.periodic(7, 16, 5)
    seen = lens(capture(model, ids))
    assert seen.labels == ["0_pre", "1_pre", "final"]
    assert error(seen.entropy[:2], torch.full_like(seen.entropy[:2], math.log(7))) < 1e-12
    assert error(seen.kl[0], math.log(7) - seen.entropy[2]) < 1e-10
    assert torch.equal(seen.rank[0], seen.token + 1)
    assert torch.equal(seen.won, torch.where(seen.token == 0, 0, 2))
    assert torch.equal(seen.token[:, 6:-1], ids[:, 7:])


@few
@given(st.data(), st.sampled_from(NORMALISATIONS), st.integers(1, 3), st.integers(1, 3))
@pytest.mark.parametrize("residual", ROWS)
def test_padded_rows_are_single_runs(residual, data, norm, first, second):
    """Each number of a row; and the mean over a batch is that over all its tokens."""
    model = build(data.draw(configs(residual=residual)))
    ids = tokens(model.config)
    rows = [ids[0, first:].tolist(), ids[1, second:].tolist(), ids[0].tolist()]
    batch = lens(capture(model, rows), 3, norm)
    singles = [lens(capture(model, [row]), 3, norm) for row in rows]
    for index, single in enumerate(singles):
        start = T - len(rows[index])
        for name in PER_DEPTH:
            there, alone = getattr(batch, name)[:, index, start:], getattr(single, name)[:, 0]
            assert (there - alone).abs().max() < 1e-10
        assert torch.equal(batch.won[index, start:], single.won[0])
    counts = [len(row) - 1 for row in rows]
    mean = sum(n * single.cross_entropy for n, single in zip(counts, singles, strict=True)) / sum(counts)
    assert error(batch.cross_entropy, mean) < 1e-10


@few
@given(configs(), st.integers(1, 80), st.sampled_from(NORMALISATIONS))
def test_parts_are_the_whole(config, at_once, norm):
    """However few positions are read together; and never more logits than may be held, if that is one position's."""
    trace = capture(build(config), tokens(config))
    whole, sizes = lens(trace, 3, norm), []
    with pytest.MonkeyPatch.context() as patch:
        measured = lens_file.log_probabilities
        patch.setattr(lens_file, "AT_ONCE", at_once)
        patch.setattr(lens_file, "log_probabilities", lambda z: sizes.append(z.numel()) or measured(z))
        parts = lens(trace, 3, norm)
    assert max(sizes) <= max(at_once, B * config.vocab_size)
    for name in PER_DEPTH:
        assert (getattr(parts, name) - getattr(whole, name)).abs().max() < 1e-10
    assert torch.equal(parts.won, whole.won)
    assert error(parts.cross_entropy, whole.cross_entropy) < 1e-12


def test_chosen_depths_in_their_order_each_once():
    trace = capture(build(small()), tokens(small()))
    every = lens(trace)
    assert every.labels == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final"]
    some = lens(trace, points=["resid_final", ("resid_post", 0), "blocks.1.hook_resid_pre", "resid_mid0"])
    assert some.points == ["blocks.0.resid_mid", "blocks.1.resid_pre", "resid_final"]
    assert torch.equal(some.kl, every.kl[[1, 2, 6]])
    assert lens(trace, points="resid_post").labels == ["1_pre", "2_pre", "final"]
    early = lens(trace, points="*.resid_mid")  # KL and answer are the model's own even where its last depth is not read
    assert torch.equal(early.kl, every.kl[[1, 3, 5]])
    assert torch.equal(early.token, every.token)
    bare = build(small(n_layer=0))
    assert lens(capture(bare, tokens(small()), ["resid_final"])).labels == ["final"]


def test_a_map_is_read_instead_of_the_stream():
    trace = capture(build(small()), tokens(small()))
    seen, names = lens(trace), []
    mapped = lens(trace, tuned=lambda x, point: names.append(point) or x + len(point))
    assert names == seen.points[:-1]
    x = trace["resid_mid", 1] + len("blocks.1.resid_mid")
    assert torch.equal(mapped.logits(("resid_mid", 1)), trace.model.unembed(x))
    assert not torch.equal(mapped.kl, seen.kl)


@pytest.mark.parametrize(
    ("model", "probability"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_probabilities_are_float32_or_better(model, probability):
    seen = lens(capture(build(small(), model), tokens(small())), top=99)  # as many as there are
    names = ("entropy", "kl", "probability", "top_probability", "cross_entropy")
    assert {getattr(seen, name).dtype for name in names} == {probability}
    assert error(seen.top_probability.sum(-1), torch.ones_like(seen.kl)) < 1e-5


def test_a_text_of_one_token_has_no_next():
    assert lens(capture(build(small()), [[3]])).cross_entropy.isnan().all()


def test_rows_are_plain():
    model, tokenizer = build(small(vocab_size=257)), Bytes()
    seen = lens(capture(model, ["hello", "ab"], tokenizer=tokenizer), "a", top=2)
    rows = seen.to_dicts(1, -1)
    assert json.loads(json.dumps(rows)) == rows
    assert [row["label"] for row in rows] == seen.labels
    assert all(row["token"] == {"id": 97, "text": "a"} for row in rows)
    assert [row["kl"] for row in rows] == seen.kl[:, 1, 4].tolist()
    assert [top["id"] for top in rows[2]["top"]] == seen.top_ids[2, 1, 4].tolist()
    assert set(rows[0]["top"][0]) == {"id", "text", "probability"}
    assert rows == seen.to_dicts(-1, 4)
    assert set(lens(capture(model, [[3, 4]])).to_dicts()[0]["top"][0]) == {"id", "probability"}
    for row, pos, words in ((2, 0, ["row", "2 rows"]), (0, 5, ["pos", "5 positions"]), (1, 0, ["padding", "row 1"])):
        with pytest.raises(ConfigError) as caught:
            seen.to_dicts(row, pos)
        assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"norm": "owm"}, ["norm", "'own'"]),
        ({"norm": "owm", "points": "resid_final"}, ["norm", "'own'"]),
        ({"top": 0}, ["top", "0", "at least 1"]),
        ({"token": 11}, ["token", "11", "0..10"]),
        ({"token": "a"}, ["token", "tokenizer="]),
        ({"token": torch.zeros(2, 5, dtype=torch.long)}, ["token", "(2, 5)", "(2, 7)"]),
        ({"token": torch.zeros(3, dtype=torch.long)}, ["token", "(3,)", "(2, 7)"]),
        ({"points": "blocks.0.attn_out"}, ["attn_out", "not a point of the stream"]),
        ({"points": "resid_pots"}, ["resid_pots"]),
        ({"points": []}, ["points", "at least one"]),
    ],
)
def test_errors(arguments, words):
    trace = capture(build(small()), tokens(small()))
    with pytest.raises(ConfigError) as caught:
        lens(trace, **arguments)
    assert all(word in str(caught.value) for word in words)
