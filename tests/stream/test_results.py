"""Every result of the stream: a short repr, `to_dicts()` that JSON takes, and `top(n)` with the same meaning."""

import json

import pytest
import torch

from mainstem.columns import width
from mainstem.errors import ConfigError
from mainstem.results import Item, Rows, number, plain, strongest, summary
from mainstem.stream.analysis.tuned import train_lens
from mainstem.stream.capture import capture
from mainstem.stream.change.ablate import ablation
from mainstem.stream.change.patch import patch, patch_grid
from mainstem.stream.metrics import TokenLogit
from mainstem.stream.trace import Trace
from mainstem.text.tokenizer import Bytes
from models import build, small

TEXT = "the man 강물"


def model():
    return build(small(vocab_size=257, n_ctx=16))


def trace():
    return capture(model(), TEXT, tokenizer=Bytes())


def windows(step):
    return torch.randint(257, (2, 8), generator=torch.Generator().manual_seed(step))


PATCH = {"clean": "abc", "corrupt": "abd", "metric": TokenLogit("a"), "tokenizer": Bytes()}
RESULTS = {
    "terms": lambda: trace().decompose(),
    "a position's terms": lambda: trace().decompose(by="neuron", pos=2),
    "attribution": lambda: trace().attribution("a", "b"),
    "effects": lambda: ablation(model(), TEXT, TokenLogit("a"), tokenizer=Bytes()),
    "patched": lambda: patch(model(), targets="L0H1", **PATCH),
    "grid": lambda: patch_grid(model(), **PATCH),
    "grid of heads": lambda: patch_grid(model(), what="q", **PATCH),
    "lens": lambda: trace().lens("a"),
    "erasure": lambda: trace().erasure("head"),
    "writes": lambda: trace().writes(),
    "levels": lambda: trace().levels(),
    "flow": lambda: trace().flow(1),
    "lengths of flow": lambda: trace().flow(-1, "value"),
    "token": lambda: trace().token(3, 1),
    "word": lambda: trace().word("강물", 1),
    "trace": lambda: trace(),
    "history": lambda: train_lens(model(), windows, steps=3)[1],
}


@pytest.fixture(scope="module", params=RESULTS)
def result(request):
    return RESULTS[request.param]()


def test_a_repr_is_at_most_eight_lines_of_eighty_columns(result):
    lines = repr(result).splitlines()
    assert 1 <= len(lines) <= 8
    assert max(map(width, lines)) <= 80
    assert "tensor(" not in repr(result)


def test_all_rows_are_json_and_labelled(result):
    rows = result.to_dicts()
    assert rows
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert all(isinstance(row["label"], str) for row in rows)


def test_top_is_the_n_strongest_rows_the_strongest_first(result):
    rows = result.top(10**6)
    assert [abs(row.value) for row in rows] == sorted((abs(row.value) for row in rows), reverse=True)
    assert {row.label for row in rows} <= {row["label"] for row in result.to_dicts()}
    for n in (1, 3):
        assert result.top(n) == rows[:n]
    assert len(repr(rows).splitlines()) <= 8
    with pytest.raises(ConfigError, match="n: 0 rows cannot be the strongest"):
        result.top(0)


def test_a_repr_shows_the_strongest_rows(result):
    """A list shows its first rows, and a trace what it holds altogether."""
    for row in [] if isinstance(result, Rows | Trace) else result.top(1):
        assert number(row.value) in repr(result)


def test_a_repr_says_how_a_sum_closes():
    why = trace().attribution("a")
    head, *rows, rest = repr(why).splitlines()
    assert (
        head
        == f"Terms: {len(why.labels)} rows that sum to {why.total.item():.4g}; closing error {why.closing_error:.1e}"
    )
    assert [line.split()[0] for line in rows] == [row.label for row in why.top(5)]
    assert rest == f"  ... {len(why.labels) - 5} more: top(n), to_dicts()"


def test_what_restores_nothing_has_a_repr():
    grid = patch_grid(model(), "abc", "abc", TokenLogit("a"), tokenizer=Bytes())
    assert repr(grid).endswith("there is nothing to restore")


def test_rows_rank_by_magnitude_and_leave_nan_out():
    rows = strongest(["a", "b", "c", "d"], [1.0, float("nan"), -3.0, 1.0], 3)
    assert rows == [("c", -3.0), ("a", 1.0), ("d", 1.0)]
    assert rows.to_dicts()[0] == {"label": "c", "value": -3.0}


def test_a_summary_fits_however_long_its_parts_are():
    text = summary("word " * 100, [Item("강" * 100, 1e-9), Item("b", -2.0)], 10)
    lines = text.splitlines()
    assert len(lines) == 5
    assert max(map(width, lines)) <= 80
    assert lines[2].endswith("+1.00e-09")
    assert lines[3].endswith("-2.000")
    assert repr(Rows(title="rows")) == "0 rows"


def test_plain_values_hold_no_tensor():
    value = {"a": torch.tensor([1.0]), "b": (Item("x", 1.0), [torch.tensor(2)])}
    assert plain(value) == {"a": [1.0], "b": [{"label": "x", "value": 1.0}, [2]]}
