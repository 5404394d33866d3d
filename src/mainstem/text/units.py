"""Readable units of token ids: pieces, characters and words as ranges of tokens.

A character is a code point. A special token is a unit of its own, shown by its name. Invalid bytes are shown in hex,
`<EB>`; the bytes of a truncated character stay together (the Unicode Standard, section 3.9,
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

HALF_PAIR = "\ud800"  # stands for special tokens and invalid bytes; no text contains it
SAME_WORD = {("word", "word"), ("space", "space"), ("space", "word"), ("line end", "line end")}  # neighbours' kinds
SUGGESTIONS = 12  # most words that a message lists


class Unit(NamedTuple):
    """The text of the tokens from index `first` up to, not including, `last`."""

    text: str
    first: int
    last: int


class _Character(NamedTuple):
    """One character, special token or invalid byte sequence, and the tokens that hold its bytes."""

    kind: str  # "text", "special" or "broken"
    text: str
    first: int
    last: int
    parts: list[str]  # the part of the text that each token shows


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """A readable string for each token: its text, or the name of a special token.

    A token with a part of a character is shown as 보(1/2), the first of the two tokens that hold the bytes of 보. An
    invalid byte is shown as <EB>. Raises DataError for an id out of range.
    """
    strings: list[str] = []
    for character in _read(tokenizer, ids):
        strings += [""] * (character.last - len(strings))
        for index, part in enumerate(character.parts, start=character.first):
            strings[index] += part
    return strings


def characters(tokenizer: Tokenizer, ids: Iterable[int]) -> list[Unit]:
    """The smallest units that split no character; together they cover all tokens, in order.

    The tokens of one character are one unit; a token with the end of one and the start of another joins both. A
    token of many characters is one unit. Raises DataError for an id out of range.
    """
    return _units([character] for character in _read(tokenizer, ids))


def words(tokenizer: Tokenizer, ids: Iterable[int]) -> list[Unit]:
    """Words, split at white space; together they cover all tokens, in order.

    White space belongs to the next word and punctuation to the word that it touches. Runs of line ends and special
    tokens are units of their own. Words that share a token are one unit. Raises DataError for an id out of range.
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
    """The smallest run of `characters` units that contains the last occurrence of `word`, which may be any string.

    Raises DataError with the nearest word of the text if it does not occur.
    """
    if not word:
        raise DataError("the word to find is empty; give at least one character of the text")
    ids = list(ids)
    read = _read(tokenizer, ids)
    start = "".join(c.text if c.kind == "text" else HALF_PAIR for c in read).rfind(word)
    if start < 0:
        in_text = {unit.text.strip() for unit in words(tokenizer, ids)} - {""}
        close = difflib.get_close_matches(word, sorted(in_text), n=SUGGESTIONS, cutoff=0)
        raise DataError(f"{word!r} is not in the text; {nearest(word, close) if close else 'it has no words'}")
    first, last = read[start].first, read[start + len(word) - 1].last
    units = [unit for unit in _units([c] for c in read) if unit.first < last and unit.last > first]
    return Unit("".join(unit.text for unit in units), units[0].first, units[-1].last)


def single_token(tokenizer: Tokenizer, text: str | int) -> int:
    """The id of a text that is one token; an int is returned as the id.

    Raises DataError for an id out of range and for a text that is not one token. The message lists the tokens with
    their ids, as the command line takes them (`id:198`), and says whether the text is one token with or without a
    leading space.
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
    r"""The text as a table cell in which every character is visible.

    A space at either end is `␣`. Backslashes, line ends, tabs and other unprintable characters are escaped as in
    Python, `\n`. A combining mark at the start is placed on `◌`.
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
    """The characters, special tokens and invalid byte sequences of the ids, in order."""
    ids = list(ids)
    tokens = [tokenizer.decode_bytes([i]) for i in ids]
    read: list[_Character] = []
    for special, run in groupby(range(len(ids)), key=lambda index: not tokens[index]):
        if special:
            for index in run:
                name = tokenizer.end_of_text if ids[index] == tokenizer.eot_id else f"<|{ids[index]}|>"
                read.append(_Character("special", name, index, index + 1, [name]))
        else:
            read += _decoded(tokens, list(run))
    return read


def _decoded(tokens: list[bytes], run: list[int]) -> Iterable[_Character]:
    """The characters and invalid byte sequences of a run of tokens, none of them special."""
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
            parts = ["".join(f"<{data[at]:02X}>" for at in offsets) for _, offsets in by_token]
            yield _Character("broken", "".join(parts), first, last, parts)
        start = end


def _next_character(data: bytes, start: int) -> tuple[str, int]:
    """The character at `start` and where it ends; "" and the end of the invalid bytes where there is none."""
    window = data[start : start + 4]  # no character is longer
    try:
        character = window.decode()[0]
    except UnicodeDecodeError as error:
        if error.start == 0:
            return "", start + error.end
        character = window[: error.start].decode()[0]
    return character, start + len(character.encode())
