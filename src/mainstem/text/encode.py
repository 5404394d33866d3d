"""Train a tokenizer on a text source, and encode the source into one file of token ids, in bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from mainstem.errors import DataError
from mainstem.text import tokenizer as tokenizers
from mainstem.text.corpus import Counts, Piece, Source
from mainstem.text.tokenizer import Tokenizer

Item = TypeVar("Item")
Output = TypeVar("Output")

SAMPLE_BYTES = 64 << 20  # the most text that a tokenizer is trained on
# BPE training holds about 85 bytes for each byte of the pieces that occur once, and without spaces nearly all do.
UNSPACED_SAMPLE_BYTES = 8 << 20
BATCH_CHARACTERS = 1 << 20  # encoded per batch
AHEAD = 2  # batches encoded in threads, while Python reads and writes
MOST_UNKNOWN = 0.01  # share of unknown characters above which a text is refused


def train(
    source: Source, kind: str, vocab_size: int | None, held_out: int | None, should_stop: Callable[[], None]
) -> tuple[Tokenizer, int, bool]:
    """Train a tokenizer. Returns it, the bytes of text that it was trained on, and whether those are a sample.

    `bpe` is trained on the training split, all but the last 1 / `held_out` of the text; `char` reads the whole text.
    """
    read, sampled = 0, False

    def note(is_sample: bool) -> None:
        nonlocal sampled
        sampled = is_sample

    def texts() -> Iterator[str]:
        nonlocal read
        for text in _sample(source, held_out, should_stop, note) if kind == "bpe" else _texts(source, should_stop):
            read += len(text.encode())
            yield text

    tokenizer = tokenizers.train(kind, texts(), vocab_size)
    return tokenizer, read, sampled


def _texts(source: Source, should_stop: Callable[[], None]) -> Iterator[str]:
    for piece in source.pieces():
        should_stop()
        yield piece.text


def _sample(
    source: Source, held_out: int | None, should_stop: Callable[[], None], note: Callable[[bool], None]
) -> Iterator[str]:
    """Pieces spread evenly over the training split, about SAMPLE_BYTES; `note` is called with whether that is less."""
    size = characters = spaces = 0
    for text in _texts(source, should_stop):
        size += len(text.encode())
        characters += len(text)
        spaces += text.count(" ") + text.count("\n")
    limit = SAMPLE_BYTES if spaces * 16 > characters else UNSPACED_SAMPLE_BYTES
    usable = size - size // held_out if held_out else size
    note(limit < usable)
    passed = taken = 0
    for text in _texts(source, should_stop):
        raw = text.encode()[: usable - passed]
        if taken * usable <= limit * passed:
            taken += len(raw)
            yield raw.decode(errors="ignore")  # the last piece may end inside a character
        passed += len(raw)
        if passed == usable:
            return


@dataclass(frozen=True)
class Encoded:
    """Counts of an encoded source, and the entropy (nats) of the distribution of its token ids."""

    counts: dict[str, int]
    entropy: float


def encode(source: Source, tokenizer: Tokenizer, path: Path, between: Callable[[int], None]) -> Encoded:
    """Write the ids of `source` to `path`, the end-of-text id after every document, a bounded batch at a time.

    A tokenizer without such an id puts nothing between documents. `between` is called before each batch with the bytes
    read so far, and may raise. Raises DataError if there is no text, or if too many characters are unknown.
    """
    end_of_text = tokenizer.eot_id
    counts, characters, unknown = Counts(), 0, 0
    unknown_characters: set[str] = set()
    histogram = np.zeros(tokenizer.vocab_size, np.int64)

    def batches() -> Iterator[list[Piece]]:
        for batch in _batches(source.pieces(counts)):
            between(counts.bytes)
            yield batch

    with open(path, "wb") as file:
        for part in _ahead(lambda batch: _encode_batch(batch, tokenizer, end_of_text), batches()):
            characters, unknown = characters + part.characters, unknown + part.unknown
            unknown_characters |= part.unknown_characters
            file.write(part.ids.tobytes())
            histogram += np.bincount(part.ids, minlength=len(histogram))
    between(counts.bytes)
    if not counts.documents:
        raise DataError(f"{source.names()}: no text in {counts.bytes:,} bytes; give another file")
    if unknown > MOST_UNKNOWN * characters:
        examples = ", ".join(map(repr, sorted(unknown_characters)[:3]))
        raise DataError(
            f"{source.names()}: {unknown / characters:.1%} of its {characters:,} characters are unknown to the "
            f"tokenizer, such as {examples}; use one trained on this text, or of kind bpe or byte"
        )
    share = histogram[histogram > 0] / histogram.sum()
    totals = {"tokens": int(histogram.sum()), "characters": characters, "unknown": unknown, "dropped": unknown}
    return Encoded(asdict(counts) | totals, float(-(share * np.log(share)).sum()))


class _Part(NamedTuple):
    """A batch of pieces as ids, and the characters dropped from it."""

    ids: np.ndarray
    characters: int
    unknown: int
    unknown_characters: set[str]


def _encode_batch(batch: list[Piece], tokenizer: Tokenizer, end_of_text: int | None) -> _Part:
    texts = [piece.text for piece in batch]
    characters, unknown_characters = sum(map(len, texts)), tokenizer.unknown("".join(texts))
    if unknown_characters:
        dropped = dict.fromkeys(map(ord, unknown_characters))
        texts = [text.translate(dropped) for text in texts]
    ids, lengths = tokenizer.encode_batch(texts)
    ids = ids.astype(dtype(tokenizer))
    if end_of_text is not None:
        ends = np.cumsum(lengths)[[piece.ends_document for piece in batch]]
        ids = np.insert(ids, ends, end_of_text)
    return _Part(ids, characters, characters - sum(map(len, texts)), unknown_characters)


def _ahead(work: Callable[[Item], Output], items: Iterable[Item]) -> Iterator[Output]:
    """`map(work, items)` with up to AHEAD results computed in threads, in order."""
    with ThreadPoolExecutor(AHEAD) as threads:
        waiting: deque[Future[Output]] = deque()
        for item in items:
            waiting.append(threads.submit(work, item))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1  # bounds a batch of very short documents too
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def dtype(tokenizer: Tokenizer) -> np.dtype:
    """The little-endian dtype of token files: uint16, or uint32 for a vocabulary above 65,536."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
