"""Every result of the circuits: a short repr, `to_dicts()` that JSON takes, and `top(n)` with the same meaning."""

import json

import pytest
import torch

from known import skip_trigram
from mainstem.circuits.bigrams import bigrams
from mainstem.circuits.composition import composition
from mainstem.circuits.contexts import head_contexts, neuron_contexts
from mainstem.circuits.heads import KINDS, head_scores
from mainstem.circuits.overlap import overlap
from mainstem.circuits.skip_trigrams import skip_trigrams
from mainstem.circuits.spectra import spectra
from mainstem.circuits.virtual import virtual
from mainstem.errors import ConfigError
from mainstem.results import Rows
from mainstem.training.evaluate import Evaluation
from models import build, small, tokens

MODEL = build(small())
RESULTS = {
    "bigrams": lambda: bigrams(MODEL),
    "composition": lambda: composition(MODEL),
    "contexts of a head": lambda: head_contexts(MODEL, [tokens(MODEL.config)], 1, 0),
    "contexts of a neuron": lambda: neuron_contexts(MODEL, [tokens(MODEL.config)], 1, 0),
    "heads": lambda: head_scores(MODEL),
    "overlap": lambda: overlap(MODEL),
    "skip-trigrams": lambda: skip_trigrams(skip_trigram(), top=20),
    "spectra": lambda: spectra(MODEL),
    "virtual weights": lambda: virtual(MODEL, "0_mlp_out", "1_mlp_in"),
}


@pytest.fixture(scope="module", params=RESULTS)
def result(request):
    return RESULTS[request.param]()


def test_a_repr_is_at_most_eight_lines_of_eighty_columns(result):
    lines = repr(result).splitlines()
    assert 1 <= len(lines) <= 8
    assert max(map(len, lines)) <= 80
    assert "tensor(" not in repr(result)


def test_all_rows_are_json_and_labelled(result):
    rows = result.to_dicts()
    assert rows
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert all(isinstance(row["label"], str) for row in rows)


def test_top_is_the_n_strongest_rows_the_strongest_first(result):
    rows = result.top(50)
    by_size = isinstance(result, Rows) or rows.title.startswith("entries")
    sizes = [abs(row.value) if by_size else row.value for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert {row.label for row in rows} <= {row["label"] for row in result.to_dicts()}
    assert result.top(3) == rows[:3]
    assert len(rows) > 3
    with pytest.raises(ConfigError, match="at least 1"):
        result.top(0)


def test_heads_are_ranked_by_the_kind_that_is_asked_for():
    scores = head_scores(MODEL)
    for kind in KINDS:
        best = scores.top(1, kind)[0]
        assert best.value == max(row[kind] for row in scores.to_dicts()) == scores[kind].max()
    assert scores.top(2) == scores.top(2, "induction")


def test_where_a_head_is_at_one_end_the_rows_are_directions():
    weights = virtual(MODEL, "L0H0", "L1H1.K")
    rows = weights.to_dicts(2)
    assert [row["label"] for row in rows] == ["direction 1+", "direction 1-", "direction 2+", "direction 2-"]
    assert rows[0]["value"] == pytest.approx(weights.matrix.singular_values()[0].item())
    assert "score" in repr(weights)
    with pytest.raises(ConfigError, match="use `directions"):
        weights.top(1)


def test_an_evaluation_is_one_line_and_four_numbers():
    result = Evaluation(3.2109, 2.2651, 1234, 5678)
    assert repr(result) == "Evaluation: 3.2109 nats per token, 2.2651 bits per byte; 1,234 tokens, 5,678 bytes"
    assert result.to_dicts() == [{"loss": 3.2109, "bits_per_byte": 2.2651, "tokens": 1234, "bytes": 5678}]


def test_a_head_without_a_score_is_not_ranked():
    model = build(small("deepnorm"))
    assert spectra(model).copying.isnan().all()
    assert spectra(model).top() == []
    assert "copying" in repr(spectra(model))
    assert torch.isfinite(spectra(MODEL).copying).all()
