"""Tokens as people read them: pieces, characters and words as ranges of tokens.

A character is a code point. A special token stands alone, under its name, and ends the text before it. Bytes that never
become a character are shown in hex, `<EB>`, and those that begin one stay together (the Unicode Standard, section 3.9,
"maximal subparts", as Python's decoder replaces them).
"""

import difflib
import re
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from mainstem.columns import width
from mainstem.errors import DataError, nearest
from mainstem.text.tokenizer import Tokenizer

HALF_PAIR = "\ud800"  # stands for what is no character; no text can hold it
SAME_WORD = {("word", "word"), ("space", "space"), ("space", "word"), ("line end", "line end")}  # neighbours' kinds
SUGGESTIONS = 12  # words that a message lists at most


class Unit(NamedTuple):
    """The tokens from `first` up to, not including, `last`, counted from the first id given, and what they say."""

    text: str
    first: int
    last: int


class _Character(NamedTuple):
    """One character, special token or broken sequence, and the tokens that hold its bytes."""

    kind: str  # "text", "special" or "broken"
    text: str
    first: int
    last: int
    parts: list[str]  # what each of its tokens shows of it


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """One readable string a token.

    That is its text, or the name of a special token. Where a token holds only a part of a character, the part is shown
    as 보(1/2): the first of the two tokens that hold the bytes of 보. A byte that never becomes a character is shown as
    <EB>. DataError for an id out of range.
    """
    found: list[str] = []
    for character in _read(tokenizer, ids):
        found += [""] * (character.last - len(found))
        for index, part in enumerate(character.parts, start=character.first):
            found[index] += part
    return found


def characters(tokenizer: Tokenizer, ids: Iterable[int]) -> list[Unit]:
    """The finest units that cut no character; together they are all the tokens, in order.

    The tokens of one syllable are grouped, and a token that holds the end of one and the start of another joins both.
    A token of many characters is one unit. DataError for an id out of range.
    """
    return _units([character] for character in _read(tokenizer, ids))


def words(tokenizer: Tokenizer, ids: Iterable[int]) -> list[Unit]:
    """Units by white space; together they are all the tokens, in order.

    White space belongs to the word after it and punctuation to the word that it touches. Runs of line ends and special
    tokens are units of their own. Words that share a token are one unit. DataError for an id out of range.
    """
    groups: list[list[_Character]] = []
    before = ""
    for character in _read(tokenizer, ids):
        kind = _word_kind(character)
        if (before, kind) in SAME_WORD:
            groups[-1].append(character)
        else:
            groups.append([character])
        before = kind
    return _units(groups)


def find_word(tokenizer: Tokenizer, ids: Iterable[int], word: str) -> Unit:
    """The smallest run of `characters` units that holds the last occurrence of `word`, which may be any string.

    DataError with the nearest word of the text where it does not occur.
    """
    if not word:
        raise DataError("the word to find is empty; give at least one character of the text")
    ids = list(ids)
    read = _read(tokenizer, ids)
    start = "".join(c.text if c.kind == "text" else HALF_PAIR for c in read).rfind(word)
    if start < 0:
        there = {unit.text.strip() for unit in words(tokenizer, ids)} - {""}
        close = difflib.get_close_matches(word, sorted(there), n=SUGGESTIONS, cutoff=0)
        raise DataError(f"{word!r} is not in the text; {nearest(word, close) if close else 'it has no words'}")
    first, last = read[start].first, read[start + len(word) - 1].last
    units = [unit for unit in _units([c] for c in read) if unit.first < last and unit.last > first]
    return Unit("".join(unit.text for unit in units), units[0].first, units[-1].last)


def single_token(tokenizer: Tokenizer, text: str | int) -> int:
    """The id of a text that is one token; an int is an id already.

    DataError for an id out of range, and for a text of no token or several: it shows them with their ids, which the
    command line takes as `id:198`, and whether the text with or without a leading space would be one.
    """
    if isinstance(text, int):
        tokenizer.decode_bytes([text])  # raises where there is no such id
        return text
    if not text:
        raise DataError("the text is empty, and one token is needed; give its text, or its id as a number")
    ids = tokenizer.encode(text)
    if len(ids) == 1:
        return ids[0]
    bare = text.lstrip(" ")
    variants = [v for v in (f" {bare}", bare) if v and v != text and not tokenizer.unknown(v)]
    hint = "give one of these, or its id"
    for variant in variants:
        if len(tokenizer.encode(variant)) == 1:
            hint = f"{variant!r} is one token"
            break
    split = ", ".join(f"{piece!r} (id:{i})" for piece, i in zip(pieces(tokenizer, ids), ids, strict=True))
    raise DataError(f"{text!r} is not one token but {len(ids)}: {split}; {hint}")


def shown(text: str) -> str:
    r"""The text as one cell of a table, nothing in it invisible.

    A space at either end is `␣`. A backslash, a line end, a tab, and whatever else cannot be printed (control
    characters, joiners, spaces of other kinds) are escaped as Python does, `\n`. A combining mark at the start sits on
    `◌`, or it would sit on the neighbouring cell.
    """
    escaped = "".join(c if c.isprintable() and c != "\\" else repr(c)[1:-1] for c in text)
    visible = re.sub("^ +| +$", lambda spaces: "␣" * len(spaces[0]), escaped)
    return f"◌{visible}" if visible and width(visible[0]) == 0 else visible


def _word_kind(character: _Character) -> str:
    if character.kind == "special":
        return "special"
    if character.text in "\r\n":
        return "line end"
    return "space" if character.text.isspace() else "word"


def _units(groups: Iterable[list[_Character]]) -> list[Unit]:
    """A unit for each group of characters; groups that share a token become one."""
    units: list[Unit] = []
    for group in groups:
        unit = Unit("".join(character.text for character in group), group[0].first, group[-1].last)
        if units and units[-1].last > unit.first:
            before = units.pop()
            unit = Unit(before.text + unit.text, before.first, unit.last)
        units.append(unit)
    return units


def _read(tokenizer: Tokenizer, ids: Iterable[int]) -> list[_Character]:
    """Everything that the ids hold, in order; no token is left out."""
    ids = list(ids)
    tokens = [tokenizer.decode_bytes([i]) for i in ids]
    found: list[_Character] = []
    for special, run in groupby(range(len(ids)), key=lambda index: not tokens[index]):
        if special:
            for index in run:
                name = tokenizer.end_of_text if ids[index] == tokenizer.eot_id else f"<|{ids[index]}|>"
                found.append(_Character("special", name, index, index + 1, [name]))
        else:
            found += _decoded(tokens, list(run))
    return found


def _decoded(tokens: list[bytes], run: list[int]) -> Iterable[_Character]:
    """The characters and broken sequences of a run of tokens, none of them special."""
    data = b"".join(tokens[index] for index in run)
    owner = [index for index in run for _ in tokens[index]]  # of each byte
    start = 0
    while start < len(data):
        text, end = _next_character(data, start)
        first, last = owner[start], owner[end - 1] + 1
        if text:
            count = last - first
            parts = [text] if count == 1 else [f"{text}({part}/{count})" for part in range(1, count + 1)]
            yield _Character("text", text, first, last, parts)
        else:
            by_token = groupby(range(start, end), key=owner.__getitem__)
            parts = ["".join(f"<{data[at]:02X}>" for at in held) for _, held in by_token]
            yield _Character("broken", "".join(parts), first, last, parts)
        start = end


def _next_character(data: bytes, start: int) -> tuple[str, int]:
    """The character at `start` and where it ends; "" and the end of the broken bytes where there is none."""
    window = data[start : start + 4]  # no character is longer
    try:
        character = window.decode()[0]
    except UnicodeDecodeError as error:
        if error.start == 0:
            return "", start + error.end
        character = window[: error.start].decode()[0]
    return character, start + len(character.encode())
