"""Bytes become documents: exactly, in bounded pieces, with the file and the place named when they cannot."""

import io
import json
import re
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import DataError
from mainstem.text import corpus, tokenizer
from mainstem.text.corpus import BUNDLED, Counts, Source

BPE = tokenizer.train("bpe", ["the cat sat. 대한민국은 민주공화국이다. 12345 !!! \n\n  x"], 300)


def documents(source, counts=None):
    whole, parts = [], []
    for text, ends in source.pieces(counts):
        parts.append(text)
        if ends:
            whole.append("".join(parts))
            parts = []
    assert not parts
    return whole


def source_of(tmp_path, content, name="a.txt", **options):
    path = tmp_path / name
    path.write_bytes(content)
    return Source((path,), **options)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (b"a\r\nb\rc\n", {}, ["a\r\nb\rc\n"]),
        (b"a\r\nb\rc\n\r", {"newlines": "lf"}, ["a\nb\nc\n\n"]),
        ("\ufeff가\ufeff".encode(), {}, ["가\ufeff"]),
        ("\ufeff가\ufeff".encode(), {"encoding": "utf-8-sig"}, ["가\ufeff"]),
        ("대한민국".encode("cp949"), {"encoding": "cp949"}, ["대한민국"]),
        ("가\ufeff👍".encode("utf-16"), {"encoding": "utf-16"}, ["가\ufeff👍"]),
        ("\ufeff가".encode("utf-16-be"), {"encoding": "utf-16-be"}, ["가"]),
        (b"a<|b<|>c<|>", {"separator": "<|>"}, ["a<|b", "c"]),
        (b"a<|><|>\n", {"separator": "<|>"}, ["a", "\n"]),
        (b"a;b;;c", {"separator": ";"}, ["a", "b", "c"]),
        (b"a\r\n\r\nb", {"separator": "\n\n", "newlines": "lf"}, ["a", "b"]),
        (b"", {}, []),
        (b" \n", {}, [" \n"]),
    ],
)
def test_bytes_become_documents_whatever_the_block(content, options, expected, block, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", max(block, 2) if "16" in options.get("encoding", "") else block)
    assert documents(source_of(tmp_path, content, **options)) == expected


def test_what_was_met_is_counted(tmp_path):
    counts = Counts()
    documents(source_of(tmp_path, b"\xef\xbb\xbfa\r\nb\rc\n;;d;", separator=";"), counts)
    assert counts == Counts(bytes=14, documents=2, skipped_empty=1, boms=1, crlf=1, lone_cr=1)


@pytest.mark.parametrize(
    ("content", "encoding", "said"),
    [
        (b"abc\xff", "utf-8", r"a\.txt: byte 3 \(0xff\) is not utf-8 .*`encoding` cp949.*utf-16"),
        ("가나".encode("cp949"), "utf-8", r"byte 0 "),
        (b"x" * 3_000_000 + b"\xea\xb0", "utf-8", r"byte 3000000 \(0xea\)"),
        (b"a" * 2_000_001 + b"\xff\xff", "cp949", r"byte 2000001 \(0xff\) is not cp949 .*`encoding` utf-8"),
        (b"a\0b\0", "utf-16", "`encoding` utf-16-le"),
        (b"\xff\xfea", "utf-16", "byte 2 "),
    ],
)
def test_a_byte_that_cannot_be_decoded_is_placed(content, encoding, said, tmp_path):
    with pytest.raises(DataError, match=said):
        documents(source_of(tmp_path, content, encoding=encoding))


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_jsonl_is_a_document_a_record(line_end, tmp_path):
    rows = ['\ufeff{"text": "a\\r\\nb", "n": 1}', "", '{"text": ""}', '{"text": "가"}']
    counts = Counts()
    assert documents(source_of(tmp_path, line_end.join(rows).encode(), "a.JSONL"), counts) == ["a\r\nb", "가"]
    assert (counts.documents, counts.skipped_empty, counts.boms, counts.crlf, counts.lone_cr) == (2, 1, 1, 1, 0)


def test_jsonl_takes_another_field_and_other_line_ends(tmp_path):
    source = source_of(tmp_path, b'{"body": "a\\r\\nb"}\n', "a.jsonl", text_field="body", newlines="lf")
    assert documents(source) == ["a\nb"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 3: not JSON"),
        (b'{"body": "x"}', r"line 3: no field 'text' \(fields: 'body'\)"),
        (b'["text"]', "line 3: no field 'text'"),
        (b'{"text": 5}', "line 3: field 'text' is int"),
        (b'{"text": "\\ud800"}', "line 3: .*UTF-16"),
    ],
)
def test_a_bad_record_is_placed(line, said, tmp_path):
    with pytest.raises(DataError, match=rf"a\.jsonl, {said}"):
        documents(source_of(tmp_path, b'{"text": "a"}\n\n' + line + b"\n", "a.jsonl"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"paths": ()}, "no text: name a file"),
        ({"encoding": "utf-99"}, "utf-99"),
        ({"encoding": "hex"}, "hex"),
        ({"newlines": "crlf"}, "newlines"),
        ({"separator": ""}, "separator"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(DataError, match=said):
        Source(**{"paths": ("a",)} | options)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt: no such file.*shakespeare"):
        documents(Source((tmp_path / "none.txt",)))
    with pytest.raises(DataError, match="a folder; name the files"):
        documents(Source((tmp_path,)))


def test_standard_input_can_be_read_twice(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("가\r\n".encode())))
    source = Source(("-",))
    assert source.fingerprints()[0]["bytes"] == 5
    assert documents(source) == documents(source) == ["가\r\n"]


def test_several_files_keep_their_order(tmp_path):
    (tmp_path / "b").write_bytes(b"1")
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf2")
    source = Source((str(tmp_path / "b"), tmp_path / "a"))
    assert documents(source) == ["1", "2"]
    assert [row["name"] for row in source.fingerprints()] == ["b", "a"]
    assert source.fingerprints()[0]["sha256"] == "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"


WORDS = ["cat", "다", " ", "  ", "\n", "\r\n", "!!", "_", "12345", "'s", "\t", "\x1c", "\x85", "\u3000", "é", "x" * 40]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)


@given(TEXTS, st.integers(1, 60))
def test_a_boundary_is_one_for_the_tokenizer_too(text, end):
    if found := corpus.LAST_BOUNDARY.match(text, 0, end):
        assert BPE.encode(text[: found.end()]) + BPE.encode(text[found.end() :]) == BPE.encode(text)


def cut(texts, size, run):
    counts, limits = Counts(), (corpus.PIECE_CHARACTERS, corpus.RUN_CHARACTERS)
    corpus.PIECE_CHARACTERS, corpus.RUN_CHARACTERS = size, run
    try:
        return list(corpus._cut(texts, counts)), counts
    finally:
        corpus.PIECE_CHARACTERS, corpus.RUN_CHARACTERS = limits


@given(st.lists(TEXTS, max_size=5), st.integers(8, 40), st.integers(0, 60))
def test_pieces_are_bounded_and_lose_nothing(texts, size, more):
    pieces, counts = cut([corpus.Piece(text, True) for text in texts], size, size + more)
    assert "".join(piece.text for piece in pieces) == "".join(texts)
    assert all(0 < len(piece.text) <= size + more for piece in pieces)
    long = [piece.text for piece in pieces if len(piece.text) > size]
    assert not any(corpus.LAST_BOUNDARY.match(text, 0, size) for text in long)
    assert counts.documents == sum(piece.ends_document for piece in pieces) == sum(map(bool, texts))


@given(TEXTS, st.integers(8, 40), st.integers(0, 60), st.integers(1, 30))
def test_shorter_pieces_and_other_parts_make_the_same_tokens(text, size, more, part):
    """An unbroken run is cut where it was, however it came."""

    def ids(parts, size):
        pieces, _ = cut([*(corpus.Piece(each, False) for each in parts), corpus.Piece("", True)], size, size + more)
        return [i for piece in pieces for i in BPE.encode(piece.text)]

    run = size + more
    pieces, _ = cut([corpus.Piece(text, True)], run, run)
    parts = [text[start : start + part] for start in range(0, len(text), part)]
    assert ids(parts, size) == [i for piece in pieces for i in BPE.encode(piece.text)]


def test_memory_does_not_grow_with_the_file(tmp_path):
    line = json.dumps({"text": "가나다라 " * 50}) + "\n"
    path = tmp_path / "a.jsonl"
    path.write_text(line * (24_000_000 // len(line)), "utf-8")
    tracemalloc.start()
    try:
        for _ in Source((path,)).pieces():
            pass
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["x" * 3_000_000, " " * 3_000_000, "\n" * 3_000_000])
def test_an_unbroken_run_is_cut_too(text, tmp_path):
    pieces = list(source_of(tmp_path, text.encode()).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text) for piece in pieces) == corpus.RUN_CHARACTERS


def test_the_bundled_plays_read_as_plays():
    plays = documents(Source(("shakespeare",)))
    assert len(plays) == 38
    assert sum(len(play.encode()) for play in plays) == 4_998_208
    assert plays[0].startswith("A Midsummer Night's Dream\n\nACT I\n\nSCENE I. Athens.")
    assert not re.search(r"[#*_\\]|[ \t]\n|\n\n\n", "".join(plays))
    romeo = next(play for play in plays if play.startswith("Romeo and Juliet"))
    assert "\n\nJULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\n" in romeo
    assert all(len(re.findall(r"\n\n[A-Z][A-Za-z ]+:\n", play)) > 300 for play in plays)


def test_the_bundled_statute_is_the_one_in_force():
    source, counts = Source(("constitution-ko",), encoding="cp949"), Counts()  # ours is UTF-8 whatever is asked
    (text,) = documents(source, counts)
    assert "대한민국은 민주공화국이다." in text
    assert (source.fingerprints()[0]["bytes"], counts.bytes, counts.crlf) == (45_859, 45_859, 356)


@pytest.mark.parametrize("name", BUNDLED)
def test_each_bundled_text_has_its_papers(name):
    row = BUNDLED[name]
    assert row.title
    assert row.description
    assert row.origin
    assert Source((name,)).licence() == row.licence
    assert Source((name,)).fingerprints()[0]["name"] == name
