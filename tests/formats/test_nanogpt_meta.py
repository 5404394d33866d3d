"""nanoGPT's meta.pkl: the ids that it says, or one message; nothing that it names is imported."""

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest

from formats import karpathy
from mainstem.errors import DataError, RunError
from mainstem.formats import nanogpt


class Canary:
    """A pickle of it makes a file where it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


TEXT = "나랏말싸미 a river\n👩 e\u0301"


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_meta_gives_the_ids_that_it_says(tmp_path, protocol):
    said = karpathy.meta(TEXT)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(said, protocol))
    tokenizer = nanogpt.read_meta(tmp_path / "meta.pkl", trust_pickle=True)
    assert tokenizer.encode(TEXT) == [said["stoi"][character] for character in TEXT]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (said["vocab_size"], None)


@pytest.mark.parametrize(
    "content",
    [
        {}, [], "words", {"stoi": {}, "itos": {}, "vocab_size": 0}, {"stoi": {"a": 0}, "itos": {0: "a"}},
        {"stoi": {"a": 0}, "itos": {0: "a"}, "vocab_size": 2}, {"stoi": {"a": 1}, "itos": {1: "a"}, "vocab_size": 1},
        {"stoi": {"ab": 0}, "itos": {0: "ab"}, "vocab_size": 1}, {"stoi": {"": 0}, "itos": {0: ""}, "vocab_size": 1},
        {"stoi": {"ab": 0, "": 1}, "itos": {0: "ab", 1: ""}, "vocab_size": 2},
        {"stoi": {"a": 0, "b": 1}, "itos": {0: "b", 1: "a"}, "vocab_size": 2},
        {"stoi": {"\ud800": 0}, "itos": {0: "\ud800"}, "vocab_size": 1},
        {"stoi": {"a": 0}, "itos": ["a"], "vocab_size": "1"},
    ],
)  # fmt: skip
def test_another_meta_is_refused(tmp_path, content):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=r"meta\.pkl: not nanoGPT's meta\.pkl"):
        nanogpt.read_meta(tmp_path / "meta.pkl", trust_pickle=True)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_meta_is_never_run(tmp_path, protocol):
    """Nor does any global enter it, harmless or not."""
    canary, file = Canary(tmp_path / "canary"), tmp_path / "meta.pkl"
    for value in (canary, OrderedDict(a=1)):
        file.write_bytes(pickle.dumps(karpathy.meta(TEXT) | {"more": value}, protocol))
        with pytest.raises(RunError, match="`trust_pickle`"):
            nanogpt.read_meta(file)
        with pytest.raises(DataError, match="not nanoGPT's"):
            nanogpt.read_meta(file, trust_pickle=True)
    whole = pickle.dumps(karpathy.meta(TEXT), protocol)
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match="not nanoGPT's"):
            nanogpt.read_meta(file, trust_pickle=True)
    assert not canary.path.exists()


def test_an_absent_meta_is_named(tmp_path):
    with pytest.raises(RunError, match=r"없는\.pkl: no such file"):
        nanogpt.read_meta(tmp_path / "없는.pkl", trust_pickle=True)
