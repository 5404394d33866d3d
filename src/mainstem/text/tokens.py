"""Text -> a folder of token files that can be trusted, and the order in which training reads them.

A prepared folder is whole or absent. Its passport says what it was made from (hashes), how, and what was met on the
way; opening it checks the files against the passport. Batches are a pure function of (seed, step).
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
    """A folder of tokens, with the tokenizer that made them and a passport that says how."""

    path: Path
    passport: dict[str, Any]
    tokenizer: Tokenizer

    @cached_property
    def train(self) -> np.ndarray:
        """The training tokens, (N,) uint16 or uint32, mapped from disk."""
        return self._map(TOKENS)[: self.passport["split"]]

    @cached_property
    def val(self) -> np.ndarray:
        """The validation tokens: those of `val.bin`, else the stream's last tenth."""
        split = self.passport["split"]
        return self._map(VALIDATION) if split is None else self._map(TOKENS)[split:]

    def _map(self, name: str) -> np.ndarray:
        return np.memmap(self.path / name, dtype=np.dtype(self.passport["dtype"]).newbyteorder("<"), mode="r")

    def notes(self) -> list[str]:
        """What a person should know about this preparation, one sentence each; empty when all went as asked."""
        made, held_out = self.passport["tokenizer"], self.passport["validation_counts"] or {}
        counts = {what: count + held_out.get(what, 0) for what, count in self.passport["counts"].items()}
        asked, reached = made["asked_vocab_size"], made["vocab_size"]
        said = [
            (asked not in (None, reached), f"the vocabulary reached {reached:,} of the {asked or 0:,} asked for"),
            (
                self.tokenizer.eot_id is None and counts["documents"] > 1,
                f"the tokenizer has no end of text, so nothing stands between the {counts['documents']:,} documents",
            ),
            (counts["boms"], f"{counts['boms']:,} byte order mark(s) were taken off"),
            (counts["skipped_empty"], f"{counts['skipped_empty']:,} empty document(s) were skipped"),
            (
                counts["crlf"] or counts["lone_cr"],
                f"{counts['crlf']:,} CRLF and {counts['lone_cr']:,} lone CR line ends were "
                + ("made into LF" if self.passport["newlines"] == "lf" else "kept (`newlines` lf makes them LF)"),
            ),
            (
                counts["unknown"],
                f"{counts['unknown']:,} character(s) that the tokenizer does not know were dropped "
                f"({counts['unknown'] / max(1, counts['characters']):.3%})",
            ),
            (
                self.passport["tokenizer_sampled"],
                f"the tokenizer was trained on a sample of {self.passport['tokenizer_sample_bytes']:,} bytes",
            ),
        ]
        return [sentence for true, sentence in said if true]


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
    """Make the token files of `source` in the folder `out`, or open those there if they were made from the same.

    Without `tokenizer` one of `kind` is trained on a sample of the training text. `val` is validated on if given, else
    the stream's last tenth. `should_stop` is called between batches and may raise; then nothing is left behind. A
    folder that holds anything but prepared tokens is refused.
    """
    out = Path(out)
    sources = {TOKENS: source} | ({} if val is None else {VALIDATION: val})
    if kind == "bpe" and vocab_size is None:
        vocab_size = tokenizers.DEFAULT_VOCAB_SIZE
    request = {  # all that decides what the files hold: equal requests make equal files
        "format": FORMAT,
        **_made_from(source),
        "validation": None if val is None else _made_from(val),
        "asked": {"kind": kind, "vocab_size": vocab_size} if tokenizer is None else {"sha256": tokenizer.hash},
    }
    if (made := _already_made(out, request)) is not None:
        return made
    try:
        remove_leftovers(out.parent)
        with new_folder(out) as folder:
            _fill(folder, request, sources, tokenizer, should_stop, progress)
    except RunError:  # it names the folder and the fix itself
        raise
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error.strerror or error}); choose another folder") from None
    return load(out)


def load(path: Path, verify: bool = False) -> Prepared:
    """Open a prepared folder. DataError if a file is missing, foreign, or not as long as the passport says.

    `verify` also reads every file and compares its sha256.
    """
    path = Path(path)
    if not (path / PASSPORT).is_file():
        raise DataError(f"{path}: no prepared text (no {PASSPORT}); make it with `mainstem data FILE --out {path}`")
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
    """Training windows in the order that (seed, epoch) sets: sample i is the same on any machine, after any resume.

    An epoch's windows hold n_ctx + 1 tokens at stride n_ctx from an offset that is drawn anew each epoch, so that over
    epochs every token is seen at every position. `per_epoch` windows fit whatever the offset.
    """

    def __init__(self, tokens: np.ndarray, n_ctx: int, seed: int, vocab_size: int, name: str = "the tokens"):
        _refuse_short(tokens, n_ctx, name)
        self.tokens = np.asarray(tokens)  # off memmap's slow indexing; still on disk
        self.n_ctx, self.seed, self.vocab_size, self.name = n_ctx, seed, vocab_size, name
        self.per_epoch = max(1, len(tokens) // n_ctx - 1)
        self._epoch = -1  # whose starts are cached
        self._starts = np.empty(0, np.int64)

    def rows(self, first: int, count: int) -> np.ndarray:
        """Samples first .. first + count - 1, (count, n_ctx + 1) int64. DataError for an id outside the vocabulary."""
        rows = np.empty((count, self.n_ctx + 1), np.int64)
        for row, i in zip(rows, range(first, first + count), strict=True):
            start = self._start(i)
            row[:] = self.tokens[start : start + self.n_ctx + 1]
        return _refuse_foreign(rows, self.vocab_size, self.name)

    def batch(self, step: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """What step `step` reads and what it predicts: x, y, each (batch_size, n_ctx) int64."""
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
    """Every token but the first as a target exactly once: x, y, each (B, T) int64, in order.

    Windows do not overlap. T is n_ctx, but in the last batch, one row, that may be shorter. DataError for fewer than
    two tokens, or for an id of `vocab_size` or more.
    """
    _refuse_short(tokens, 1, name)
    tokens = np.asarray(tokens)
    whole, rest = divmod(len(tokens) - 1, n_ctx)
    spans = [(first, min(batch_size, whole - first), n_ctx) for first in range(0, whole, batch_size)]
    for first, count, length in [*spans, *([(whole, 1, rest)] if rest else [])]:
        start = first * n_ctx
        flat = tokens[start : start + count * length + 1].astype(np.int64)
        _refuse_foreign(flat, vocab_size, name)
        yield flat[:-1].reshape(count, length), flat[1:].reshape(count, length)


def bytes_per_token(tokenizer: Tokenizer) -> np.ndarray:
    """The bytes of text that each id stands for, (V,) int64; 0 for special ids. Loss over these is bits per byte."""
    return np.array([len(token) for token in tokenizer.token_bytes], np.int64)


def _refuse_short(tokens: np.ndarray, n_ctx: int, name: str) -> None:
    if len(tokens) < n_ctx + 1:
        raise DataError(
            f"{name}: {len(tokens):,} tokens, and one window needs {n_ctx + 1:,} (n_ctx + 1); "
            f"give more text, or a smaller `n_ctx`"
        )


def _refuse_foreign(ids: np.ndarray, vocab_size: int | None, name: str) -> np.ndarray:
    if vocab_size is not None and ids.max(initial=0) >= vocab_size:
        raise DataError(
            f"{name}: token id {ids.max()} is outside the vocabulary of {vocab_size:,}; "
            f"the file was damaged or made by another tokenizer: {AGAIN}"
        )
    return ids


def _made_from(source: Source) -> dict[str, Any]:
    reading = {name: getattr(source, name) for name in ("encoding", "newlines", "separator", "text_field")}
    return {"sources": source.fingerprints(), **reading}


def _already_made(out: Path, request: dict[str, Any]) -> Prepared | None:
    """What `out` holds if it was made for the same request. DataError if it holds something that is not ours."""
    if not out.exists():
        return None
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    if foreign := sorted(names - {PASSPORT, TOKENIZER, TOKENS, VALIDATION, MANIFEST}):
        raise DataError(f"{out}: holds {', '.join(foreign[:3])}, which is not ours to replace; choose another folder")
    try:
        prepared = load(out, verify=True)
    except DataError:
        return None  # damaged: made again
    return prepared if all(prepared.passport.get(key) == value for key, value in request.items()) else None


def _fill(
    folder: Path,
    request: dict[str, Any],
    sources: dict[str, Source],
    tokenizer: Tokenizer | None,
    should_stop: Callable[[], None],
    progress: Callable[[int, int], None],
) -> None:
    """Write the tokenizer, a token file for each of `sources` (name of the file -> source), and the passport."""
    held_out = None if VALIDATION in sources else 10  # one tenth of the stream, unless a text is given for it
    asked, trained_on, sampled = request["asked"].get("vocab_size"), 0, False
    if tokenizer is None:
        kind = request["asked"]["kind"]
        tokenizer, trained_on, sampled = encode.train(sources[TOKENS], kind, asked, held_out, should_stop)
    tokenizer.save(folder / TOKENIZER)

    total = sum(row["bytes"] for made in (request, request["validation"]) if made for row in made["sources"])
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
            "asked_vocab_size": asked,
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
