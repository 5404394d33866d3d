"""Verbs with subcommands: their table, and the module of the one that was typed."""

import importlib
from collections.abc import Mapping, Sequence

from mainstem.errors import UserError, nearest


def choose(verb: str, about: str, table: Mapping[str, str], argv: Sequence[str], what: str = "question") -> None:
    """Run the question that argv names first, `mainstem.cli.{verb}.{question}`; without one, say what there is.

    `what` the table's rows are called.
    """
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:<13}{does}" for name, does in table.items())
        print(f"usage: mainstem {verb} {what.upper()} ...\n\n{about}\n\n{lines}\n")
        print(f"mainstem {verb} {what.upper()} --help   its arguments\n--json   one object on stdout")
        return
    if argv[0] not in table:
        raise UserError(f"{verb}: unknown {what} {argv[0]!r}; {nearest(argv[0], table)}")
    importlib.import_module(f"mainstem.cli.{verb}.{argv[0].replace('-', '_')}").main(argv[1:])
