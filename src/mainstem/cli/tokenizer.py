"""`mainstem tokenizer train|encode|decode`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mainstem.cli.parts.arguments import Flat, Positional, TextOptions, parse
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.errors import DataError, UserError
from mainstem.formats.run import tokenizer as open_tokenizer
from mainstem.text import tokenizer as tokenizers


@dataclass(frozen=True)
class Train:
    """Train a tokenizer on text; the same bytes give the same file."""

    files: Positional[tuple[str, ...]]
    """Text or .jsonl files, - for standard input, or a bundled corpus."""
    out: str
    """The tokenizer.json to write."""
    kind: str = "bpe"
    """bpe, char or byte."""
    vocab_size: int = tokenizers.DEFAULT_VOCAB_SIZE
    """Size of a BPE, all 256 bytes and the end-of-text token included."""
    json: bool = False
    """One object on stdout."""
    reading: Flat[TextOptions] = TextOptions()


@dataclass(frozen=True)
class Encode:
    """Text to ids, on stdout. The names of special tokens in the text stay text."""

    tokenizer: Positional[str]
    """A tokenizer.json, or a RUN or prepared folder that holds one."""
    text: Positional[str] = "-"
    """The text; - reads standard input as it is."""
    json: bool = False
    """One object on stdout."""


@dataclass(frozen=True)
class Decode:
    """Ids to text, on stdout, byte for byte."""

    tokenizer: Positional[str]
    """A tokenizer.json, or a RUN or prepared folder that holds one."""
    ids: Positional[tuple[int, ...]] = ()
    """The ids; without any they are read from standard input."""
    json: bool = False
    """One object on stdout."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Encode, tyro.conf.subcommand("encode")]
    | Annotated[Decode, tyro.conf.subcommand("decode")]
)


def main(argv: Sequence[str]) -> None:
    """Parse and do one of the three."""
    command: Train | Encode | Decode = parse(Command, "tokenizer", argv)  # type: ignore[arg-type]
    screen = Screen(command.json)
    if isinstance(command, Train):
        _train(command, screen)
    elif isinstance(command, Encode):
        _encode(command, screen)
    else:
        _decode(command, screen)


def _train(command: Train, screen: Screen) -> None:
    from mainstem.text.encode import train

    source, size = command.reading.source(command.files), command.vocab_size if command.kind == "bpe" else None
    out = Path(command.out)
    if out.exists():
        tokenizers.load(out)  # raises for what is no tokenizer, and so not ours to replace
    with stoppable() as check:
        tokenizer, trained_on, sampled = train(source, command.kind, size, None, check)
    if not trained_on and command.kind != "byte":
        raise DataError(f"{', '.join(command.files)}: no text in it, so nothing to learn; give another file")
    tokenizer.save(out)
    screen.say(f"{command.out}: {tokenizer.kind} of {tokenizer.vocab_size:,}, from {trained_on:,} bytes")
    if sampled:
        screen.note("those bytes are a sample, spread evenly over the text")
    if size is not None and tokenizer.vocab_size != size:
        screen.note(f"the text filled {tokenizer.vocab_size:,} of the {size:,} asked for")
    facts = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "asked_vocab_size": size}
    seen = {"sample_bytes": trained_on, "sampled": sampled}
    screen.result({"out": command.out, **facts, **seen, "sha256": tokenizer.hash})


def _encode(command: Encode, screen: Screen) -> None:
    text = command.text
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input: byte {error.start} is not UTF-8; convert it first") from None
    tokenizer = open_tokenizer(command.tokenizer)
    ids = tokenizer.encode(text)
    if command.json:
        screen.result({"ids": ids, "tokens": [tokenizer.decode([i]) for i in ids], "bytes": len(text.encode())})
    else:
        print(*ids)


def _decode(command: Decode, screen: Screen) -> None:
    tokenizer = open_tokenizer(command.tokenizer)
    ids = command.ids or tuple(_stdin_ids())
    if command.json:
        screen.result({"text": tokenizer.decode(ids), "tokens": len(ids)})
    else:
        sys.stdout.buffer.write(tokenizer.decode_bytes(ids))


def _stdin_ids() -> Iterator[int]:
    for word in sys.stdin.buffer.read().decode("utf-8", "replace").split():
        if not (word.isascii() and word.isdigit() and len(word) < 20):
            raise UserError(f"standard input: {word!r} is not an id; ids are whole numbers between spaces")
        yield int(word)
