"""Pairs of prompts for patching: a clean one, a corrupt one of as many tokens, and the answer that tells them apart."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from mainstem.errors import DataError, nearest
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.units import pieces, single_token

EXAMPLE = '{"clean": "...", "corrupt": "...", "answer": " Paris", "foil": " Rome"}'
PIECES_SHOWN = 4  # from the first token in which two prompts of unequal length differ


@dataclass(frozen=True)
class Pair:
    """Two prompts that differ in what is to be traced, and what follows them."""

    clean: str
    corrupt: str
    answer: str | int
    """What follows `clean`: the text of one token, or its id."""
    foil: str | int | None = None
    """What follows `corrupt`, likewise, if the answer is to be weighed against it."""


@dataclass(frozen=True)
class EncodedPairs:
    """Pairs as ids: four lists of one length. `clean[i]` and `corrupt[i]` have as many tokens as each other."""

    clean: list[list[int]]
    corrupt: list[list[int]]
    answer: list[int]
    foil: list[int | None]


def read_pairs(path: Path | str) -> list[Pair]:
    """The pairs of a JSONL file in UTF-8, one object a line with the fields of `Pair`. Empty lines are skipped.

    DataError names the file, the line and the fix; so it does for a file that holds no pair.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a .jsonl file, a line {EXAMPLE}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8 ({error.reason}); save the file as UTF-8") from None
    lines = enumerate(re.split(r"\r\n?|\n", text), start=1)  # not splitlines, for U+2028 may stand inside JSON
    pairs = [_pair(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not pairs:
        raise DataError(f"{path}: no pairs; write one a line, such as {EXAMPLE}")
    return pairs


def encode_pairs(pairs: Iterable[Pair], tokenizer: Tokenizer) -> EncodedPairs:
    """The pairs as ids. DataError names the pair, counted from 1, and its field.

    Neither prompt may be empty, and both have the same number of tokens, for patching goes position by position.
    Answer and foil are one token each.
    """
    encoded = EncodedPairs([], [], [], [])
    for number, pair in enumerate(pairs, start=1):
        with _named(f"pair {number}"):
            clean, corrupt = encode_prompts(pair.clean, pair.corrupt, tokenizer)
        encoded.clean.append(clean)
        encoded.corrupt.append(corrupt)
        with _named(f"pair {number}, answer"):
            encoded.answer.append(single_token(tokenizer, pair.answer))
        with _named(f"pair {number}, foil"):
            encoded.foil.append(None if pair.foil is None else single_token(tokenizer, pair.foil))
    return encoded


def encode_prompts(clean: str, corrupt: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Two prompts as ids. DataError where one is empty or they differ in length; it shows where they part."""
    ids, others = (_prompt(tokenizer, text, where) for text, where in ((clean, "clean"), (corrupt, "corrupt")))
    if len(ids) != len(others):
        raise DataError(difference(tokenizer, ids, others))
    return ids, others


def _pair(line: str, where: str) -> Pair:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); write one object a line, such as {EXAMPLE}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a {type(record).__name__}, not an object; write {EXAMPLE}")
    valid = [field.name for field in fields(Pair)]
    for name in record:
        if name not in valid:
            raise DataError(f"{where}: unknown field {name!r}; {nearest(name, valid)}")
    for name in ("clean", "corrupt", "answer"):
        if name not in record:
            raise DataError(f"{where}: no field {name!r}; write {EXAMPLE}")
    for name in ("clean", "corrupt"):
        if not isinstance(record[name], str):
            raise DataError(f"{where}: {name} is {record[name]!r}; give a text in quotes")
    for name in ("answer", "foil"):
        value = record.get(name)
        if type(value) not in (str, int) and not (name == "foil" and value is None):
            raise DataError(f"{where}: {name} is {value!r}; give a text in quotes, or a token id as a whole number")
    return Pair(**record)


def _prompt(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    if not text:
        raise DataError(f"{where}: the prompt is empty; write at least one token")
    with _named(where):
        return tokenizer.encode(text)


def difference(tokenizer: Tokenizer, clean: list[int], corrupt: list[int]) -> str:
    """What a message says about two prompts of unequal length, from the first token in which they differ."""
    pairs = zip(clean, corrupt, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(clean), len(corrupt)))
    split = [" ".join(map(repr, pieces(tokenizer, ids)[at : at + PIECES_SHOWN])) for ids in (clean, corrupt)]
    return (
        f"clean has {len(clean)} tokens and corrupt {len(corrupt)}, and patching goes position by position; "
        f"from token {at} on they read {split[0] or 'nothing'} and {split[1] or 'nothing'}: choose words that split "
        "into equally many"
    )


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Put the place before the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
