"""`mainstem data FILE... --out DIR`: text -> tokenizer, token files, passport."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstem.cli.parse import Flat, Positional, Reading, parse
from mainstem.cli.screen import Screen
from mainstem.cli.signals import stoppable
from mainstem.text import tokenizer as tokenizers
from mainstem.text import tokens


@dataclass(frozen=True)
class Data:
    """Prepare text for training: a tokenizer, token files and a passport that says what they were made from."""

    files: Positional[tuple[str, ...]]
    """Text or .jsonl files, - for standard input, or a bundled corpus (shakespeare, constitution-ko)."""
    out: str
    """The folder to make."""
    val: tuple[str, ...] = ()
    """Text to validate on; without it the last tenth is held out."""
    tokenizer: str = "bpe"
    """bpe, char or byte, trained on the text; or a tokenizer.json, or a folder that holds one."""
    vocab_size: int = tokenizers.DEFAULT_VOCAB_SIZE
    """Size of a BPE that is trained, all 256 bytes and the end-of-text token included."""
    json: bool = False
    """One object on stdout: the passport."""
    reading: Flat[Reading] = Reading()


def main(argv: Sequence[str]) -> None:
    """Parse, prepare, print."""
    command = parse(Data, "data", argv)
    screen, out = Screen(command.json), Path(command.out)
    source = command.reading.source(command.files)
    given = None
    if command.tokenizer not in tokenizers.KINDS:
        path = Path(command.tokenizer)
        given = tokenizers.load(path / "tokenizer.json" if path.is_dir() else path)
    total = max(1, sum(int(row["bytes"]) for row in source.fingerprints()))
    with stoppable() as check, screen.bar("reading", total) as bar:
        prepared = tokens.prepare(
            source,
            out,
            tokenizer=given,
            kind=command.tokenizer if given is None else "bpe",
            vocab_size=command.vocab_size if command.tokenizer == "bpe" else None,
            val=command.reading.source(command.val) if command.val else None,
            should_stop=check,
            progress=lambda done, of: bar.at(min(done, total)),
        )
    met = prepared.passport["counts"]
    for text in prepared.notes():
        screen.note(text)
    screen.say(
        f"{out}: {met['documents']:,} documents, {met['bytes']:,} bytes, {met['tokens']:,} tokens; "
        f"{prepared.tokenizer.kind} of {prepared.tokenizer.vocab_size:,}; "
        f"{len(prepared.train):,} to train on, {len(prepared.val):,} held out"
    )
    screen.say(f"next  mainstem train --data {out}")
    screen.result({"out": str(out), "notes": prepared.notes(), **prepared.passport})
