"""`mainstem verify-resume`: kill a run at random moments, resume it, and compare bytes with an uninterrupted one."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.errors import TrainingFailed
from mainstem.training.verify_resume import verify_resume


@dataclass(frozen=True)
class VerifyResume:
    """Prove on this machine that a run which is killed again and again ends in the bytes of one that is not."""

    preset: str = "tiny"
    """What is trained."""
    data: Annotated[tuple[str, ...], arg(metavar="FILE ...")] = ()
    """On which text; without it the preset's."""
    kills: int = 20
    """Times that the process is killed (SIGKILL) at a random moment."""
    terms: int = 5
    """Times that it is asked to stop (SIGTERM) at a random moment."""
    steps: int = 800
    """Steps of the run."""
    save_every: int = 20
    """Steps between checkpoints."""
    dropout: float = 0.1
    """So that dropped units have to be the same too."""
    seed: int = 1
    """Of the moments, and of the run."""
    json: bool = False
    """One object on stdout: identical, kills, terms, starts, ..."""


def main(argv: Sequence[str]) -> None:
    """Parse, verify, print. Raises TrainingFailed if one byte differs."""
    command = parse(VerifyResume, "verify-resume", argv)
    screen = Screen(command.json)
    with (
        stoppable() as check,
        tempfile.TemporaryDirectory(prefix="mainstem-") as where,
        screen.bar("killing", command.kills + command.terms) as bar,
    ):
        result = verify_resume(
            command.preset, Path(where), command.data, kills=command.kills, terms=command.terms, steps=command.steps,
            save_every=command.save_every, dropout=command.dropout, seed=command.seed, should_stop=check,
            progress=bar.at,
        )  # fmt: skip
    if not result["identical"]:
        raise TrainingFailed(f"a resumed run ended differently: {', '.join(result['differences'])}", result)
    screen.say(
        f"{result['kills']} kills and {result['terms']} requests to stop, {result['starts']} starts: "
        "identical with an undisturbed run"
    )
    screen.result(result)
