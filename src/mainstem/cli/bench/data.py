"""`mainstem bench data`: what preparing text costs, over the library `tokenizers` alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.text.corpus import Source
from mainstem.text.tokenizer import DEFAULT_VOCAB_SIZE

NAMES = {
    "mainstem": "mainstem, bpe",
    "tokenizers": "tokenizers, bpe",
    "char": "mainstem, char",
    "byte": "mainstem, byte",
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Time a file on its way to a token file beside the library `tokenizers` encoding the same text in memory, by turns
    in one process, on all cores; weigh the memory of ours for a text and for a quarter of it, each in a process of its
    own; and time the making of training batches."""

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
    command = parse(Data, "bench data", argv)
    screen = Screen(command.json)
    from mainstem.bench.data import measure

    with screen.bar("bench data", 1) as bar:
        found = measure(
            Source((command.data,)),
            command.vocab_size,
            command.megabytes,
            command.rounds,
            progress=lambda done, total: bar.at(done, total=total),
        )
    for note in found["notes"]:
        screen.note(note)
    text = found["text"]
    screen.say(
        f"{text['name']}: {text['bytes'] / 1e6:,.1f} MB, {text['tokens']:,} tokens, BPE of {found['vocab_size']:,}; "
        f"tokenizers {found['tokenizers']}, {found['cores']} cores"
    )
    lower, upper = found["ratio_quartiles"]
    screen.say(
        f"encode_over_tokenizers {found['encode_over_tokenizers']:.3f} (middle half {lower:.3f} to {upper:.3f}); "
        f"{found['ids_that_differ']:,} ids differ"
    )
    rows = [
        (name, f"{found['seconds'][side]:.3f}", f"{found['megabytes_per_second'][side]:.1f}", _rate(found, side))
        for side, name in NAMES.items()
    ]
    screen.table(("encoding", "seconds", "MB/s", "tokens/s"), rows)
    if found["memory_growth"]:
        peaks = ", ".join(f"{row['peak'] / 1e6:,.1f} MB for {row['text_bytes'] / 1e6:,.1f}" for row in found["memory"])
        screen.say(f"memory of ours at its peak: {peaks} MB of text; memory_growth {found['memory_growth']:.3f}")
    seconds = ", ".join(f"{shape} {each * 1e6:,.0f}" for shape, each in found["batch_seconds"].items())
    screen.say(f"microseconds a batch: {seconds}; batch_over_step {found['batch_over_step']:.5f} at the shape small")
    screen.result(found)


def _rate(found: dict, side: str) -> str:
    rate = found["tokens_per_second"].get(side)
    return "-" if rate is None else f"{rate:,.0f}"
