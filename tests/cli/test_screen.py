"""Tables: aligned by a terminal's columns, whole elsewhere, and wrapped to the width of a terminal."""

import sys

import pytest

from mainstem.cli.parts.screen import Screen
from mainstem.columns import width

ROWS = [
    ("보세요", 1.5, "고양이가 창밖을 보았다 그리고 다시 보았다"),
    ("e\u0301", -12345, "the cat looked out of the window"),
]


def table(capsys):
    Screen().table(("word", "n", "text"), ROWS)
    return capsys.readouterr().out.splitlines()


def test_columns_align_whatever_the_script(capsys):
    lines = table(capsys)
    assert lines[0] == "  word          n  text"
    starts = {width(line[: line.index(text)]) for line, (_, _, text) in zip(lines[1:], ROWS, strict=True)}
    assert starts == {width("  보세요  -12,345  ")}


def test_a_table_that_is_read_by_a_program_is_not_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert len(table(capsys)) == 3


@pytest.mark.parametrize("columns", [30, 40])
def test_a_terminal_wraps_words_and_keeps_numbers(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = table(capsys)
    assert len(lines) > 3
    assert max(map(width, lines)) <= columns
    assert any("-12,345" in line for line in lines)
