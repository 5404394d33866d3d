"""Prepare a text as a folder of token files, and read training and evaluation windows from it.

A prepared folder is written atomically. Its manifest, `passport.json`, records the sources (checksums), the settings
and the counts, and `load` checks the files against it. Batches are a pure function of (seed, step).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mainstem.atomic import MANIFEST, new_folder, read_json, remove_leftovers, sha256, to_json
from mainstem.errors import DataError, RunError
from mainstem.text import encode
from mainstem.text import tokenizer as tokenizers
from mainstem.text.corpus import Source
from mainstem.text.tokenizer import Tokenizer

FORMAT = "mainstem-data/1"
PASSPORT, TOKENIZER, TOKENS, VALIDATION = "passport.json", "tokenizer.json", "tokens.bin", "val.bin"
AGAIN = "prepare the text again"


@dataclass(frozen=True)
class Prepared:
    """A prepared text: token files, the tokenizer, and the manifest (`passport.json`)."""

    path: Path
    passport: dict[str, Any]
    tokenizer: Tokenizer

    @cached_property
    def train(self) -> np.ndarray:
        """The training tokens, (N,) uint16 or uint32, mapped from disk."""
        return self._map(TOKENS)[: self.passport["split"]]

    @cached_property
    def val(self) -> np.ndarray:
        """The validation tokens: `val.bin` if there is one, else the last tenth of `tokens.bin`."""
        split = self.passport["split"]
        return self._map(VALIDATION) if split is None else self._map(TOKENS)[split:]

    def _map(self, name: str) -> np.ndarray:
        return np.memmap(self.path / name, dtype=np.dtype(self.passport["dtype"]).newbyteorder("<"), mode="r")

    def notes(self) -> list[str]:
        """Notes for the user about this preparation, one sentence each, such as dropped characters; often none."""
        facts, validation = self.passport["tokenizer"], self.passport["validation_counts"] or {}
        counts = {name: count + validation.get(name, 0) for name, count in self.passport["counts"].items()}
        requested, reached = facts["asked_vocab_size"], facts["vocab_size"]
        rows = [
            (
                requested not in (None, reached),
                f"the vocabulary has {reached:,} tokens, not the requested {requested or 0:,}",
            ),
            (
                self.tokenizer.eot_id is None and counts["documents"] > 1,
                f"the tokenizer has no end of text, so nothing separates the {counts['documents']:,} documents",
            ),
            (counts["boms"], f"{counts['boms']:,} byte order mark(s) were dropped"),
            (counts["skipped_empty"], f"{counts['skipped_empty']:,} empty document(s) were skipped"),
            (
                counts["crlf"] or counts["lone_cr"],
                f"{counts['crlf']:,} CRLF and {counts['lone_cr']:,} lone CR line ends were "
                + ("converted to LF" if self.passport["newlines"] == "lf" else "kept (`newlines` lf converts them)"),
            ),
            (
                counts["unknown"],
                f"{counts['unknown']:,} character(s) unknown to the tokenizer were dropped "
                f"({counts['unknown'] / max(1, counts['characters']):.3%})",
            ),
            (
                self.passport["tokenizer_sampled"],
                f"the tokenizer was trained on a sample of {self.passport['tokenizer_sample_bytes']:,} bytes",
            ),
        ]
        return [sentence for applies, sentence in rows if applies]


def prepare(
    source: Source,
    out: Path,
    *,
    tokenizer: Tokenizer | None = None,
    kind: str = "bpe",
    vocab_size: int | None = None,
    val: Source | None = None,
    should_stop: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> Prepared:
    """Tokenize `source` into the folder `out`, or open the folder if it was prepared from the same text and settings.

    Without `tokenizer`, one of `kind` is trained on a sample of the training text. The validation split is `val`, or
    by default the last tenth of the tokens. `should_stop` is called between batches and may raise; then nothing is
    written. Raises DataError for a folder that holds other files.

    >>> prepared = prepare(Source("notes.txt"), "data/notes", vocab_size=4096)
    >>> prepared.train[:10], prepared.tokenizer.decode(prepared.train[:10])
    """
    out = Path(out)
    sources = {TOKENS: source} | ({} if val is None else {VALIDATION: val})
    if kind == "bpe" and vocab_size is None:
        vocab_size = tokenizers.DEFAULT_VOCAB_SIZE
    request = {  # all that decides the contents of the files
        "format": FORMAT,
        **_source_fields(source),
        "validation": None if val is None else _source_fields(val),
        "asked": {"kind": kind, "vocab_size": vocab_size} if tokenizer is None else {"sha256": tokenizer.hash},
    }
    if (prepared := _existing(out, request)) is not None:
        return prepared
    try:
        remove_leftovers(out.parent)
        with new_folder(out) as folder:
            _fill(folder, request, sources, tokenizer, should_stop, progress)
    except RunError:  # its message names the folder and the fix
        raise
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error.strerror or error}); choose another folder") from None
    return load(out)


def load(path: Path, verify: bool = False) -> Prepared:
    """Open a prepared folder. Raises DataError if a file is missing, of another format, or of another length.

    `verify` also reads every file and compares its sha256 with the one in `passport.json`.
    """
    path = Path(path)
    if not (path / PASSPORT).is_file():
        raise DataError(f"{path}: no prepared text (no {PASSPORT}); prepare it with `mainstem data FILE --out {path}`")
    try:
        passport = read_json(path / PASSPORT)
        if passport["format"] != FORMAT:
            raise DataError(f"{path}: format {passport['format']!r} is not {FORMAT!r}; {AGAIN}")
        for name, expected in passport["files"].items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise DataError(f"{path / name}: {size:,} bytes, not {expected['bytes']:,}; {AGAIN}")
            if (verify or name == TOKENIZER) and sha256(path / name) != expected["sha256"]:
                raise DataError(f"{path / name}: its sha256 is not the one in {PASSPORT}; {AGAIN}")
    except (RunError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path / PASSPORT}: damaged ({error!r}); {AGAIN}") from None
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror}; {AGAIN}") from None
    return Prepared(path, passport, tokenizers.load(path / TOKENIZER))


class Windows:
    """Training windows in an order set by (seed, epoch): window i is the same on any machine and after any resume.

    The windows of an epoch have n_ctx + 1 tokens at stride n_ctx, from an offset that is drawn for each epoch, so that
    over the epochs every token occurs at every position. `per_epoch` windows fit for any offset.
    """

    def __init__(self, tokens: np.ndarray, n_ctx: int, seed: int, vocab_size: int, name: str = "the tokens"):
        _require_length(tokens, n_ctx, name)
        self.tokens = np.asarray(tokens)  # indexing a memmap is slow; the data stay on disk
        self.n_ctx, self.seed, self.vocab_size, self.name = n_ctx, seed, vocab_size, name
        self.per_epoch = max(1, len(tokens) // n_ctx - 1)
        self._epoch = -1  # the epoch of the cached starts
        self._starts = np.empty(0, np.int64)

    def rows(self, first: int, count: int) -> np.ndarray:
        """Windows first to first + count - 1, (count, n_ctx + 1) int64. DataError for an id outside the vocabulary."""
        rows = np.empty((count, self.n_ctx + 1), np.int64)
        for row, i in zip(rows, range(first, first + count), strict=True):
            start = self._start(i)
            row[:] = self.tokens[start : start + self.n_ctx + 1]
        return _require_ids(rows, self.vocab_size, self.name)

    def batch(self, step: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of a training step: x, y, each (batch_size, n_ctx) int64."""
        rows = self.rows(step * batch_size, batch_size)
        return rows[:, :-1], rows[:, 1:]

    def _start(self, i: int) -> int:
        epoch, place = divmod(i, self.per_epoch)
        if epoch != self._epoch:
            draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            offset = draw.integers(min(self.n_ctx, len(self.tokens) - self.per_epoch * self.n_ctx))
            self._starts = offset + self.n_ctx * draw.permutation(self.per_epoch)
            self._epoch = epoch
        return int(self._starts[place])


def evaluation_windows(
    tokens: np.ndarray, n_ctx: int, batch_size: int, *, vocab_size: int | None = None, name: str = "the tokens"
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Evaluation windows: every token but the first is a target exactly once, in order. Yields x, y, each (B, T) int64.

    Windows do not overlap. T is n_ctx, or less in the last batch, which may be one short row. Raises DataError for
    fewer than two tokens, or for an id of `vocab_size` or more.
    """
    _require_length(tokens, 1, name)
    tokens = np.asarray(tokens)
    full, rest = divmod(len(tokens) - 1, n_ctx)
    spans = [(first, min(batch_size, full - first), n_ctx) for first in range(0, full, batch_size)]
    for first, count, length in [*spans, *([(full, 1, rest)] if rest else [])]:
        start = first * n_ctx
        flat = tokens[start : start + count * length + 1].astype(np.int64)
        _require_ids(flat, vocab_size, name)
        yield flat[:-1].reshape(count, length), flat[1:].reshape(count, length)


def bytes_per_token(tokenizer: Tokenizer) -> np.ndarray:
    """The length in bytes of each token, (V,) int64; 0 for special ids. Used for the loss in bits per byte."""
    return np.array([len(token) for token in tokenizer.token_bytes], np.int64)


def _require_length(tokens: np.ndarray, n_ctx: int, name: str) -> None:
    if len(tokens) < n_ctx + 1:
        raise DataError(
            f"{name}: {len(tokens):,} tokens, but one window needs {n_ctx + 1:,} (n_ctx + 1); "
            f"use more text, or a smaller `n_ctx`"
        )


def _require_ids(ids: np.ndarray, vocab_size: int | None, name: str) -> np.ndarray:
    if vocab_size is not None and ids.max(initial=0) >= vocab_size:
        raise DataError(
            f"{name}: token id {ids.max()} is outside the vocabulary of {vocab_size:,}; "
            f"the file is damaged, or of another tokenizer: {AGAIN}"
        )
    return ids


def _source_fields(source: Source) -> dict[str, Any]:
    reading = {name: getattr(source, name) for name in ("encoding", "newlines", "separator", "text_field")}
    return {"sources": source.fingerprints(), **reading}


def _existing(out: Path, request: dict[str, Any]) -> Prepared | None:
    """The prepared text in `out` if its request is the same. Raises DataError if `out` holds other files."""
    if not out.exists():
        return None
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    if foreign := sorted(names - {PASSPORT, TOKENIZER, TOKENS, VALIDATION, MANIFEST}):
        raise DataError(f"{out}: holds other files ({', '.join(foreign[:3])}); choose another folder")
    try:
        prepared = load(out, verify=True)
    except DataError:
        return None  # damaged: prepared again
    return prepared if all(prepared.passport.get(key) == value for key, value in request.items()) else None


def _fill(
    folder: Path,
    request: dict[str, Any],
    sources: dict[str, Source],
    tokenizer: Tokenizer | None,
    should_stop: Callable[[], None],
    progress: Callable[[int, int], None],
) -> None:
    """Write the tokenizer, a token file for each of `sources` (file name -> source), and the manifest."""
    held_out = None if VALIDATION in sources else 10  # the last tenth is held out
    requested, trained_on, sampled = request["asked"].get("vocab_size"), 0, False
    if tokenizer is None:
        kind = request["asked"]["kind"]
        tokenizer, trained_on, sampled = encode.train(sources[TOKENS], kind, requested, held_out, should_stop)
    tokenizer.save(folder / TOKENIZER)

    total = sum(row["bytes"] for text in (request, request["validation"]) if text for row in text["sources"])
    encoded: dict[str, encode.Encoded] = {}

    def between(read: int) -> None:
        should_stop()
        progress(sum(each.counts["bytes"] for each in encoded.values()) + read, total)

    for name, source in sources.items():
        encoded[name] = encode.encode(source, tokenizer, folder / name, between)

    tokens = encoded[TOKENS].counts["tokens"]
    passport = {
        **request,
        "licence": sources[TOKENS].licence(),
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "asked_vocab_size": requested,
            "sha256": tokenizer.hash,
        },
        "tokenizer_sample_bytes": trained_on,
        "tokenizer_sampled": sampled,
        "dtype": encode.dtype(tokenizer).name,
        "counts": encoded[TOKENS].counts,
        "validation_counts": encoded[VALIDATION].counts if VALIDATION in encoded else None,
        "split": tokens - tokens // held_out if held_out else None,
        "token_entropy": encoded[TOKENS].entropy,
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
            for name in (*encoded, TOKENIZER)
        },
    }
    (folder / PASSPORT).write_text(to_json(passport), encoding="utf-8")
