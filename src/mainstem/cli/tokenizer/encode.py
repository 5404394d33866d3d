"""`mainstem tokenizer encode TOKENIZER [TEXT]`: text to token ids."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli.parts.arguments import Positional, parse
from mainstem.cli.parts.screen import Screen
from mainstem.errors import DataError
from mainstem.formats.run import tokenizer as open_tokenizer


@dataclass(frozen=True)
class Encode:
    """Print the token ids of a text. Names of special tokens in the text are encoded as plain text."""

    tokenizer: Positional[str]
    """A tokenizer.json, or a RUN or prepared folder that holds one."""
    text: Positional[str] = "-"
    """The text; - reads standard input as it is."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, encode, print."""
    command = parse(Encode, "tokenizer encode", argv)
    text = command.text
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input: byte {error.start} is not UTF-8; convert it first") from None
    tokenizer = open_tokenizer(command.tokenizer)
    ids = tokenizer.encode(text)
    if command.json:
        tokens = [tokenizer.decode([i]) for i in ids]
        Screen(json=True).result({"ids": ids, "tokens": tokens, "bytes": len(text.encode())})
    else:
        print(*ids)
