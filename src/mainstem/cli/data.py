"""`mainstem data FILE... --out DIR`: text -> tokenizer, token files, manifest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from mainstem.cli.parts.arguments import Flat, Positional, TextOptions, parse
from mainstem.cli.parts.dataset import prepare
from mainstem.cli.parts.flags import spelled
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.errors import DataError
from mainstem.text.tokenizer import DEFAULT_VOCAB_SIZE


@dataclass(frozen=True)
class Data:
    """Prepare text for training: a tokenizer, token files, and a manifest that says what they were made from."""

    files: Annotated[Positional[tuple[str, ...]], arg(metavar="FILE ...")]
    """Text or .jsonl files, - for standard input, or a bundled corpus (shakespeare, constitution-ko)."""
    out: str
    """The folder to write."""
    val: Annotated[tuple[str, ...], arg(metavar="FILE ...")] = ()
    """Text of the validation split; by default the last tenth of the text."""
    tokenizer: str = "bpe"
    """bpe, char or byte, trained on the text; or a tokenizer.json, or a folder that holds one."""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    """Vocabulary size of a BPE to train, all 256 bytes and the end-of-text token included."""
    json: bool = False
    """One object on stdout: the manifest."""
    reading: Flat[TextOptions] = TextOptions()


def main(argv: Sequence[str]) -> None:
    """Parse, prepare, print."""
    command = parse(Data, "data", argv)
    screen, out = Screen(command.json), Path(command.out)
    if (out.parent / "run.json").is_file():
        raise DataError(f"{out}: inside the run {out.parent}, which trains on it; choose another --out")
    with stoppable() as check:
        prepared = prepare(
            command.files,
            command.val,
            out,
            reading=command.reading,
            tokenizer=command.tokenizer,
            vocab_size=command.vocab_size,
            screen=screen,
            check=check,
        )
    met = prepared.passport["counts"]
    notes = [spelled(text) for text in prepared.notes()]
    for text in notes:
        screen.note(text)
    screen.say(
        f"{out}: {met['documents']:,} documents, {met['bytes']:,} bytes, {met['tokens']:,} tokens; "
        f"{prepared.tokenizer.kind} of {prepared.tokenizer.vocab_size:,}; "
        f"{len(prepared.train):,} to train on, {len(prepared.val):,} held out"
    )
    screen.say(f"next  mainstem train --data {out}")
    screen.result({"out": str(out), "notes": notes, **prepared.passport})
