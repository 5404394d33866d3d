"""Scores of heads: the formulas on repeated tokens, actual matches in a text, and heads that are known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import copying, eraser, induction
from mainstem.circuits import heads
from mainstem.circuits.heads import KINDS, head_scores, head_scores_on, repeated, targets
from mainstem.errors import ConfigError
from mainstem.stream.capture import capture
from models import ROWS, build, configs, error, few, record, small


@few
@given(st.data(), st.sampled_from(ROWS), st.booleans(), st.sampled_from((1, 1 << 24)))
def test_scores_are_the_diagonals_of_the_patterns(data, residual, with_bos, room):
    """induction [t, t - P + 1] and duplicate [t, t - P] with t in the second half, previous [t, t - 1], and so on."""
    model, P, start = build(data.draw(configs(residual=residual))), 3, int(with_bos)
    bos = 4 if with_bos else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "ROOM", room)
        found = head_scores(model, period=P, sequences=5, bos=bos)
    ids = repeated(model.config, P, 5, 1, bos)
    points = record(model, ids)
    for layer in range(model.config.n_layer):
        pattern = points[f"blocks.{layer}.attn.pattern"]  # (B, H, T, T)

        def mean(offset, since, pattern=pattern):
            return pattern.diagonal(-offset, 2, 3)[..., since - offset :].mean((0, 2))

        second = start + P
        assert error(found["induction"][layer], mean(P - 1, second)) < 1e-10
        assert error(found["duplicate"][layer], mean(P, second)) < 1e-10
        assert error(found["previous"][layer], mean(1, 1)) < 1e-10
        assert error(found["current"][layer], mean(0, 1)) < 1e-10
        assert error(found["first"][layer], pattern[:, :, 1:, 0].mean((0, 2))) < 1e-10
    nats = torch.nn.functional.cross_entropy(points["logits"][:, :-1].mT, ids[:, 1:], reduction="none")
    assert found.first_loss == pytest.approx(nats[:, : second - 1].mean().item(), rel=1e-5)
    assert found.second_loss == pytest.approx(nats[:, second:].mean().item(), rel=1e-5)
    assert nats.shape[1] - second == P - 1


@given(st.integers(2, 5), st.sampled_from((None, 0, 3, 10)), st.integers(0, 3))
def test_repeated_tokens_differ_and_come_twice(period, bos, seed):
    config = small(n_ctx=12)
    ids, start = repeated(config, period, 6, seed, bos), int(bos is not None)
    assert ids.shape == (6, start + 2 * period)
    assert torch.equal(ids[:, start : start + period], ids[:, start + period :])
    for row in ids.tolist():
        assert len(set(row)) == period + start  # bos comes once
        assert row[0] == bos or bos is None
        assert set(row) <= set(range(11))
    assert torch.equal(ids, repeated(config, period, 6, seed, bos))


def slow_targets(ids, start):
    """The table of the module's docstring, word by word, for one row whose text begins at `start`."""
    found = {kind: set() for kind in KINDS}
    for t in range(start + 1, len(ids)):
        for j in range(start, t + 1):
            found["induction"] |= {(t, j)} if j - 1 >= start and ids[j - 1] == ids[t] else set()
            found["duplicate"] |= {(t, j)} if ids[j] == ids[t] and j < t else set()
        found["previous"].add((t, t - 1))
        found["current"].add((t, t))
        found["first"].add((t, start))
    return found


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3), st.data())
def test_targets_are_the_actual_matches(rows, data):
    starts = [data.draw(st.integers(0, 5)) for _ in rows]
    mask = torch.tensor([[i >= start for i in range(6)] for start in starts])
    found = targets(torch.tensor(rows), mask)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        for kind, expected in slow_targets(row, start).items():
            assert {tuple(place) for place in found[kind][index].nonzero().tolist()} == expected
    if not any(starts):
        assert all(torch.equal(found[kind], value) for kind, value in targets(torch.tensor(rows)).items())


@few
@given(configs())
def test_scores_on_a_text_are_those_of_its_rows(config):
    """A padded row scores as it does alone; the mean is over queries, and the counts add up."""
    model, texts = build(config), [[1, 2, 1, 2, 3, 1], [5, 5, 4]]
    together = head_scores_on(capture(model, texts))
    alone = [head_scores_on(capture(model, [text])) for text in texts]
    for kind in KINDS:
        counts = [each.queries[kind] for each in alone]
        assert together.queries[kind] == sum(counts)
        share = [count / sum(counts) for count in counts]
        expected = sum(part * each[kind] for part, each in zip(share, alone, strict=True))
        assert error(together[kind], expected) < 1e-10
        expected = sum(part * each.even[kind] for part, each in zip(share, alone, strict=True))
        assert together.even[kind] == pytest.approx(expected)


@few
@given(configs())
def test_on_repeated_tokens_both_ways_agree(config):
    model = build(config)
    found, text = (
        head_scores(model, period=4, sequences=3),
        head_scores_on(capture(model, repeated(model.config, 4, 3, 1))),
    )
    for kind in KINDS:
        assert error(text[kind], found[kind]) < 1e-12
    assert text.even == found.even
    assert text.queries == found.queries


def test_the_induction_model():
    """On tokens that do not come a third time L0H0 looks at the previous one, L1H0 at what followed."""
    beta, V = 12.0, 9
    found = head_scores(induction(V=V, T=17, beta=beta), bos=V - 1)
    assert found.period == 8
    assert found["previous"][0, 0] > 1 - 17 * math.exp(-beta)
    assert found["induction"][1, 0] > 1 - 40 * math.exp(-beta)
    assert found.top(1, "previous")[0][0] == "L0H0"
    assert found.top(1)[0][0] == "L1H0"
    assert len(found.top(kind="duplicate")) == 2
    assert found.second_loss < found.first_loss


def test_a_head_that_attends_evenly_scores_as_even():
    found = head_scores(copying(), period=4)
    for kind in KINDS:
        assert found[kind][0, 0].item() == pytest.approx(found.even[kind])
    assert found.even["previous"] == pytest.approx(sum(1 / (t + 1) for t in range(1, 8)) / 7)


def test_heads_of_the_previous_and_the_present_token():
    found = head_scores(eraser(), period=4)
    assert found["previous"][0, 0].item() == pytest.approx(1)
    assert found["current"][1, 0].item() == pytest.approx(1)


def test_half_precision_is_summed_in_single():
    """A sum in bfloat16 would keep two digits."""
    trace = capture(build(small(), torch.bfloat16), torch.tensor([[1, 2, 1, 2, 3, 1, 3]]))
    found, paid = head_scores_on(trace), trace["pattern", 1].double() * targets(trace.ids)["previous"][:, None]
    assert error(found["previous"][1], paid.sum((0, 2, 3)) / found.queries["previous"]) < 1e-6


def test_a_text_without_matches_has_no_score():
    found = head_scores_on(capture(build(small()), torch.tensor([[1, 2, 3, 4]])))
    assert found["induction"].isnan().all()
    assert math.isnan(found.even["duplicate"])
    assert found.queries == {"induction": 0, "duplicate": 0, "previous": 3, "current": 3, "first": 3}


def test_the_period_is_what_fits_unless_it_is_given():
    assert head_scores(build(small(n_ctx=8))).period == 4
    assert head_scores(build(small(n_ctx=64, vocab_size=11))).period == 11
    assert head_scores(build(small(n_ctx=64, vocab_size=11)), bos=0).period == 10
    assert head_scores(build(small(n_ctx=300, vocab_size=200)), sequences=1).period == heads.LONGEST


def test_dropout_is_off_and_the_mode_is_kept():
    model = build(small(dropout=0.5)).train()
    assert torch.equal(head_scores(model)["previous"], head_scores(model)["previous"])
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"period": 5}, "period: 5 is not possible; 2 to 4 different tokens, twice, fit n_ctx 8 and vocab_size 11"),
        ({"period": 1}, "period: 1 is not possible"),
        ({"period": 4, "bos": 0}, "2 to 3 different tokens"),
        ({"bos": 11}, r"bos: id 11 is outside 0\.\.10"),
        ({"sequences": 0}, "sequences: 0 is not possible"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        head_scores(build(small()), **arguments)


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="has no heads"):
        head_scores(build(small(n_layer=0)))
    with pytest.raises(ConfigError, match="did you mean 'previous'"):
        head_scores(build(small()))["previos"]
    with pytest.raises(ConfigError, match="what block 0 read was not captured"):
        head_scores_on(capture(build(small()), torch.tensor([[1, 2]]), ["embed"]))
