"""Flags to dataclasses, by tyro, and the pieces of a command line that several verbs share."""

import contextlib
import inspect
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes as Flat
from tyro.conf import Positional

from mainstem.cli.parts import flags
from mainstem.config import ModelConfig
from mainstem.errors import UserError, nearest
from mainstem.presets import PRESETS
from mainstem.runs.folder import BUNDLED
from mainstem.text.corpus import TextOptions

__all__ = ["Flat", "Positional", "TextOptions", "config_of", "parse"]

Command = TypeVar("Command")
RENAMED = {"--dtype": "--weights", "--kind": "--tokenizer", "--tuned": "--lens tuned"}
"""Flags of earlier versions, and what they are called now, in the commands that have the new one."""
_HELP = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
"""Show neither None as a choice nor a positional by its type."""
_BOX = " │─╭╮╰╯|+"
"""What tyro draws around its words."""


def parse(
    command: type[Command], verb: str, argv: Sequence[str], default: Any = None, program: str = "mainstem"
) -> Command:
    """The command that argv spells; `default` gives the values of what is not typed.

    Raises UserError with tyro's message, or with the new name of a flag that was renamed; SystemExit after --help.
    """
    flags.remember(command)
    options: dict[str, Any] = {} if default is None else {"default": default}
    about = textwrap.fill(inspect.getdoc(command) or "", 80, initial_indent="  ", subsequent_indent="  ")
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(
                command, prog=f"{program} {verb}", description=about, args=list(argv), config=_HELP, **options
            )
    except SystemExit as left:
        if not left.code:  # --help
            raise
        if (ours := _user_error(left)) is not None:
            raise ours from None
        valid = set(flags.of(command).values())
        for old in {word.partition("=")[0] for word in argv} & RENAMED.keys() - valid:
            if (new := RENAMED[old]).split()[0] in valid:
                raise UserError(f"{old} is now {new}; {program} {verb} --help lists the flags") from None
        lines = (line.strip(_BOX) for line in stderr.getvalue().splitlines()[1:])  # the first is the box's title
        raise UserError("\n".join(line for line in lines if line.strip("-"))) from None


def _user_error(left: SystemExit) -> UserError | None:
    """The error that a dataclass of ours raised, which tyro takes for a ValueError and leaves for."""
    error: BaseException | None = left
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def config_of(target: str) -> ModelConfig:
    """The model's config of a preset or a RUN, without reading weights. Raises UserError with the nearest preset."""
    from mainstem.formats import run

    if target in PRESETS and not run.is_run(target):  # a folder here comes first
        return PRESETS[target].model
    if not Path(target).exists() and target not in BUNDLED:
        raise UserError(f"{target}: neither a preset nor a RUN; {nearest(target, PRESETS)}")
    return run.model_config(target)
