"""Both sides encode one text; sizes, counts and ratios are those of what was asked."""

import sys

import numpy as np
import pytest

from benchmarks import data
from benchmarks.data import different, measure, repeated
from mainstem.errors import ConfigError, DataError
from mainstem.text.corpus import Source

KOREAN = Source(("constitution-ko",))


@pytest.fixture
def short(monkeypatch, in_this_process):
    """A megabyte is a hundredth of one."""
    write = data.repeated
    monkeypatch.setattr(data, "repeated", lambda source, path, size: write(source, path, size // 100))


def test_a_text_is_repeated_to_its_size(tmp_path):
    once = "".join(piece.text for piece in KOREAN.pieces())
    size = repeated(KOREAN, tmp_path / "a.txt", 100_000)
    text = (tmp_path / "a.txt").read_bytes().decode()
    assert 100_000 <= size == len(text.encode()) < 130_000
    assert text == (once * 3)[: len(text)]


def test_no_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt: no text"):
        repeated(Source((tmp_path / "empty.txt",)), tmp_path / "a.txt", 1)


def test_the_figures_are_of_one_text(short):
    progress = []
    found = measure(KOREAN, 300, 8, 1, progress=lambda done, total: progress.append((done, total)))
    assert progress == [(done, 10) for done in range(1, 11)]
    assert found["ids_that_differ"] == 0
    assert found["vocab_size"] == 300
    assert found["notes"] == ["a quarter of the text fits into the batches held at once: memory still grows"]
    seconds = found["seconds"]
    assert found["encode_over_tokenizers"] == pytest.approx(seconds["mainstem"] / seconds["tokenizers"])
    assert found["tokens_per_second"]["tokenizers"] == pytest.approx(found["text"]["tokens"] / seconds["tokenizers"])
    assert found["megabytes_per_second"]["byte"] == pytest.approx(found["text"]["bytes"] / 1e6 / seconds["byte"])
    assert found["batch_seconds"].keys() == data.SHAPES.keys()
    assert 0 < found["batch_over_step"] < 1
    small, large = found["memory"]
    assert 20_000 <= small["text_bytes"] < 80_000 <= large["text_bytes"]
    if sys.platform == "linux":
        assert found["memory_growth"] == pytest.approx(large["peak"] / small["peak"], nan_ok=True)


def test_ids_that_differ_are_counted():
    assert different(np.array([1, 2, 3]), np.array([1, 2, 3])) == 0
    assert different(np.array([1, 2, 3, 4]), np.array([1, 5, 3])) == 2


@pytest.mark.slow
def test_a_vocabulary_that_the_text_does_not_fill_is_said(short, tmp_path):
    (tmp_path / "a.txt").write_text("ab " * 9000)
    assert measure(Source((tmp_path / "a.txt",)), 4000, 1, 1)["notes"][0].endswith("of the 4,000 asked for")


@pytest.mark.parametrize(("megabytes", "rounds", "said"), [(0, 1, "megabytes: 0"), (1, 0, "rounds: 0")])
def test_less_than_one_is_refused(megabytes, rounds, said, short):
    with pytest.raises(ConfigError, match=said):
        measure(KOREAN, 300, megabytes, rounds)
