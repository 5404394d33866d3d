"""Every tokenizer is lossless, deterministic and bounded, and never takes a user's text for a command."""

import json
import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import DataError
from mainstem.text import tokenizer
from mainstem.text.tokenizer import END_OF_TEXT, Bytes, Characters

ENGLISH = "the cat sat on the mat, and the dog sat on the cat. 1234 times!\n\n" * 20
KOREAN = "대한민국은 민주공화국이다.\r\n모든 권력은 국민으로부터 나온다.\n" * 20
ENDED = f"a {END_OF_TEXT} b"
HARD = ["", "a\r\nb\rc\n", "👩‍👩‍👧‍👦 é é", "\0\x00\x1e\u2028\x85", "\ufeffx", "가" * 100 + "\t  \n   x", ENDED]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)

BPE = tokenizer.train("bpe", [ENGLISH, KOREAN], 340)
EVERY_BYTE = [BPE, Bytes()]


@pytest.mark.parametrize("each", EVERY_BYTE, ids=lambda each: each.kind)
@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back_to_the_byte(each, text):
    ids = each.encode(text)
    assert each.decode_bytes(ids) == text.encode()
    assert each.decode(ids) == text
    assert sum(len(each.token_bytes[i]) for i in ids) == len(text.encode())  # raw bytes, not those of U+FFFD


@given(UNICODE)
def test_any_text_comes_back_to_the_byte(text):
    for each in (*EVERY_BYTE, tokenizer.train("char", [text])):
        assert each.decode_bytes(each.encode(text)) == text.encode()


@pytest.mark.parametrize("each", [*EVERY_BYTE, Characters("".join(sorted(set(ENDED))))], ids=lambda e: e.kind)
def test_end_of_text_in_a_text_stays_text(each):
    ids = each.encode(ENDED)
    assert each.eot_id == each.vocab_size - 1
    assert each.eot_id not in ids
    assert each.token_bytes[each.eot_id] == b""
    assert each.decode([*each.encode("a"), each.eot_id]) == "a"


def test_bytes_are_ids():
    assert Bytes().encode("가a\n") == [0xEA, 0xB0, 0x80, 97, 10]
    assert (Bytes().vocab_size, Bytes().eot_id) == (257, 256)


def test_a_cut_character_decodes_to_a_replacement():
    assert Bytes().decode([0xEA, 0xB0]) == "\ufffd"


def test_characters_are_sorted_and_distinct():
    each = tokenizer.train("char", ["banana", "가"])
    assert [token.decode() for token in each.token_bytes] == ["a", "b", "n", "가", ""]
    assert each.encode("nab") == [2, 0, 1]


def test_an_unknown_character_is_named():
    with pytest.raises(DataError, match=r"2 character\(s\).*'가', '나'.*bpe or byte"):
        Characters("ab").encode("ab나가")


@pytest.mark.parametrize("bad", [-1, 340, 10**9])
def test_an_id_out_of_range_is_named(bad):
    with pytest.raises(DataError, match=rf"{bad} is outside .* 0\.\.339"):
        BPE.decode([1, bad])


@pytest.mark.parametrize("each", EVERY_BYTE, ids=lambda each: each.kind)
def test_half_a_utf16_pair_is_refused(each):
    with pytest.raises(DataError, match="character 1"):
        each.encode("a\udcff")


@pytest.mark.parametrize("vocab_size", [257, 258, 300, 345])
def test_the_vocabulary_is_exact(vocab_size):
    each = tokenizer.train("bpe", [ENGLISH, KOREAN], vocab_size)
    assert (each.vocab_size, each.eot_id) == (vocab_size, vocab_size - 1)
    assert sorted(each.token_bytes[:256]) == [bytes([i]) for i in range(256)]
    assert len(set(each.token_bytes)) == vocab_size


def test_a_short_text_reaches_what_it_can():
    each = tokenizer.train("bpe", ["abab cd"], 4000)
    assert 257 < each.vocab_size < 270
    assert len(each.token_bytes) == each.vocab_size


def test_a_first_merge_is_the_most_frequent_pair():
    assert tokenizer.train("bpe", ["abab abab cd"], 258).token_bytes[256] == b"ab"


def test_wrong_requests_are_refused():
    with pytest.raises(DataError, match=r"vocab_size 256.* at least 257"):
        tokenizer.train("bpe", ["a"], 256)
    with pytest.raises(DataError, match="did you mean 'bpe'"):
        tokenizer.train("bep", ["a"])


@pytest.mark.parametrize("character", ["^", "a", " ", "\n", "1", "가"])
def test_one_long_run_is_cut_into_short_pieces(character):
    """BPE's time grows faster than a piece: a long run of one character would take minutes as one."""
    text = character * (10**5 // len(character.encode()))
    pieces = tokenizers.Tokenizer.from_str(BPE.file).pre_tokenizer.pre_tokenize_str(text)
    assert max(end - start for _, (start, end) in pieces) <= 33
    assert BPE.decode_bytes(BPE.encode(text)) == text.encode()


def test_one_long_run_trains():
    assert tokenizer.train("bpe", ["가" * 300_000, "^" * 300_000], 300).vocab_size <= 300


@pytest.mark.parametrize("each", [*EVERY_BYTE, Characters('"\\가\n\u2028')], ids=lambda each: each.kind)
def test_a_saved_file_is_the_same_tokenizer(each, tmp_path):
    each.save(tmp_path / "a.json")
    again = tokenizer.load(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert again.hash == each.hash
    assert (again.kind, again.token_bytes, again.eot_id) == (each.kind, each.token_bytes, each.eot_id)


def test_the_saved_bpe_is_a_hugging_face_file(tmp_path):
    BPE.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.get_vocab_size() == BPE.vocab_size
    assert theirs.token_to_id(END_OF_TEXT) == BPE.eot_id
    assert theirs.encode(KOREAN).ids == BPE.encode(KOREAN)
    assert theirs.decode(BPE.encode(KOREAN)) == KOREAN


def test_the_same_texts_make_the_same_file_in_any_process():
    program = (
        "from mainstem.text import tokenizer\n"
        "print(tokenizer.train('bpe', [' '.join(f'{i % 97} word{i % 31} 가{i % 13}' for i in range(4000))], 700).hash)"
    )
    hashes = set()
    for seed, threads in [("1", "1"), ("2", "2"), ("3", "4")]:
        fixed = {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run([sys.executable, "-c", program], env=os.environ | fixed, capture_output=True, check=True)
        hashes.add(ran.stdout)
    assert len(hashes) == 1


def _foreign(model, pre_tokenizer=None, special=None):
    inner = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    if special is not None:
        inner.add_special_tokens([special])
    return inner.to_str()


def test_a_byte_level_file_of_another_maker_opens(tmp_path):
    alphabet = {character: i for i, character in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    model = tokenizers.models.BPE(alphabet | {"ab": 256}, [("a", "b")])
    path = tmp_path / "tokenizer.json"
    path.write_text(_foreign(model, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), "<s>"), "utf-8")
    each = tokenizer.load(path)
    assert (each.vocab_size, each.eot_id) == (258, None)
    assert each.token_bytes[256:] == [b"ab", b""]
    assert each.decode_bytes(each.encode(KOREAN)) == KOREAN.encode()
    path.write_text(_foreign(model), "utf-8")
    with pytest.raises(DataError, match="does not split text into bytes"):
        tokenizer.load(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_foreign(tokenizers.models.BPE({"▁a": 0}, [])), "only byte-level BPE"),
        (_foreign(tokenizers.models.BPE({"a": 0}, [])), "lacks 255 of the 256 bytes"),
        (_foreign(tokenizers.models.WordPiece({"a": 0}, unk_token="a")), "WordPiece tokenizers are not supported"),
        ("", "not JSON"),
        ("[]", "not a supported tokenizer file"),
        ('{"format": "mainstem-tokenizer/9"}', "mainstem-tokenizer/9"),
        (json.dumps({"format": tokenizer.FORMAT, "kind": "char", "characters": "aa"}), "damaged alphabet"),
        (json.dumps({"format": tokenizer.FORMAT, "kind": "word"}), "'word'"),
    ],
)
def test_files_that_cannot_be_used_are_named(content, said, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(content, "utf-8")
    with pytest.raises(DataError, match=said) as caught:
        tokenizer.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda said: said["model"]["vocab"].update(ab=4 * 10**9), "token id 4,000,000,000"),
        (lambda said: said["model"]["vocab"].update(ab=0), "two tokens have the same id"),
        (lambda said: said.update(normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
    ],
)
def test_a_vocabulary_that_would_lose_text_is_refused(change, said, tmp_path):
    model = tokenizers.models.BPE(tokenizer.byte_alphabet() | {"ab": 256}, [("a", "b")])
    content = json.loads(_foreign(model, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)))
    change(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(DataError, match=said):
        tokenizer.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json"):
        tokenizer.load(tmp_path / "none.json")


def test_the_room_imports_no_torch():
    program = "import sys; from mainstem.text import tokens; sys.exit('torch' in sys.modules)"
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=os.environ | path).returncode == 0
