import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.config import Sampling
from mainstem.errors import ConfigError, RunError
from mainstem.generation import sampling as module
from mainstem.generation.sampling import choose, row_generator

GREEDY = Sampling(temperature=0)
# Small whole numbers, so that ties are common.
tied = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=24)


def draws(logits, sampling, count=2000, **masks):
    """`count` choices from one row of logits."""
    rows = torch.tensor([logits]).expand(count, -1)
    masks = {name: mask.expand(count, -1) for name, mask in masks.items()}
    return choose(rows, sampling, [row_generator(7, 0)] * count, **masks)


def kept(logits, sampling):
    """The ids that the recipe leaves, best first."""
    scores = torch.tensor([logits]) / sampling.temperature
    left = module._truncated(scores - scores.amax(), sampling)[0]
    return [i for i in left.sort(descending=True, stable=True).indices.tolist() if left[i] > -math.inf]


def ranked(logits):
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", -1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "hot", "float"),
        ("temperature", None, "float"),
        ("top_k", -1, "or 0 for all"),
        ("top_k", 1.5, "int"),
        ("top_p", 1.01, "from 0 to 1"),
        ("top_p", -0.1, "from 0 to 1"),
        ("min_p", 2, "from 0 to 1"),
        ("min_p", math.nan, "finite"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", -1.2, "above 0"),
    ],
)
def test_nonsense_is_refused_with_field_value_and_rule(field, value, rule):
    with pytest.raises(ConfigError) as error:
        Sampling(**{field: value})
    assert str(error.value).startswith(f"{field}: ")
    assert str(value) in str(error.value)
    assert rule in str(error.value)


@given(tied)
def test_temperature_0_is_the_best_token_and_needs_no_chance(logits):
    """For every tie; top_k 1 is the same."""
    best = ranked(logits)[0]
    generator = row_generator(1, 0)
    before = generator.get_state()
    for sampling in (GREEDY, Sampling(temperature=1e-8), Sampling(top_k=1), Sampling(temperature=3.0, top_k=1)):
        assert choose(torch.tensor([logits]), sampling, [generator]) == [best]
    assert torch.equal(generator.get_state(), before)


@given(tied, st.integers(0, 999))
def test_the_smallest_settings_are_finite_and_leave_the_best(logits, seed):
    for sampling in (
        Sampling(temperature=1e-5),
        Sampling(top_p=0.0),
        Sampling(top_p=1e-9),
        Sampling(temperature=1e-4, top_p=1e-4),
        Sampling(min_p=1.0),
    ):
        [i] = choose(torch.tensor([logits]), sampling, [row_generator(seed, 0)])
        assert logits[i] == max(logits)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e38])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e30])
def test_any_logits_and_any_temperature_give_a_token(scale, temperature):
    logits = [scale * x for x in (-1.0, 1.0, 0.5, -math.inf)]
    assert set(draws(logits, Sampling(temperature=temperature), 50)) <= {0, 1, 2}


@given(tied, st.integers(1, 30), st.floats(0.1, 5))
def test_top_k_leaves_exactly_k(logits, k, temperature):
    """With k beyond the vocabulary and with ties too."""
    left = kept(logits, Sampling(top_k=k, temperature=temperature))
    assert sorted(left) == sorted(ranked(logits)[:k])


def test_top_k_far_beyond_the_vocabulary_is_all():
    assert set(draws([0.0, 0.0, 0.0], Sampling(top_k=10**6))) == {0, 1, 2}
    assert set(draws([0.0, 0.0, 0.0], Sampling(top_k=2))) == {0, 1}


@pytest.mark.parametrize("nucleus", [1, 3, 1024])  # how many are looked at first changes nothing
@given(logits=tied, p=st.floats(0, 0.99))
def test_top_p_leaves_the_fewest_that_reach_p(nucleus, logits, p):
    weights = np.exp(np.array(logits) - max(logits))
    order = ranked(logits)
    reached = np.cumsum(weights[order]) / weights.sum()
    if np.abs(reached - p).min() < 1e-5:
        return  # rounding decides
    wanted = order[: 1 + int((reached < p).sum())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUCLEUS", nucleus)
        assert sorted(kept(logits, Sampling(temperature=1.0, top_p=p))) == sorted(wanted)


def test_each_row_has_its_own_nucleus():
    logits = torch.tensor([[9.0, 0, 0, 0], [0, 0, 0, 0], [5, 5, 0, 0]])
    left = module._truncated(logits - logits.amax(-1, keepdim=True), Sampling(temperature=1.0, top_p=0.6))
    assert (left > -math.inf).sum(-1).tolist() == [1, 3, 2]


@given(tied, st.floats(0.01, 0.99))
def test_min_p_is_a_share_of_the_best(logits, min_p):
    ratios = [math.exp(x - max(logits)) for x in logits]
    if min(abs(r - min_p) for r in ratios) < 1e-5:
        return
    wanted = [i for i, r in enumerate(ratios) if r >= min_p]
    assert sorted(kept(logits, Sampling(temperature=1.0, min_p=min_p))) == wanted


def test_the_order_of_the_recipe():
    """Top-p sees what top-k left, and both see the temperature."""
    logits = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, Sampling(temperature=1.0, top_p=0.65)) == [0, 1]
    assert kept(logits, Sampling(temperature=1.0, top_p=0.55, top_k=2)) == [0]  # 0.4 / 0.7 reaches it
    assert kept(logits, Sampling(temperature=0.25, top_p=0.65)) == [0]
    assert kept(logits, Sampling(temperature=4.0, min_p=0.7)) == [0, 1, 2, 3]
    assert kept(logits, Sampling(temperature=1.0, min_p=0.7)) == [0, 1]


def test_choices_follow_the_softmax():
    probabilities = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    with np.errstate(divide="ignore"):
        logits = (2 * np.log(probabilities)).tolist()
    counts = np.bincount(draws(logits, Sampling(temperature=2.0), 20000), minlength=5)
    assert counts[1] == 0
    assert np.abs(counts / 20000 - probabilities).max() < 0.015  # four standard deviations


def test_forbidden_tokens_are_never_chosen():
    """Neither by chance, however wild, nor greedily; the first and the last included."""
    forbidden = torch.tensor([True, False, True, False, True, True])
    for sampling in (Sampling(temperature=100.0), Sampling(top_k=5), Sampling(top_p=0.99), GREEDY):
        assert set(draws([9.0, 0.0, 9.0, 0.1, 9.0, 9.0], sampling, 300, forbidden=forbidden)) <= {1, 3}


@given(tied, st.data())
def test_the_repetition_penalty(logits, data):
    seen = data.draw(st.sets(st.integers(0, len(logits) - 1)))
    rows = torch.tensor([logits])
    got = module._penalise(rows, [seen], 2.0)[0].tolist()
    assert got == [(x / 2 if x > 0 else x * 2) if i in seen else x for i, x in enumerate(logits)]
    assert rows[0].tolist() == logits  # the model's own are left alone


def test_the_penalty_comes_before_greedy_and_1_is_off():
    logits = torch.tensor([[3.0, 2.0]])
    assert choose(logits, GREEDY, [row_generator(1, 0)], [{0}]) == [0]
    assert choose(logits, Sampling(temperature=0, repetition_penalty=2.0), [row_generator(1, 0)], [{0}]) == [1]


def test_a_row_of_a_batch_is_the_row_alone():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(), Sampling(top_k=7), Sampling(top_p=0.7), Sampling(min_p=0.2)):
        batch = choose(logits, sampling, [row_generator(5, i) for i in range(6)])
        alone = [choose(logits[i : i + 1], sampling, [row_generator(5, i)])[0] for i in range(6)]
        assert batch == alone


def test_row_generators_differ_by_seed_and_by_sample():
    first = [torch.rand(1, generator=row_generator(seed, i)).item() for seed in range(9) for i in range(9)]
    again = [torch.rand(1, generator=row_generator(seed, i)).item() for seed in range(9) for i in range(9)]
    assert first == again
    assert len(set(first)) == 81


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
    with pytest.raises(RunError, match="not finite"):
        choose(torch.tensor([[0.0, 1.0], [0.0, bad]]), GREEDY, [row_generator(1, 0)] * 2)


def test_half_precision_logits_are_read_in_float32():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).bfloat16().expand(500, -1)
    both = [choose(part, Sampling(), [row_generator(7, 0)] * 500) for part in (logits, logits.float())]
    assert both[0] == both[1]


@pytest.mark.parametrize(("draw", "wanted"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_chance_are_tokens_that_may_be_chosen(monkeypatch, draw, wanted):
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, generator: torch.full(shape, draw, dtype=dtype))
    forbidden = torch.tensor([[True, False, False, False, True]])
    assert draws([0.1, 0.2, 0.3, 0.4, 0.5], Sampling(), 1, forbidden=forbidden) == [wanted]
