"""`mainstem compile`: the compiled decoder of this machine: make it now, show it, remove it."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.errors import UserError

PATIENCE = 600.0
"""Seconds that another process is waited for."""


@dataclass(frozen=True)
class Compile:
    """Compile the faster decoder for this machine now; otherwise `generate` has it compiled in the background."""

    status: bool = False
    """Show where it is kept and whether it is there; compile nothing."""
    remove: bool = False
    """Remove what was compiled, of every version."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, compile, print."""
    command = parse(Compile, "compile", argv)
    screen = Screen(command.json)
    from mainstem.generation.compiled import store

    if command.status and command.remove:
        raise UserError("--status and --remove do not go together; leave one of them out")
    removed = [str(path) for path in store.remove()] if command.remove else []
    path = store.folder()
    if path is None:
        raise UserError("numba is not installed, so PyTorch decodes; pip install 'mainstem[fast]'")
    if not (command.status or command.remove) and not store.ready():
        screen.say("compiling the decoder; this takes a minute or two")
        if not store.build(PATIENCE):
            raise UserError(f"{path}: another process is still compiling after {PATIENCE:.0f} s; stop it, try again")
    state = "ready" if store.ready() else "being compiled" if store.underway() else store.failure() or "not compiled"
    for each in removed:
        screen.say(f"removed {each}")
    screen.say(f"{path}: {state}")
    screen.result({"folder": str(path), "state": state, "removed": removed})
