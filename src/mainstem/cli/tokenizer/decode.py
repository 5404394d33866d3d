"""`mainstem tokenizer decode TOKENIZER [ID...]`: token ids to text."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from mainstem.cli.parts.arguments import Positional, parse
from mainstem.cli.parts.screen import Screen
from mainstem.errors import UserError
from mainstem.formats.run import tokenizer as open_tokenizer


@dataclass(frozen=True)
class Decode:
    """Write the text of token ids to stdout, byte for byte."""

    tokenizer: Positional[str]
    """A tokenizer.json, or a RUN or prepared folder that holds one."""
    ids: Annotated[Positional[tuple[int, ...]], arg(metavar="[ID ...]")] = ()
    """The ids; by default they are read from standard input."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, decode, print."""
    command = parse(Decode, "tokenizer decode", argv)
    tokenizer = open_tokenizer(command.tokenizer)
    ids = command.ids or tuple(_stdin_ids())
    if command.json:
        Screen(json=True).result({"text": tokenizer.decode(ids), "tokens": len(ids)})
    else:
        sys.stdout.buffer.write(tokenizer.decode_bytes(ids))


def _stdin_ids() -> Iterator[int]:
    for word in sys.stdin.buffer.read().decode("utf-8", "replace").split():
        if not (word.isascii() and word.isdigit() and len(word) < 20):
            raise UserError(f"standard input: {word!r} is not an id; ids are whole numbers between spaces")
        yield int(word)
