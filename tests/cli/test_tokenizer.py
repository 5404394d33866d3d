"""`mainstem tokenizer`: train, encode and decode, byte for byte."""

import pytest

HARD = "a <|endoftext|> b 강물\r\n\tx  y 👩‍👩‍👧 e\u0301"


@pytest.fixture(params=["bpe", "byte"])
def made(request, mainstem, text):
    result = mainstem("tokenizer", "train", text, "--out", "t.json", "--tokenizer", request.param, "--vocab-size", 300)
    assert result.code == 0
    return "t.json"


def test_encode_and_decode_are_inverse(mainstem, made):
    """Through flags, standard input, plain output and JSON."""
    encoded = mainstem("tokenizer", "encode", made, HARD, "--json").json
    assert encoded["bytes"] == len(HARD.encode())
    assert encoded["ids"] == [int(i) for i in mainstem("tokenizer", "encode", made, stdin=HARD.encode()).out.split()]
    ids = " ".join(map(str, encoded["ids"]))
    assert mainstem("tokenizer", "decode", made, *encoded["ids"], "--json").json["text"] == HARD
    assert mainstem("tokenizer", "decode", made, stdin=ids.encode()).out == HARD


def test_the_file_is_the_same_each_time(mainstem, text):
    results = [
        mainstem("tokenizer", "train", text, "--out", f"{i}.json", "--vocab-size", 300, "--json").json for i in "ab"
    ]
    assert results[0]["sha256"] == results[1]["sha256"]
    assert results[0]["vocab_size"] == 300


def test_a_vocabulary_that_is_not_reached_is_said(mainstem, tmp_path):
    (tmp_path / "short.txt").write_text("a river, a stream")
    result = mainstem("tokenizer", "train", "short.txt", "--out", "t.json", "--vocab-size", 4000)
    assert result.code == 0
    assert "note: the text filled " in result.err
    assert "of the 4,000 asked for" in result.err


def test_the_tokenizer_of_a_run_or_a_prepared_folder_is_found(mainstem, small_run):
    inside = ("", "data", "checkpoints/step-00000012", "data/tokenizer.json")
    ids = [mainstem("tokenizer", "encode", small_run / name, "the river", "--json").json["ids"] for name in inside]
    assert ids[0] == ids[1] == ids[2] == ids[3]


@pytest.mark.parametrize(
    ("argv", "stdin", "said"),
    [
        (["encode"], b"ab\xff", "standard input: byte 2 is not UTF-8"),
        (["decode"], b"1 x 2", "standard input: 'x' is not an id"),
        (["decode", "99999"], b"", "token id 99999 is outside the tokenizer's 0..256"),
        (["decode"], b"-1", "'-1' is not an id"),
    ],
)
def test_nonsense_is_placed(mainstem, text, argv, stdin, said):
    mainstem("tokenizer", "train", text, "--out", "t.json", "--tokenizer", "byte")
    result = mainstem("tokenizer", argv[0], "t.json", *argv[1:], stdin=stdin)
    assert result.code == 2
    assert said in result.err
    assert result.out == ""
