"""The errors that mainstem raises: each message names the file or field, the number, and the fix.

A `UserError` is raised where the fault is detected; the command line catches it in one place, prints its message and
leaves with its `exit_code`. Any other exception that escapes is a bug in mainstem. Each kind is also the built-in
exception that Python users expect, so `except ValueError` catches a wrong argument.

A message speaks of config fields and arguments by name, and never of flags: a ConfigError begins with the name of the
field at fault and a colon, and the fix puts names in backticks ("lower `micro_batch`"). The command line spells both
as flags.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

LONGEST = 80
"""The most characters of a value that a message quotes."""
_FIELD = re.compile(r"([a-z][a-z0-9_]*): ")


class UserError(Exception):
    """The input is wrong. The message names the file or field, the number, and what to do about it."""

    exit_code = 2

    def __init__(self, message: str, facts: Mapping[str, object] | None = None):
        super().__init__(message)
        self.facts = dict(facts or {})
        """Further values for a program, as --json prints them."""

    def __str__(self) -> str:
        return str(self.args[0])  # also where a built-in base class would print an errno

    @property
    def field(self) -> str | None:
        """The config field or argument at fault, where there is one."""
        return None


class ConfigError(UserError, ValueError):
    """A field that does not exist, a value out of range, or two values that exclude each other."""

    @property
    def field(self) -> str | None:
        """The config field or argument at fault: `n_head` of "n_head: 3 heads do not divide d_model 64; ..."."""
        match = _FIELD.match(str(self))
        return match[1] if match else None


class DataError(UserError, ValueError):
    """A text, a tokenizer or a token file that cannot be used as it is."""


class RunError(UserError, OSError):
    """A run folder or a checkpoint that cannot be opened, resumed or written. Its `errno` is None."""


class TrainingFailed(UserError, RuntimeError):
    """The input was fine and the run still failed: a non-finite loss, a full disk."""

    exit_code = 1


class Interrupted(UserError):
    """A signal ended the work at a safe point. `exit_code` is 128 + the signal's number, as shells have it."""

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.exit_code = 128 + signum


def shown(value: object) -> str:
    """The value's repr on one line, cut to `LONGEST` characters: how messages quote it."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest valid one, or all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"
