"""`mainstem tokenizer train FILE... --out FILE`: train a tokenizer on text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from mainstem.cli.parts.arguments import Flat, Positional, TextOptions, parse
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.errors import DataError
from mainstem.text import tokenizer as tokenizers


@dataclass(frozen=True)
class Train:
    """Train a tokenizer on text; the same bytes give the same file."""

    files: Annotated[Positional[tuple[str, ...]], arg(metavar="FILE ...")]
    """Text or .jsonl files, - for standard input, or a bundled corpus (shakespeare, constitution-ko)."""
    out: str
    """The tokenizer.json to write."""
    tokenizer: str = "bpe"
    """bpe, char or byte."""
    vocab_size: int = tokenizers.DEFAULT_VOCAB_SIZE
    """Vocabulary size of a BPE, all 256 bytes and the end-of-text token included."""
    json: bool = False
    """One object on stdout."""
    reading: Flat[TextOptions] = TextOptions()


def main(argv: Sequence[str]) -> None:
    """Parse, train, save, print."""
    command = parse(Train, "tokenizer train", argv)
    screen, out = Screen(command.json), Path(command.out)
    from mainstem.text.encode import train

    source, size = command.reading.source(command.files), command.vocab_size if command.tokenizer == "bpe" else None
    if out.exists():
        tokenizers.load(out)  # raises for what is no tokenizer, and so not ours to replace
    with stoppable() as check:
        tokenizer, trained_on, sampled = train(source, command.tokenizer, size, None, check)
    if not trained_on and command.tokenizer != "byte":
        raise DataError(f"{', '.join(command.files)}: no text in it, so nothing to learn; give another file")
    tokenizer.save(out)
    screen.say(f"{command.out}: {tokenizer.kind} of {tokenizer.vocab_size:,}, from {trained_on:,} bytes")
    if sampled:
        screen.note("those bytes are a sample, spread evenly over the text")
    if size is not None and tokenizer.vocab_size != size:
        screen.note(f"the text filled {tokenizer.vocab_size:,} of the {size:,} asked for")
    screen.result(
        {
            "out": command.out,
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "asked_vocab_size": size,
            "sample_bytes": trained_on,
            "sampled": sampled,
            "sha256": tokenizer.hash,
        }
    )
