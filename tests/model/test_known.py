"""The hand-built models do what `known` says of them: patterns, writes and logits against their closed forms."""

import math
from itertools import product

import pytest
import torch
from torch.nn.functional import cosine_similarity, one_hot

import known
from models import Change, error, normal, record, tokens

E = math.exp(12.0)


def rows(ids, V):
    """One-hot rows, (B, T, V)."""
    return one_hot(ids, V).double()


def test_the_first_head_of_induction_attends_to_the_token_before():
    pattern = record(known.induction(), known.periodic(7, 16, 5))["blocks.0.attn.pattern"][0, 0]
    for i in range(1, 16):
        expected = torch.full((i + 1,), 1 / (E + i), dtype=torch.float64)
        expected[i - 1] = E / (E + i)
        assert error(pattern[i, : i + 1], expected) < 1e-12


@pytest.mark.parametrize("period", [2, 3, 5, 6])
def test_the_second_head_of_induction_attends_to_what_followed(period):
    ids = known.periodic(7, 16, period)
    points = record(known.induction(), ids)
    pattern = points["blocks.1.attn.pattern"][0, 0]
    for i in range(1, 16):
        followed = list(range(i + 1 - period, 1, -period))
        m = len(followed)
        assert m == (i - 1) // period
        assert m == 0 or points["logits"][0, i].argmax() == ids[0, i + 1 - period]
        tolerance = 1e-6 if m == 1 else 12 * i / E
        for j in followed or range(i + 1):
            assert abs(pattern[i, j] - (E / (m * E + i + 1 - m) if m else 1 / (i + 1))) < tolerance
    assert error(points["logits"][0], pattern @ rows(ids[0], 7)) < 1e-12


def test_the_second_heads_scores_are_the_first_heads_weights():
    ids = known.periodic(7, 16, 5)
    points = record(known.induction(), ids)
    first, second = (points[f"blocks.{block}.attn.pattern"][0, 0] for block in (0, 1))
    scores = 12.0 * rows(ids[0], 7) @ (first @ rows(ids[0], 7)).T  # (T query, T key)
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    assert error(second, scores.masked_fill(hidden, -math.inf).softmax(-1)) < 1e-12


@pytest.mark.parametrize(("V", "T"), [(7, 16), (12, 5)])
def test_induction_reads_the_first_heads_write(V, T):
    """Without it the second head attends evenly, whichever of V and T is larger."""
    model, ids = known.induction(V, T), known.periodic(V, T, 2)
    assert model(ids)[0, 3].argmax() == ids[0, 2]
    even = torch.ones(T, T, dtype=torch.float64).tril()
    even /= even.sum(1, keepdim=True)
    silent = model(ids, tap=Change({"blocks.0.attn_out": torch.zeros_like}))
    assert error(silent, even @ rows(ids, V)) < 1e-12


def test_the_eraser_writes_the_negative_of_what_was_written():
    model = known.eraser()
    ids = tokens(model.config)
    points = record(model, ids)
    first, second = points["blocks.0.attn_out"], points["blocks.1.attn_out"]
    assert (cosine_similarity(first, second, dim=-1) + 1).abs().max() < 1e-12
    assert points["logits"].abs().max() < 1e-12
    before = rows(ids[:, [0, *range(ids.shape[1] - 1)]], 5)
    assert error(model(ids, tap=Change({"blocks.1.attn_out": torch.zeros_like})), before) < 1e-12


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_copying_raises_or_lowers_what_it_sees(sign):
    model = known.copying(sign)
    ids = tokens(model.config)
    seen = rows(ids, 5).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
    assert error(model(ids), rows(ids, 5) + sign * seen) < 1e-12


def test_the_whole_table_of_skip_trigrams_is_known():
    ids = torch.tensor(list(product(range(5), repeat=3)))
    logits = known.skip_trigram()(ids)
    for row, found in zip(ids.tolist(), logits, strict=True):
        for i, present in enumerate(row):
            weights = [math.exp(known.SKIP_QK[present, earlier]) for earlier in row[: i + 1]]
            added = sum(w / sum(weights) * known.SKIP_OV[token] for w, token in zip(weights, row, strict=False))
            assert error(found[i], known.SKIP_DIRECT[present] + added) < 1e-12


def test_skip_trigrams_have_their_bug():
    """keep ... in mind and keep ... at bay bring keep ... in bay."""
    logits = known.skip_trigram()(torch.tensor([[known.KEEP, known.AT, known.IN], [known.AT, known.AT, known.IN]]))
    assert (logits[0, -1, [known.MIND, known.BAY]] > logits[1, -1, [known.MIND, known.BAY]] + 3).all()


def test_the_bigram_models_probabilities_are_the_counts():
    counts = normal(6, 6).square() + 0.1
    model = known.bigram(counts)
    ids = tokens(model.config)
    assert error(model(ids).softmax(-1), (counts / counts.sum(1, keepdim=True))[ids]) < 1e-12
    assert error(model(ids).exp().sum(-1), torch.ones(ids.shape, dtype=torch.float64)) < 1e-12
