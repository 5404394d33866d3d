"""`mainstem tokenizer train|encode|decode`."""

from collections.abc import Sequence

from mainstem.cli.parts.subcommands import choose

SUBCOMMANDS = {  # each lives in the module of its name
    "train": "train a tokenizer on text",
    "encode": "text to token ids",
    "decode": "token ids to text",
}


def main(argv: Sequence[str]) -> None:
    """Run the subcommand that was typed."""
    choose("tokenizer", "Train a tokenizer; encode and decode with one.", SUBCOMMANDS, argv, "command")
