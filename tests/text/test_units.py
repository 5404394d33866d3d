"""Pieces, characters and words: every token in one unit, no character cut; and cells as wide as a terminal's."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import DataError
from mainstem.text import tokenizer, units
from mainstem.text.tokenizer import END_OF_TEXT, Bytes
from mainstem.text.units import Unit, characters, find_word, pieces, shown, single_token, words

ENGLISH = "the cat sat on the mat, and the dog sat on the cat.\n\n" * 20
KOREAN = "대한민국은 민주공화국이다.\r\n모든 권력은 국민으로부터 나온다.\n" * 20
BPE = tokenizer.train("bpe", [ENGLISH, KOREAN], 340)
END = Bytes.eot_id

SPACES = st.sampled_from([" ", "  ", "\n", "\r\n", "\t", "\u3000", "\x85"])
SIGNS = st.sampled_from(["보", "가나", "a", ".", "👩\u200d👩\u200d👧", "e\u0301", "\u1112\u1161\u11ab"])
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
TEXT = st.lists(SPACES | SIGNS | ANY, max_size=30).map("".join)


def of_bytes(*tokens):
    """A tokenizer whose first ids are these bytes; b"" is special, and the last of all is end of text."""
    made = Bytes()
    made.token_bytes = [*tokens, b""]
    made.vocab_size, made.eot_id = len(tokens) + 1, len(tokens)
    return made


STRADDLING = of_bytes(b" \xeb\xb3", b"\xb4\n", b"\xec\x84\xb8 \xeb", b"\x82\x98", b"a b")  # ` 보` + LF, `세 나`, `a b`


@st.composite
def tokenised(draw):
    """A tokenizer and ids: of a text by each kind, of a text that lacks a token, or any ids at all."""
    text = draw(TEXT)
    each = draw(st.sampled_from([BPE, Bytes(), tokenizer.train("char", [text]), STRADDLING]))
    if each is STRADDLING or draw(st.booleans()):
        return each, draw(st.lists(st.integers(0, each.vocab_size - 1), max_size=20))
    ids = each.encode(text)
    lost = draw(st.integers(0, len(ids)))
    return each, ids[:lost] + ids[lost + 1 :]


def runs(each, ids):
    """The ids between special tokens, with where each run begins."""
    run, first = [], 0
    for index, i in enumerate([*ids, None]):
        if i is None or not each.token_bytes[i]:
            if run:
                yield first, run
            run, first = [], index + 1
        else:
            run.append(i)


@given(tokenised())
def test_units_are_all_the_tokens_in_order(drawn):
    each, ids = drawn
    for split in (characters, words):
        found = split(each, ids)
        assert [0, *(unit.last for unit in found)] == [*(unit.first for unit in found), len(ids)]
        assert all(unit.first < unit.last and unit.text for unit in found)
    assert len(pieces(each, ids)) == len(ids)
    assert all(pieces(each, ids))


@given(tokenised())
def test_a_word_cuts_no_unit_of_characters(drawn):
    assert {unit.first for unit in words(*drawn)} <= {unit.first for unit in characters(*drawn)}


@given(tokenised())
def test_characters_are_the_finest_units_that_cut_none(drawn):
    """To cut elsewhere changes the decoded text, which shows each broken sequence as one U+FFFD."""
    each, ids = drawn
    starts = {unit.first for unit in characters(each, ids)}
    for first, run in runs(each, ids):
        whole = each.decode(run)
        for at in range(1, len(run)):
            assert (first + at in starts) == (each.decode(run[:at]) + each.decode(run[at:]) == whole)


@given(TEXT)
def test_a_units_text_is_the_text(text):
    for each in (BPE, Bytes(), tokenizer.train("char", [text])):
        ids = each.encode(text)
        for unit in (*characters(each, ids), *words(each, ids)):
            assert unit.text == each.decode(ids[unit.first : unit.last])


@given(TEXT)
def test_words_are_those_of_a_pattern(text):
    """Where no token holds more than one character. Elsewhere the boundaries within a token are left out."""
    expected = re.findall(r"[\r\n]+|[^\S\r\n]*\S+|[^\S\r\n]+", text)
    for each in (Bytes(), tokenizer.train("char", [text])):
        assert [unit.text for unit in words(each, each.encode(text))] == expected
    ids = BPE.encode(text)
    found, bounds = words(BPE, ids), {len("".join(expected[:n]).encode()) for n in range(len(expected) + 1)}
    lengths = [len(BPE.decode_bytes(ids[:n])) for n in range(len(ids) + 1)]
    assert {0, *(unit.last for unit in found)} == {n for n, length in enumerate(lengths) if length in bounds}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([*"보a".encode()], ["보(1/3)", "보(2/3)", "보(3/3)", "a"]),
        ([97, END, *"é".encode()], ["a", END_OF_TEXT, "é(1/2)", "é(2/2)"]),
        ([0xEB, 0xB3], ["<EB>", "<B3>"]),
        ([0xEB, END, 0xB3, 0xB4, 10], ["<EB>", END_OF_TEXT, "<B3>", "<B4>", "\n"]),
        ([], []),
    ],
)
def test_pieces_show_the_part_of_the_character(ids, expected):
    assert pieces(Bytes(), ids) == expected


def test_bytes_that_begin_a_character_stay_together():
    found = characters(Bytes(), [0xEB, 0xB3, 97, 0xB4, 0xB4, 0xED, 0xA0, 0xF0, 0x9F, 0x98])
    assert [unit.text for unit in found] == ["<EB><B3>", "a", "<B4>", "<B4>", "<ED>", "<A0>", "<F0><9F><98>"]


def test_a_piece_may_hold_an_end_and_a_start():
    each = of_bytes(b" \xeb\xb3", b"\xb4\xec\x84", b"\xb8", b"\xf0\x9f", b"")
    assert pieces(each, [0, 1, 2]) == [" 보(1/2)", "보(2/2)세(1/2)", "세(2/2)"]
    assert pieces(each, [3, 4, 5]) == ["<F0><9F>", "<|4|>", END_OF_TEXT]
    assert characters(each, [0, 1, 2, 3, 5]) == [
        Unit(" 보세", 0, 3), Unit("<F0><9F>", 3, 4), Unit(END_OF_TEXT, 4, 5)
    ]  # fmt: skip
    assert words(each, [0, 1, 2, 3, 5]) == [Unit(" 보세<F0><9F>", 0, 4), Unit(END_OF_TEXT, 4, 5)]


def test_words_take_the_space_before_them_and_line_ends_stand_alone():
    ids = [*Bytes().encode("  the cat,\r\n\n sat \n"), END, END, 97, 32]
    expected = ["  the", " cat,", "\r\n\n", " sat", " ", "\n", END_OF_TEXT, END_OF_TEXT, "a", " "]
    assert [unit.text for unit in words(Bytes(), ids)] == expected


def test_words_that_share_a_token_are_one():
    each = of_bytes(b"a", b"b c", b" d", b"e\n")
    assert words(each, [0, 1, 2, 3, 0]) == [Unit("ab c", 0, 2), Unit(" de\n", 2, 4), Unit("a", 4, 5)]


def test_a_word_is_found_where_it_occurs_last():
    assert find_word(Bytes(), Bytes().encode("cat and cat."), "cat") == Unit("cat", 8, 11)
    ids = BPE.encode("모든 권력은 국민으로부터")
    found = find_word(BPE, ids, "국민")
    assert "국민" in found.text
    assert found.text == BPE.decode(ids[found.first : found.last])


@given(TEXT, st.data())
def test_any_part_of_a_text_is_found_and_no_less(text, data):
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    if start == end:
        return
    for each in (BPE, Bytes()):
        ids = each.encode(text)
        unit = find_word(each, ids, text[start:end])
        assert text[start:end] in unit.text
        assert unit.text == each.decode(ids[unit.first : unit.last])
        before = characters(each, ids)
        first = next(i for i, c in enumerate(before) if c.first == unit.first)
        last = next(i for i, c in enumerate(before) if c.last == unit.last)
        assert text[start:end] not in "".join(c.text for c in before[first + 1 : last + 1])
        assert text[start:end] not in "".join(c.text for c in before[first:last])


def test_a_found_word_cuts_no_character():
    each = of_bytes(b"a \xeb\xb3", b"\xb4\xec\x84", b"\xb8")
    assert find_word(each, [0, 1, 2], "a") == Unit("a 보세", 0, 3)


@pytest.mark.parametrize(
    ("text", "word", "said"),
    [
        ("the cat sat", "cot", "'cot' is not in the text; did you mean 'cat'"),
        ("the cat", "강물", "valid: cat, the"),
        (" \n", "x", "it has no words"),
        ("the cat", "", "is empty"),
    ],
)
def test_an_absent_word_is_answered_with_the_nearest(text, word, said):
    with pytest.raises(DataError, match=said):
        find_word(Bytes(), Bytes().encode(text), word)


def test_what_only_the_notation_says_is_not_found():
    for word in ("EB", "end", "1/3"):
        with pytest.raises(DataError, match="is not in the text"):
            find_word(Bytes(), [*"보".encode(), END, 0xEB], word)


def test_a_message_lists_few_words():
    text = " ".join(f"word{i}" for i in range(500))
    with pytest.raises(DataError) as caught:
        find_word(Bytes(), Bytes().encode(text), "강물")
    assert str(caught.value).count("word") == units.SUGGESTIONS


def test_one_token_is_its_id():
    assert single_token(BPE, " the") == BPE.encode(" the")[0]
    assert single_token(BPE, 7) == 7
    assert single_token(BPE, BPE.eot_id) == BPE.eot_id


@pytest.mark.parametrize(
    ("each", "text", "said"),
    [
        (
            BPE,
            " thezz",
            r"' thezz' is not one token but 3: ' the' \(id:\d+\), 'z' .*, 'z' .*; give one of these, or its id",
        ),
        (Bytes(), "보", r"3: '보\(1/3\)' \(id:235\), '보\(2/3\)' \(id:179\), '보\(3/3\)' \(id:180\); give one"),
        (Bytes(), " a", r"2: ' ' \(id:32\), 'a' \(id:97\); 'a' is one token"),
        (Bytes(), "  ", r"2: ' ' \(id:32\), ' ' \(id:32\); ' ' is one token"),
        (tokenizer.train("char", ["ab"]), "ab", "2: 'a' .*, 'b' .*; give one of"),
        (BPE, END_OF_TEXT, "is not one token"),
        (Bytes(), "", "empty"),
        (Bytes(), 257, r"257 is outside .* 0\.\.256"),
        (Bytes(), -1, "-1 is outside"),
        (tokenizer.train("char", ["ab"]), "z", "not in this tokenizer's alphabet"),
    ],
)
def test_what_is_not_one_token_is_shown_with_a_hint(each, text, said):
    with pytest.raises(DataError, match=said):
        single_token(each, text)


def test_a_leading_space_is_proposed():
    spaced = tokenizer.train("bpe", ["x ca cb cat cat"], 260)
    with pytest.raises(DataError, match=r"'cat' is not one token but 3: 'c' .*; ' cat' is one token"):
        single_token(spaced, "cat")


@pytest.mark.parametrize("split", [pieces, characters, words])
def test_an_id_out_of_range_is_named(split):
    with pytest.raises(DataError, match=r"257 is outside"):
        split(Bytes(), [1, 257])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" the", "␣the"),
        ("a b ", "a b␣"),
        ("   ", "␣␣␣"),
        (" \n", r"␣\n"),
        ("\r\n\t", r"\r\n\t"),
        ("\\n", r"\\n"),
        ("\x00\x1b[31m", r"\x00\x1b[31m"),
        ("\u3000보\xa0", r"\u3000보\xa0"),
        ("👩\u200d👧", r"👩\u200d👧"),
        ("\u202eabc", r"\u202eabc"),
        ("\u0301e\u0301", "◌\u0301e\u0301"),
        ("", ""),
    ],
)
def test_nothing_in_a_cell_is_invisible(text, expected):
    assert shown(text) == expected


@given(TEXT.filter(lambda text: not set("␣◌") & set(text)))
def test_a_cell_is_one_line_that_says_which_text_it_is(text):
    cell = shown(text)
    assert cell.isprintable()
    assert cell == cell.strip()
    escaped = cell.replace("␣", " ").removeprefix("◌")
    assert escaped.encode("ascii", "backslashreplace").decode("unicode_escape") == text
