"""Messages name config fields and arguments; the command line spells them as the flags of the command that was typed.

"lower `micro_batch`" is shown as "lower --micro-batch", and "n_head: 3 heads do not divide d_model 64" as
"--model.n-head: 3 heads ...". A name that the command has no flag for stays as it is.
"""

import dataclasses
import re
import typing
from typing import Any

from mainstem.errors import UserError

_NAME = re.compile(r"`([a-z][a-z0-9_]*)`")
_typed: dict[str, str] = {}
"""The flags of the command that this process runs."""


def remember(command: type | None) -> None:
    """Spell names as the flags of this command from now on; None before one is parsed."""
    _typed.clear()
    _typed.update({} if command is None else of(command))


def of(command: Any) -> dict[str, str]:
    """The flag of each field of a command's dataclass: {"run": "RUN", "lr": "--lr", "n_ctx": "--model.n-ctx", ...}.

    Where dataclasses inside it share a field's name, the first one counts; the command's own fields come before both.
    """
    from tyro.conf import OmitArgPrefixes, Positional

    own, inner = dict[str, str](), dict[str, str]()
    hints: dict[str, Any] = typing.get_type_hints(command, include_extras=True)
    for name in (field.name for field in dataclasses.fields(command)):
        marks = getattr(hints[name], "__metadata__", ())
        kind: Any = typing.get_args(hints[name])[0] if marks else hints[name]
        flag = name.replace("_", "-")
        if dataclasses.is_dataclass(kind):
            prefix = "--" if OmitArgPrefixes in marks else f"--{flag}."
            inner = {field: spelling.replace("--", prefix, 1) for field, spelling in of(kind).items()} | inner
        else:
            own[name] = name.upper() if Positional in marks else f"--{flag}"
    return inner | own


def spelled(text: str, command: type | None = None) -> str:
    """The text with each name in backticks as its flag: of `command`, by default the one that was typed."""
    flags = _typed if command is None else of(command)
    return _NAME.sub(lambda name: flags.get(name[1], name[0]), text)


def message(error: UserError) -> str:
    """The error's message with flags for names; the field at fault, which stands before the colon, too."""
    text = spelled(str(error))
    return text if error.field not in _typed else _typed[error.field] + text[len(error.field) :]


def out_of_memory() -> str:
    """What to do when memory ran out: the command's own knobs, where it has some."""
    if "micro_batch" in _typed:
        return spelled("out of memory; lower `micro_batch`, `n_ctx` or the model's size")
    return "out of memory; take a smaller model or shorter texts, or close other programs"
