"""What can go wrong, said once: the file, the number, and the fix.

A `UserError` is raised where the fault is found and caught in one place, the command line, which prints its message
and leaves with its `exit_code`. Anything else that escapes is a fault of mainstem's own.
"""

import difflib
from collections.abc import Iterable, Mapping

LONGEST = 80
"""Characters of a value in a message."""


class UserError(Exception):
    """The input is wrong. The message names the file or field, the number, and what to do about it."""

    exit_code = 2

    def __init__(self, message: str, facts: Mapping[str, object] | None = None):
        super().__init__(message)
        self.facts = dict(facts or {})
        """What a program may want to know besides, as --json shows it."""


class ConfigError(UserError):
    """A field that does not exist, a value out of range, or two values that exclude each other."""


class DataError(UserError):
    """A text, a tokenizer or a token file that cannot be used as it is."""


class RunError(UserError):
    """A run folder or a checkpoint that cannot be opened, resumed or written."""


class TrainingFailed(UserError):
    """The input was fine and the run still failed: a non-finite loss, a full disk."""

    exit_code = 1


class Interrupted(UserError):
    """A signal ended the work at a safe point. `exit_code` is 128 + the signal's number, as shells have it."""

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.exit_code = 128 + signum


def shown(value: object) -> str:
    """A value as a message has it: on one line, and not long."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest valid one, or all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"
