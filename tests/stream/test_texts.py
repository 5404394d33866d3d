"""Texts in the place of ids: every call that takes them reads them with its `tokenizer=`, and refuses them without."""

import pytest
import torch

from mainstem.errors import ConfigError, DataError
from mainstem.stream.capture import capture
from mainstem.stream.change.ablate import ablation
from mainstem.stream.change.patch import attribution_patch, patch, patch_grid
from mainstem.stream.change.path import path_patch
from mainstem.stream.change.steering import steering_vector
from mainstem.stream.metrics import LogitDifference, TokenLogit, TokenLogProb, with_ids
from mainstem.text.tokenizer import Bytes
from models import build, small

TOKENIZER = Bytes()
CLEAN, CORRUPT = ["the man", "강물이"], ["the men", "빗물이"]
PAIRS = {
    "patch": lambda model, *texts, metric, **options: patch(model, *texts, "L0H1", metric, **options),
    "patch_grid": lambda model, *texts, metric, **options: patch_grid(model, *texts, metric, **options),
    "attribution_patch": lambda model, *texts, metric, **options: attribution_patch(model, *texts, metric, **options),
    "path_patch": lambda model, *texts, metric, **options: path_patch(
        model, *texts, "L0H1", "final", metric, **options
    ),
}


def model():
    return build(small(vocab_size=257, n_ctx=16))


def ids(texts):
    return [TOKENIZER.encode(text) for text in texts]


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_texts_is_the_pair_of_their_ids(name):
    by_text = PAIRS[name](model(), CLEAN, CORRUPT, metric=LogitDifference("a", ["e", "m"]), tokenizer=TOKENIZER)
    metric = LogitDifference(ord("a"), torch.tensor([ord("e"), ord("m")]))
    by_id = PAIRS[name](model(), ids(CLEAN), ids(CORRUPT), metric=metric)
    assert torch.equal(by_text.effects, by_id.effects)
    assert by_text.effects.abs().max() > 0


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_unequal_lengths_is_refused_with_both_and_the_tokens(name):
    with pytest.raises(DataError, match=r"row 1: clean has 3 tokens and corrupt 5.* from token 1 on they read 'e' 'n'"):
        PAIRS[name](model(), ["ab", "men"], ["ac", "maids"], metric=TokenLogit("a"), tokenizer=TOKENIZER)


def test_texts_of_an_ablation_and_of_its_reference_are_their_ids():
    by_text = ablation(
        model(), CLEAN, TokenLogProb("a"), "head", "resample", CORRUPT, tokenizer=TOKENIZER
    )  # fmt: skip
    by_id = ablation(model(), ids(CLEAN), TokenLogProb(ord("a")), "head", "resample", ids(CORRUPT))
    assert torch.equal(by_text.values, by_id.values)
    one = ablation(model(), "the man", TokenLogProb("a"), tokenizer=TOKENIZER)
    assert torch.equal(one.values, ablation(model(), ids(["the man"]), TokenLogProb(ord("a"))).values)


def test_a_capture_and_a_steering_vector_take_texts():
    trace = capture(model(), "the man", metric=TokenLogit("a"), tokenizer=TOKENIZER)
    expected = capture(model(), ids(["the man"]), metric=TokenLogit(ord("a")))
    assert torch.equal(trace.gradient("resid_final"), expected.gradient("resid_final"))
    vector = steering_vector(model(), CLEAN, "men", ("resid_post", 1), tokenizer=TOKENIZER)
    assert torch.equal(vector, steering_vector(model(), ids(CLEAN), ids(["men"]), ("resid_post", 1)))


@pytest.mark.parametrize("name", PAIRS)
def test_without_a_tokenizer_texts_are_refused_by_an_argument_that_the_call_has(name):
    with pytest.raises(DataError, match="'the man' is a text, and there is no tokenizer; give ids, or `tokenizer`"):
        PAIRS[name](model(), CLEAN, CORRUPT, metric=TokenLogit(3))
    with pytest.raises(ConfigError, match="token: 'a' is a text, and there is no tokenizer; give an id"):
        PAIRS[name](model(), ids(CLEAN), ids(CORRUPT), metric=TokenLogit("a"))


def test_a_metric_of_texts_is_refused_where_nothing_can_read_them():
    logits = torch.zeros(2, 3, 257)
    for metric in (TokenLogit("a"), TokenLogProb(["a", "b"]), LogitDifference("a", 3)):
        with pytest.raises(ConfigError, match="token: 'a' is a text, and there is no tokenizer"):
            metric(logits)
    with pytest.raises(DataError, match="'ab' is not one token but 2"):
        with_ids(TokenLogit("ab"), TOKENIZER)
    assert with_ids(len, TOKENIZER) is len
