"""A tokenizer that leaves gives the same ids there, and GPT-2's own gives the same here."""

import json
import os
from pathlib import Path

import pytest
import theirs
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import DataError
from mainstem.formats.hf import folder as hf
from mainstem.formats.hf import tokenizer as hf_tokenizer
from mainstem.formats.run import tokenizer as tokenizer_of
from mainstem.text import tokenizer
from mainstem.text.tokenizer import END_OF_TEXT, Bytes, Characters, byte_alphabet
from models import build, few, small

KOREAN = "대한민국은 민주공화국이다.\r\n모든 권력은 국민으로부터 나온다.\n\n"
ENGLISH = "the cat sat on the mat , and the dog 's cat did n't ; 1234567 times !\n\n"
HARD = [
    "",
    "\n\n\n",
    "a\r\nb\rc\n",
    "👩‍👩‍👧‍👦 é é",
    "\0\x85 ",
    "\ufeffx",
    " \t \n\n   x",
    "가" * 40 + "12345",
    KOREAN,
    ENGLISH,
]
PIECES = st.sampled_from([*" \n\t\r'0a", "\n\n", "가", "강물이 ", "the ", "👍🏽", "é", "'re", "1234", "…", "🦙.cpp"])
TEXTS = (st.lists(PIECES, max_size=30).map("".join) | st.text(st.characters(exclude_categories=["Cs"]))).filter(
    lambda text: END_OF_TEXT not in text
)
ALPHABET = "".join(sorted(set("".join(HARD))))


BPE = theirs.by_gpt2s_pattern([ENGLISH * 9, KOREAN * 9])
OURS = {
    "bpe": tokenizer.train("bpe", [ENGLISH * 9, KOREAN * 9], 320), "gpt2's pattern": BPE, "byte": Bytes(),
    "char": Characters(ALPHABET), "char without an end": Characters(ALPHABET, end_of_text=False),
}  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """For each of ours, what opens there, and what comes back."""
    found = {}
    for name, each in OURS.items():
        folder = tmp_path_factory.mktemp("tokenizer") / "out"
        hf.write(folder, build(small(vocab_size=each.vocab_size, n_layer=0), torch.float32), each)
        found[name] = theirs.transformers.AutoTokenizer.from_pretrained(folder), hf_tokenizer.read(folder)
    return found


@few
@given(text=TEXTS)
@pytest.mark.parametrize("name", OURS)
def test_the_same_ids_there_and_text_again(opened, name, text):
    ours, (there, back) = OURS[name], opened[name]
    for each in [*HARD, text]:
        known = "".join(c for c in each if c not in ours.unknown(each))
        ids = ours.encode(known)
        assert there(known)["input_ids"] == ids == back.encode(known)
        assert there.decode(ids) == known == back.decode(ids)


@pytest.mark.parametrize("name", OURS)
def test_the_end_of_text_is_the_same_token(opened, name):
    ours, (there, back) = OURS[name], opened[name]
    assert len(there) == back.vocab_size == ours.vocab_size
    assert there.eos_token_id == there.bos_token_id == back.eot_id == ours.eot_id
    assert back.token_bytes == ours.token_bytes
    if ours.eot_id is not None:
        assert there.convert_tokens_to_ids(END_OF_TEXT) == ours.eot_id
        assert there.decode([ours.eot_id], skip_special_tokens=True) == ""
    assert there.model_max_length == small().n_ctx


@pytest.mark.parametrize("name", ["bpe", "gpt2's pattern"])
def test_a_bpe_comes_back_as_its_own_file(opened, name):
    assert opened[name][1].hash == OURS[name].hash


@pytest.mark.parametrize("name", ["char", "char without an end"])
def test_a_character_outside_the_alphabet_is_an_error_there_too(opened, name):
    with pytest.raises(Exception, match=r"\[UNK\] token"):
        opened[name][0]("a ∮ b")


def test_two_files_are_enough_and_say_the_same(tmp_path):
    hf_tokenizer.write(tmp_path, BPE, 8)
    (tmp_path / "tokenizer.json").unlink()
    back = hf_tokenizer.read(tmp_path)
    for text in HARD:
        assert back.encode(text) == BPE.encode(text)
    assert (back.eot_id, back.token_bytes) == (BPE.eot_id, BPE.token_bytes)
    assert tokenizer_of(tmp_path).token_bytes == BPE.token_bytes
    for name in ("vocab.json", "merges.txt"):
        before = (tmp_path / name).read_bytes()
        hf_tokenizer.write(tmp_path, back, 8)
        assert (tmp_path / name).read_bytes() == before


def test_only_gpt2s_pattern_has_two_files():
    assert [name for name, each in OURS.items() if hf_tokenizer.pairs(each) is not None] == ["gpt2's pattern"]
    assert hf_tokenizer.merges(OURS["byte"]) == []
    assert hf_tokenizer.merges(BPE)[0].count(" ") == 1


@pytest.fixture(scope="module")
def source():
    """Where GPT-2's own files are, and llama.cpp's vectors of them."""
    if (name := os.environ.get("MAINSTEM_GPT2_TOKENIZER")) is None:
        pytest.skip("set MAINSTEM_GPT2_TOKENIZER to a folder with encoder.json, vocab.bpe and llama.cpp's vectors")
    return Path(name)


@pytest.fixture(scope="module")
def gpt2(source, tmp_path_factory):
    """Its two files, as a folder has them."""
    return two_files(tmp_path_factory.mktemp("gpt2"), source)


def two_files(folder, source):
    for name, original in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        (folder / name).write_bytes((source / original).read_bytes())
    return folder


@pytest.fixture(scope="module")
def both(gpt2):
    there = theirs.transformers.GPT2Tokenizer.from_pretrained(gpt2)
    return hf_tokenizer.read(gpt2), there


@few
@given(text=TEXTS)
def test_gpt2s_ids_are_those_of_transformers(both, text):
    ours, there = both
    for each in [*HARD, text]:
        ids = ours.encode(each)
        assert ids == there(each)["input_ids"]
        assert ours.decode(ids) == each


def test_gpt2s_files_come_out_as_they_went_in(gpt2, both, tmp_path):
    ours, _ = both
    assert (ours.vocab_size, ours.eot_id) == (50257, 50256)
    hf_tokenizer.write(tmp_path, ours, 1024)
    assert json.loads((tmp_path / "vocab.json").read_bytes()) == json.loads((gpt2 / "vocab.json").read_bytes())
    assert (tmp_path / "merges.txt").read_bytes() == (gpt2 / "merges.txt").read_bytes()
    there = theirs.transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert there(KOREAN + ENGLISH)["input_ids"] == ours.encode(KOREAN + ENGLISH)


def test_gpt2s_vectors(source, both):
    """llama.cpp's, for its own reading of the same files."""
    ours, _ = both
    stem = source / "ggml-vocab-gpt-2.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = Path(f"{stem}.out").read_text().split("\n")
    assert len(texts) == len(ids) == 47
    for text, line in zip(texts, ids, strict=True):
        assert ours.encode(text) == [int(i) for i in line.split()], text
        assert ours.decode(ours.encode(text)) == text


def pair(folder, merges="#version: 0.2\na b\n"):
    """The two files of a small tokenizer."""
    theirs.put(folder, byte_alphabet() | {"ab": 256, END_OF_TEXT: 257}, "vocab.json")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return folder


def test_the_small_pair_is_sound(tmp_path):
    each = hf_tokenizer.read(pair(tmp_path, "a b\r\n"))  # neither a first line nor another's line ends matter
    assert each.encode("abab c") == [256, 256, 32, 99]
    theirs.put(tmp_path, {"<|pad|>": 258}, "added_tokens.json")
    assert hf_tokenizer.read(tmp_path).token_bytes[256:] == [b"ab", b"", b"<|pad|>"]
    theirs.put(tmp_path, {"pad_token": "<|pad|>"}, "special_tokens_map.json")
    assert hf_tokenizer.read(tmp_path).token_bytes[256:] == [b"ab", b"", b""]


def test_added_tokens_are_those_of_transformers(tmp_path):
    """Special only where a file says so; any other is found in a text as it is written."""
    theirs.put(pair(tmp_path), {"river": 258, "<|pad|>": 259}, "added_tokens.json")
    theirs.put(tmp_path, {"pad_token": "<|pad|>", "tokenizer_class": "GPT2Tokenizer"}, "tokenizer_config.json")
    ours, other = hf_tokenizer.read(tmp_path), theirs.transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    text = "ab river ab"
    assert ours.encode(text) == other(text).input_ids
    assert ours.decode([258, 259]) == "river"


def test_the_end_of_a_text_is_the_folders(tmp_path):
    """It is kept by our own file, and told in theirs."""
    ids = byte_alphabet() | {"ab": 256, END_OF_TEXT: 257, "<|end|>": 258}
    theirs.put(pair(tmp_path), ids, "vocab.json")
    assert hf_tokenizer.read(tmp_path).eot_id == 257
    theirs.put(tmp_path, {"eos_token": {"content": "<|end|>", "lstrip": False}}, "tokenizer_config.json")
    found = hf_tokenizer.read(tmp_path)
    assert (found.eot_id, found.token_bytes[258]) == (258, b"")
    found.save(tmp_path / "own.json")
    assert tokenizer.load(tmp_path / "own.json").eot_id == 258
    (tmp_path / "out").mkdir()
    hf_tokenizer.write(tmp_path / "out", found, 8)
    assert hf_tokenizer.read(tmp_path / "out").hash == found.hash
    assert theirs.transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 258
    theirs.put(tmp_path, {"eos_token": "</s>"}, "tokenizer_config.json")
    with pytest.raises(DataError, match="eos_token '</s>' is not in the vocabulary"):
        hf_tokenizer.read(tmp_path)


def test_settings_of_a_file_that_change_ids_do_not(tmp_path):
    """Truncation, padding; dropout and what a post-processor adds are refused."""
    said = json.loads(BPE.file)
    said["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    said["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    theirs.put(tmp_path, said, "tokenizer.json")
    for text in ("a", "강물이 바다로 흐른다"):
        assert hf_tokenizer.read(tmp_path).encode(text) == BPE.encode(text)
    single = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    after = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    for change, message in (
        ({"post_processor": after}, "post_processor that adds"),
        ({"model": json.loads(BPE.file)["model"] | {"dropout": 0.1}}, "dropout 0.1"),
    ):
        theirs.put(tmp_path, json.loads(BPE.file) | change, "tokenizer.json")
        theirs.put(tmp_path, {}, "config.json")
        with pytest.raises(DataError, match=message):
            hf_tokenizer.read(tmp_path)


def test_a_tokenizer_alone_may_add_to_texts_elsewhere(tmp_path):
    """Here it does not; and what leaves with a model does not either."""
    single = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [BPE.eot_id], "tokens": [END_OF_TEXT]}}
    after = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    theirs.put(tmp_path, json.loads(BPE.file) | {"post_processor": after, "truncation": cut}, "tokenizer.json")
    found = tokenizer_of(tmp_path)
    assert found.encode(KOREAN) == BPE.encode(KOREAN)
    (tmp_path / "out").mkdir()
    hf_tokenizer.write(tmp_path / "out", found, 8)
    theirs.put(tmp_path / "out", {}, "config.json")
    assert hf_tokenizer.read(tmp_path / "out").encode(KOREAN) == BPE.encode(KOREAN)
    assert theirs.transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(KOREAN).input_ids == BPE.encode(KOREAN)


def test_a_folder_of_a_tokenizer_alone_says_what_ends_a_text(tmp_path):
    theirs.put(pair(tmp_path), byte_alphabet() | {"ab": 256, "EOS!": 257}, "vocab.json")
    theirs.put(tmp_path, {"eos_token": "EOS!"}, "special_tokens_map.json")
    found = tokenizer_of(tmp_path)
    assert (found.eot_id, found.token_bytes[257]) == (257, b"")
    theirs.put(tmp_path, {"eos_token": "gone", "pad_token": "EOS!"}, "special_tokens_map.json")
    with pytest.raises(DataError, match=r"special_tokens_map\.json: eos_token 'gone'"):
        tokenizer_of(tmp_path)


def test_bytes_come_back_as_bytes(tmp_path):
    hf_tokenizer.write(tmp_path, Bytes(), 8)
    assert hf_tokenizer.read(tmp_path).hash == Bytes().hash == hf_tokenizer.open_file(tmp_path / "tokenizer.json").hash


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("vocab.json", None, "not found beside merges.txt; both are needed"),
        ("merges.txt", None, "not found beside vocab.json; both are needed"),
        ("vocab.json", '{"a": 0', "not readable as JSON"),
        ("vocab.json", "[]", "not a vocabulary; it should be one JSON object"),
        ("vocab.json", '{"a": 0, "b": 0}', "not a vocabulary; .* distinct ids"),
        ("vocab.json", '{"a": true}', "not a vocabulary"),
        ("vocab.json", '{"a": -1}', "not a vocabulary"),
        ("vocab.json", '{"a": 4000000000}', "not a vocabulary"),
        ("vocab.json", '{"a": 0}', r"not a supported tokenizer \(the vocabulary lacks 255 of the 256 bytes"),
        ("merges.txt", b"\xff\xfe", "not readable"),
        ("merges.txt", "#version: 0.2\na b\na b c\n", "line 3: 'a b c' is not a pair"),
        ("merges.txt", "#version: 0.2\n\na c\n", "line 3: 'a c' is not a pair of tokens of vocab.json"),
        ("merges.txt", "a b \n", "line 1: 'a b ' is not a pair"),
        ("added_tokens.json", "[1]", "not a vocabulary"),
        ("tokenizer_config.json", '{"add_prefix_space": true}', "add_prefix_space is not supported"),
        ("tokenizer_config.json", "[]", "not valid settings"),
        ("tokenizer_config.json", "{", "not readable as JSON"),
        ("tokenizer.json", "{", "not readable as JSON"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, file, harm, said):
    path = pair(tmp_path) / file
    theirs.put(tmp_path, {}, "config.json")
    if harm is None:
        path.unlink()
    elif file == "vocab.json" and harm == '{"a": 0}':
        path.write_text(harm)
        (tmp_path / "merges.txt").write_text("")
    else:
        path.write_bytes(harm if isinstance(harm, bytes) else harm.encode())
    with pytest.raises(DataError, match=rf"{file}.*{said}") as raised:
        hf_tokenizer.read(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "vocabulary",
    [
        {},
        ["a"],
        {"ab": 0},
        {"a": 1},
        {"a": 0.0},
        {"a": 0, "b": 2},
        {"\ud800": 0},
        {END_OF_TEXT: 0},
        {END_OF_TEXT: 0, "a": 1},
    ],
)
def test_characters_with_other_ids_are_refused(tmp_path, vocabulary):
    """Ids that are not the characters' places would be other characters here."""
    said = json.loads(hf_tokenizer.content(Characters("ab")))
    said["model"]["vocab"] = vocabulary
    theirs.put(tmp_path, said, "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json: not one id per character from 0 on"):
        hf_tokenizer.read(tmp_path)


def test_a_folder_without_one_has_none(tmp_path):
    assert hf_tokenizer.read(tmp_path) is None
