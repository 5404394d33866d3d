"""What preparing text costs: ours, from a file to a token file, over the library `tokenizers` encoding it in memory.

Both sides have the same tokenizer, the same cuts and all cores. The library's clock runs over its encoding and the
lists in which it gives its ids; its text is read and cut before. Ours reads, decodes, cuts, encodes, counts and writes.
"""

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as library
from torch import Tensor

from benchmarks.memory import taken
from benchmarks.processes import Process, Works, alone
from benchmarks.timing import alternate, check, spread
from benchmarks.train import SHAPES, model_of, our_step
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.errors import ConfigError, DataError
from mainstem.text import tokenizer as tokenizers
from mainstem.text.corpus import Source
from mainstem.text.encode import AHEAD, BATCH_CHARACTERS, dtype, encode, train
from mainstem.text.tokenizer import DEFAULT_VOCAB_SIZE, Tokenizer
from mainstem.text.tokens import Windows
from mainstem.training import allocator

OTHERS = ("char", "byte")
"""The kinds that have no peer."""
AT_ONCE = (AHEAD + 2) * BATCH_CHARACTERS
"""Characters that are held at once: the batches in the threads, one that waits, one that is read."""
BATCHES = 200
"""Made at each shape, for their time."""


def repeated(source: Source, path: Path, size: int) -> int:
    """Write a text to `path`, over and over until it has `size` bytes or a piece more, and return how many it has.

    One document in UTF-8. DataError if there is no text.
    """
    written = 0
    with open(path, "wb") as file:
        while written < size:
            before = written
            for piece in source.pieces():
                written += file.write(piece.text.encode())
                if written >= size:
                    break
            if written == before:
                raise DataError(f"{source.names()}: no text in it, so nothing to encode; give another file")
    return written


def measure(
    source: Source,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    megabytes: int = 20,
    rounds: int = 3,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """`encode_over_tokenizers`, `memory_growth` and `batch_over_step`, with what stands behind them.

    Seconds and bytes; a megabyte is 10^6 bytes of UTF-8. A BPE of `vocab_size` is trained on the text, which is then
    repeated to `megabytes`. `memory_growth` is the peak above what stood before, over that for a quarter of the text.
    `batch_over_step` is the making of a batch over a training step at the shape `small`, whose step is the shortest.

    Raises ConfigError for less than one megabyte or round, and DataError if there is no text.
    """
    check(rounds)
    if megabytes < 1:
        raise ConfigError(f"megabytes: {megabytes} is not possible; give at least 1")
    count, total = itertools.count(1), 4 * (rounds + 1) + 2

    def tick() -> None:
        progress(next(count), total)

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        quarter, whole = folder / "quarter.txt", folder / "whole.txt"
        sizes = {quarter: repeated(source, quarter, megabytes * 250_000)}
        sizes[whole] = repeated(source, whole, megabytes * 1_000_000)
        bpe = train(source, "bpe", vocab_size, None, lambda: None)[0]
        bpe.save(folder / "bpe.json")
        for kind in OTHERS:
            train(Source((whole,)), kind, None, None, lambda: None)[0].save(folder / f"{kind}.json")

        def encoder(kind: str, build: str = "ours") -> Process:
            files = {"tokenizer": str(folder / f"{kind}.json"), "text": str(whole)}
            return stack.enter_context(Process(f"benchmarks.data:{build}", ours=build == "ours", **files))

        def that_differ(_: None, rows: list[list[int]]) -> float:
            ids = np.fromiter(itertools.chain(*rows, [bpe.vocab_size - 1]), dtype(bpe))  # and the end of the text
            return different(np.fromfile(_tokens_of(whole), dtype(bpe)), ids)

        ours_and_theirs = encoder("bpe").side("encode"), encoder("bpe", "theirs").side("encode")
        timed = alternate(*ours_and_theirs, rounds, difference=that_differ, tick=tick)
        tokens = np.fromfile(_tokens_of(whole), dtype(bpe))
        shutil.copy(_tokens_of(whole), folder / "ids.bin")
        one, other = (encoder(kind).side("encode") for kind in OTHERS)
        plain = alternate(one, other, rounds, tick=tick)
        peaks = []
        for path in sizes:
            files = {"tokenizer": str(folder / "bpe.json"), "text": str(path)}
            peaks.append(alone("benchmarks.data:ours", "memory", ours=True, **files))
            tick()
        batching = _batching(folder / "ids.bin", bpe, rounds)
    seconds = {"mainstem": timed.first, "tokenizers": timed.second, OTHERS[0]: plain.first, OTHERS[1]: plain.second}
    median = {side: spread(each).median for side, each in seconds.items()}
    return {
        "text": {"name": source.names(), "bytes": sizes[whole], "tokens": len(tokens)},
        "vocab_size": bpe.vocab_size,
        "encode_over_tokenizers": timed.ratio.median,
        "ratio_quartiles": [timed.ratio.lower, timed.ratio.upper],
        "ids_that_differ": int(timed.difference or 0),
        "seconds": median,
        "megabytes_per_second": {side: sizes[whole] / 1e6 / each for side, each in median.items()},
        "tokens_per_second": {side: len(tokens) / median[side] for side in ("mainstem", "tokenizers")},
        "memory": [{"text_bytes": size, "peak": peak} for size, peak in zip(sizes.values(), peaks, strict=True)],
        "memory_growth": peaks[1] / peaks[0] if peaks[0] and peaks[1] else None,
        **batching,
        "tokenizers": library.__version__,
        "cores": os.cpu_count(),
        "notes": _notes(bpe, vocab_size, sizes[quarter]),
    }


def _tokens_of(text: Path) -> Path:
    return text.with_suffix(".bin")


def _encode(tokenizer: Tokenizer, text: Path) -> None:
    """Ours; the ids are in the file beside the text."""
    encode(Source((text,)), tokenizer, _tokens_of(text), lambda read: None)


def ours(tokenizer: str, text: str) -> Works:
    """Our side: `encode` a text file into a token file, and the `memory` that it takes at its peak, bytes or None."""
    loaded = tokenizers.load(Path(tokenizer))

    def work() -> Iterable[Tensor]:
        _encode(loaded, Path(text))
        return []

    def memory() -> int | None:
        loaded.encode_batch(["a", "b"])  # the library starts its threads
        return taken(work).peak

    return {"encode": lambda: _encode(loaded, Path(text)), "memory": memory}


def theirs(tokenizer: str, text: str) -> Works:
    """The library's side: `encode`, from pieces of text in memory to lists of ids."""
    loaded = library.Tokenizer.from_file(tokenizer)
    loaded.encode_special_tokens = True  # as ours: the text's "<|endoftext|>" is no token
    pieces = [piece.text for piece in Source((text,)).pieces()]
    return {"encode": lambda: [row.ids for row in loaded.encode_batch_fast(pieces, add_special_tokens=False)]}


def batches(ids: str, kind: str, vocab_size: int) -> Works:
    """Our batches: `seconds` of one at a shape; a `batch`, and a `step`, at the shape `small`."""
    tokens = np.fromfile(ids, kind)

    def seconds(shape: str) -> float:
        _, _, _, context, batch, _ = SHAPES[shape]
        windows = Windows(tokens, context, 1, vocab_size)
        start = time.perf_counter()
        for step in range(BATCHES):
            windows.batch(step, batch)
        return (time.perf_counter() - start) / BATCHES

    allocator.keep_freed()  # as the training loop has it
    model, x, y = model_of("small")
    windows, step_of = Windows(tokens, x.shape[1], 1, vocab_size), itertools.count()
    return {
        "seconds": seconds, "batch": lambda: windows.batch(next(step_of), len(x)), "step": our_step(model, x, y)
    }  # fmt: skip


def different(ids: np.ndarray, others: np.ndarray) -> int:
    """In how many places two streams of ids differ; what one has more than the other differs too."""
    shared = min(len(ids), len(others))
    return int((ids[:shared] != others[:shared]).sum()) + max(len(ids), len(others)) - shared


def _batching(ids: Path, bpe: Tokenizer, rounds: int) -> dict[str, Any]:
    """`batch_seconds` of each shape, and `batch_over_step` at the shape `small`."""
    facts = {"ids": str(ids), "kind": np.dtype(dtype(bpe)).name, "vocab_size": bpe.vocab_size}
    with Process("benchmarks.data:batches", ours=True, **facts) as process:
        timed = alternate(process.side("batch"), process.side("step"), rounds)
        return {
            "batch_seconds": {shape: process.value("seconds", shape) for shape in SHAPES},
            "batch_over_step": timed.ratio.median,
        }


def _notes(bpe: Tokenizer, asked: int, quarter: int) -> list[str]:
    notes = [
        (bpe.vocab_size != asked, f"the vocabulary reached {bpe.vocab_size:,} of the {asked:,} asked for"),
        (quarter < AT_ONCE, "a quarter of the text fits into the batches held at once: memory still grows"),
    ]
    return [sentence for true, sentence in notes if true]


NAMES = {
    "mainstem": "mainstem, bpe",
    "tokenizers": "tokenizers, bpe",
    "char": "mainstem, char",
    "byte": "mainstem, byte",
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Time a file on its way to a token file beside the library `tokenizers` encoding the same text in memory, by
    turns, each in a process of its own, on all cores; weigh the memory of ours for a text and for a quarter of it; and
    time the making of training batches."""

    data: str = "shakespeare"
    """The text: a file, - for standard input, or a bundled text."""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    """Size of the BPE that is trained on it."""
    megabytes: int = 20
    """The text is repeated to that many."""
    rounds: int = 3
    """Timed encodings of each side."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print."""
    command = parse(Data, "data", argv, program="python -m benchmarks")
    screen = Screen(command.json)

    with screen.bar("data", 1) as bar:
        figures = measure(
            Source((command.data,)),
            command.vocab_size,
            command.megabytes,
            command.rounds,
            progress=lambda done, total: bar.at(done, total=total),
        )
    for note in figures["notes"]:
        screen.note(note)
    text = figures["text"]
    screen.say(
        f"{text['name']}: {text['bytes'] / 1e6:,.1f} MB, {text['tokens']:,} tokens, BPE of {figures['vocab_size']:,}; "
        f"tokenizers {figures['tokenizers']}, {figures['cores']} cores"
    )
    lower, upper = figures["ratio_quartiles"]
    screen.say(
        f"encode_over_tokenizers {figures['encode_over_tokenizers']:.3f} (quartiles {lower:.3f} to {upper:.3f}); "
        f"{figures['ids_that_differ']:,} ids differ"
    )
    rows = [
        (name, f"{figures['seconds'][side]:.3f}", f"{figures['megabytes_per_second'][side]:.1f}", _rate(figures, side))
        for side, name in NAMES.items()
    ]
    screen.table(("encoding", "seconds", "MB/s", "tokens/s"), rows)
    if figures["memory_growth"]:
        memory = figures["memory"]
        peaks = ", ".join(f"{row['peak'] / 1e6:,.1f} MB for {row['text_bytes'] / 1e6:,.1f}" for row in memory)
        screen.say(f"memory of ours at its peak: {peaks} MB of text; memory_growth {figures['memory_growth']:.3f}")
    seconds = ", ".join(f"{shape} {each * 1e6:,.0f}" for shape, each in figures["batch_seconds"].items())
    screen.say(f"microseconds a batch: {seconds}; batch_over_step {figures['batch_over_step']:.5f} at the shape small")
    screen.result(figures)


def _rate(figures: dict, side: str) -> str:
    rate = figures["tokens_per_second"].get(side)
    return "-" if rate is None else f"{rate:,.0f}"
