"""Batches that are encoded in threads hold the ids of the slow way, in order, and never more than a few at once."""

import threading
from collections import Counter

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import DataError
from mainstem.text import encode, tokenizer
from mainstem.text.corpus import Piece
from mainstem.text.tokenizer import Bytes, Characters

ENDED = "a<|endoftext|>b"
KNOWN = "the cat sat, 대한민국은 1948!\r\n é 👩‍👩‍👧\t"
PARTS = [*"ca 1!\n\0ß", " sat", "대한민국은 ", "ᄒ\u1161ᆫ", "e\u0301", "👩‍👩‍👧", "🇰🇷", "\r\n", "  ", "漢", ENDED]
DOCUMENTS = st.lists(st.lists(st.sampled_from(PARTS), min_size=1, max_size=12).map("".join), min_size=1, max_size=8)
TOKENIZERS = [tokenizer.train("bpe", [KNOWN * 20], 320), Characters("".join(sorted(set(KNOWN)))), Bytes()]


class Given:
    """A source of documents that are given, each in one piece."""

    def __init__(self, documents):
        self.documents = documents

    def pieces(self, counts):
        for text in self.documents:
            counts.documents += 1
            counts.bytes += len(text.encode("utf-8", "surrogatepass"))
            yield Piece(text, True)

    def names(self):
        return "given"


def slowly(each, text):
    """The ids of a text without batches, arrays or threads; what is unknown is left out."""
    if each.kind == "bpe":
        inner = library.Tokenizer.from_str(each.file)
        inner.encode_special_tokens = True
        return inner.encode(text, add_special_tokens=False).ids
    if each.kind == "byte":
        return list(text.encode())
    ids = {token.decode(): i for i, token in enumerate(each.token_bytes) if token}
    return [ids[character] for character in text if character in ids]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("encoded") / "tokens.bin"


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 1000)


@pytest.mark.parametrize("each", TOKENIZERS, ids=lambda each: each.kind)
@given(documents=DOCUMENTS, size=st.integers(1, 60))
def test_the_ids_are_those_of_the_slow_way(each, documents, size, file):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "BATCH_CHARACTERS", size)
        patch.setattr(encode, "MOST_UNKNOWN", 1)
        made = encode.encode(Given(documents), each, file, lambda read: None)
    expected = [i for text in documents for i in [*slowly(each, text), each.eot_id]]
    assert np.fromfile(file, encode.dtype(each)).tolist() == expected
    characters = sum(map(len, documents))
    unknown = sum(character not in KNOWN for text in documents for character in text) if each.kind == "char" else 0
    counted = {name: made.counts[name] for name in ("tokens", "characters", "unknown", "dropped")}
    assert counted == {"tokens": len(expected), "characters": characters, "unknown": unknown, "dropped": unknown}
    shares = np.array(list(Counter(expected).values())) / len(expected)
    assert made.entropy == pytest.approx(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize("each", TOKENIZERS, ids=lambda each: each.kind)
@given(texts=st.lists(st.sampled_from([*KNOWN, ""]), max_size=5))
def test_a_batch_is_its_rows(each, texts):
    ids, lengths = each.encode_batch(texts)
    rows = [each.encode(text) for text in texts]
    assert ids.tolist() == [i for row in rows for i in row]
    assert lengths.tolist() == [len(row) for row in rows]


class Counted(Bytes):
    """Bytes that know how many characters the source gave, and how many of them are not done with."""

    def __init__(self):
        self.given, self.done, self.most, self.lock = 0, 0, 0, threading.Lock()

    def encode_batch(self, texts):
        found = super().encode_batch(texts)
        with self.lock:
            self.most = max(self.most, self.given - self.done)
            self.done += sum(map(len, texts))
        return found


@pytest.mark.parametrize("documents", [40, 400])
def test_few_batches_are_held_however_long_the_text(documents, file, small_batches):
    each = Counted()

    def endless():
        for _ in range(documents):
            each.given += 100
            yield "a" * 100

    encode.encode(Given(endless()), each, file, lambda read: None)
    assert each.done == 100 * documents
    assert 1000 <= each.most <= (encode.AHEAD + 2) * 1000


def test_between_comes_before_each_batch_and_may_end_it(file, small_batches):
    each, reads, threads = Counted(), [], threading.active_count()

    def between(read):
        reads.append(read)
        if len(reads) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode.encode(Given("a" * 100 for _ in range(400)), each, file, between)
    assert reads == [1000, 2000, 3000, 4000]
    assert each.done <= 3000
    assert threading.active_count() == threads


def test_a_fault_in_a_thread_is_raised(file, small_batches):
    threads = threading.active_count()
    with pytest.raises(DataError, match="character 1 is a lone UTF-16 surrogate"):
        encode.encode(Given(["a" * 2000, "b\ud800", "c" * 5000]), Bytes(), file, lambda read: None)
    assert threading.active_count() == threads
