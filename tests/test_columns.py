"""Widths are a terminal's; cutting and padding go by columns."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.columns import clip, pad, tail, width
from mainstem.text.units import shown

SPACES = st.sampled_from([" ", "  ", "\n", "\r\n", "\t", "\u3000", "\x85"])
SIGNS = st.sampled_from(["보", "가나", "a", ".", "👩\u200d👩\u200d👧", "e\u0301", "\u1112\u1161\u11ab"])
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
TEXT = st.lists(SPACES | SIGNS | ANY, max_size=30).map("".join)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("abc", 3), ("보세", 4), ("ｱ", 1), ("Ａ", 2), ("e\u0301", 1), ("👩", 2), ("👩\u200d👧", 2), ("…", 1), ("␣", 1),
        (unicodedata.normalize("NFD", "한글"), 4), ("", 0),
    ],
)  # fmt: skip
def test_widths_are_a_terminals(text, columns):
    assert width(text) == columns


@given(TEXT.map(shown), st.integers(1, 12))
def test_cells_are_as_wide_as_asked(text, columns):
    cut = clip(text, columns)
    assert columns - 1 <= width(cut) <= columns or cut == text
    assert width(pad(cut, columns)) == columns
    assert cut == text or text.startswith(cut.removesuffix("…"))


@given(TEXT.map(shown), st.integers(1, 12))
def test_a_tail_is_the_end_of_the_text_in_so_many_columns(text, columns):
    cut = tail(text, columns)
    assert width(cut) <= columns or cut == text
    assert cut == text or (cut.startswith("…") and text.endswith(cut[1:]))


def test_a_tail_is_cut_by_columns_before_a_letter():
    assert tail("가나다", 4) == "…다"
    assert tail("가나다", 5) == "…나다"
    assert tail("xe\u0301a", 2) == "…a"
    assert tail("abc", 3) == "abc"


def test_cutting_keeps_a_mark_with_its_letter():
    assert clip("e\u0301e\u0301e\u0301", 2) == "e\u0301…"
    assert clip("가나다", 4) == "가…"
    assert clip("가나", 4) == "가나"
    assert pad("가", 4) + "|" == "가  |"
    assert pad("가나", 3) == "가나"
