"""Pairs of prompts: read with the line of every fault, and encoded only where they match position by position."""

import json

import pytest

from mainstem.errors import DataError
from mainstem.stream.pairs import EncodedPairs, Pair, encode_pairs, read_pairs
from mainstem.text import tokenizer
from mainstem.text.tokenizer import Bytes

GOOD = '{"clean": "서울은 a", "corrupt": "부산은 b", "answer": "x", "foil": 7}'
BPE = tokenizer.train("bpe", ["the cat sat on the mat and the dog sat on the cat " * 20], 290)


def written(tmp_path, content):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_pairs_are_read(tmp_path):
    lines = [
        "\ufeff" + GOOD,
        "",
        '{"answer": 3, "corrupt": "\u2028", "clean": "a"}',
        '{"clean":"","corrupt":"","answer":"","foil":null}',
    ]
    expected = [Pair("서울은 a", "부산은 b", "x", 7), Pair("a", "\u2028", 3), Pair("", "", "")]
    for line_end in ("\n", "\r\n", "\r"):
        assert read_pairs(written(tmp_path, line_end.join(lines))) == expected


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON .*one object a line"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "a list, not an object"),
        ('{"clean": "a", "corupt": "b", "answer": "x"}', "unknown field 'corupt'; did you mean 'corrupt'"),
        ('{"clean": "a", "answer": "x"}', "no field 'corrupt'; write"),
        ('{"clean": 1, "corrupt": "b", "answer": "x"}', "clean is 1; give a text"),
        ('{"clean": "a", "corrupt": "b", "answer": null}', "answer is None"),
        ('{"clean": "a", "corrupt": "b", "answer": true}', "answer is True"),
        ('{"clean": "a", "corrupt": "b", "answer": "x", "foil": 1.5}', "foil is 1.5; .* whole number"),
    ],
)
def test_a_bad_line_is_named(line, said, tmp_path):
    with pytest.raises(DataError, match=rf"pairs\.jsonl, line 3: {said}"):
        read_pairs(written(tmp_path, f"{GOOD}\r\n\n{line}\n"))


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "no pairs"), (b"\n \n", "no pairs"), (b"\xef\xbb\xbf\xff", r"byte 3 is not UTF-8")]
)
def test_a_file_without_pairs_is_refused(content, said, tmp_path):
    with pytest.raises(DataError, match=rf"pairs\.jsonl: {said}"):
        read_pairs(written(tmp_path, content))


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(DataError, match=rf"{path.name}: cannot be read"):
            read_pairs(path)


def test_pairs_are_encoded():
    pairs = [Pair("ab", "ac", "x", "y"), Pair("가", "나", 256)]
    assert encode_pairs(pairs, Bytes()) == EncodedPairs(
        clean=[[97, 98], list("가".encode())],
        corrupt=[[97, 99], list("나".encode())],
        answer=[ord("x"), 256],
        foil=[ord("y"), None],
    )


def test_a_read_pair_is_the_one_that_was_written(tmp_path):
    path = written(tmp_path, json.dumps({"clean": "the cat", "corrupt": "the dog", "answer": " sat"}))
    made = encode_pairs(read_pairs(path), BPE)
    assert [BPE.decode(row) for row in (*made.clean, *made.corrupt)] == ["the cat", "the dog"]
    assert BPE.decode(made.answer) == " sat"


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (Pair("", "a", "x"), "pair 2: clean: the prompt is empty"),
        (Pair("a", "", "x"), "pair 2: corrupt: the prompt is empty"),
        (Pair("the cat", "the zzz", "x"), "pair 2: clean has 2 tokens and corrupt 5, .* token 1 .* ' cat' and ' ' 'z'"),
        (Pair("the cat", "the", "x"), "clean has 2 tokens and corrupt 1, .* read ' cat' and nothing"),
        (Pair("a", "b", "xy"), "pair 2, answer: 'xy' is not one token"),
        (Pair("a", "b", "x", "xy"), "pair 2, foil: 'xy' is not one token"),
        (Pair("a", "b", 10**6), "pair 2, answer: token id 1000000 is outside"),
        (Pair("a\ud800", "b", "x"), "pair 2: clean: character 1 is"),
    ],
)
def test_a_pair_that_cannot_be_patched_is_named(pair, said):
    with pytest.raises(DataError, match=said):
        encode_pairs([Pair("a", "b", "x"), pair], BPE)
