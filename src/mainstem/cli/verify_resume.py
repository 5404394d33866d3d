"""`mainstem verify-resume`: kill a run at random moments, resume it, and compare bytes with an uninterrupted one."""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from mainstem import atomic
from mainstem.cli.parts.arguments import TextOptions, parse
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.errors import ConfigError, TrainingFailed
from mainstem.presets import preset
from mainstem.runs.folder import RunFolder, read_rows, step_of
from mainstem.text import tokens

COMPARED = ("model.safetensors", "optim.safetensors")


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
    with stoppable() as check, tempfile.TemporaryDirectory(prefix="mainstem-") as where:
        result = verify(command, Path(where), screen, check)
    if not result["identical"]:
        raise TrainingFailed(f"a resumed run ended differently: {', '.join(result['differences'])}", result)
    screen.say(
        f"{result['kills']} kills and {result['terms']} requests to stop, {result['starts']} starts: "
        "identical with an undisturbed run"
    )
    screen.result(result)


def verify(command: VerifyResume, where: Path, screen: Screen, check: Callable[[], None]) -> dict:
    """Train once undisturbed and once under fire, and compare. The text is prepared first: shots are for training."""
    start = preset(command.preset)
    for name in ("kills", "terms"):
        if getattr(command, name) < 0:
            raise ConfigError(f"{name}: {getattr(command, name)} is not possible; it must be at least 0")
    start.train.replace(steps=command.steps, save_every=command.save_every, seed=command.seed)
    start.model.replace(dropout=command.dropout)
    source = TextOptions().source(command.data or (start.data,))
    tokens.prepare(source, where / "data", vocab_size=start.model.vocab_size, should_stop=check)
    line = [
        sys.executable, "-m", "mainstem", "train", "--preset", command.preset, "--data", str(where / "data"), "--json",
        "--steps", str(command.steps), "--save-every", str(command.save_every), "--eval-every", str(command.steps // 2),
        "--vitals-every", "50", "--device", "cpu", "--seed", str(command.seed), "--model.dropout", str(command.dropout),
    ]  # fmt: skip
    quiet, fired = RunFolder(where / "undisturbed"), RunFolder(where / "disturbed")
    began = time.monotonic()
    _finish(line, quiet)
    shots = [signal.SIGKILL] * command.kills + [signal.SIGTERM] * command.terms
    target = _Target(line, fired, command.steps, time.monotonic() - began, random.Random(command.seed))
    target.chance.shuffle(shots)
    with screen.bar("killing", len(shots)) as bar:
        for number, shot in enumerate(shots, 1):
            struck = False
            while not struck:
                check()
                struck = target.shoot(shot)
            bar.at(number, f"step {_steps_done(fired)}")
    _finish(line, fired)
    differences = compare(quiet, fired)
    return {
        "identical": not differences,
        "differences": differences,
        "kills": command.kills,
        "terms": command.terms,
        "starts": target.starts + 1,
        "steps": command.steps,
        "seconds": time.monotonic() - began,
    }


def _finish(line: list[str], run: RunFolder) -> None:
    done = subprocess.run([*line, "--out", str(run.path)], capture_output=True, text=True)
    if done.returncode:
        raise TrainingFailed(f"{run.path}: the run left with {done.returncode}: {done.stderr.strip()[-500:]}")


@dataclass
class _Target:
    """A run that is shot at."""

    line: list[str]
    run: RunFolder
    steps: int
    window: float
    """Seconds from a start within which the shot falls."""
    chance: random.Random
    starts: int = 0

    def shoot(self, shot: signal.Signals) -> bool:
        """Start the run, wait for a random moment, and shoot; returns whether the shot met a run that was going on.

        A run that has done all its steps is begun again at an earlier checkpoint, so that there is one to meet.
        """
        if _steps_done(self.run) >= self.steps:
            for checkpoint in self.run.found()[-self.chance.randint(1, 2) :]:
                (checkpoint / atomic.MANIFEST).unlink(missing_ok=True)  # the next start passes over it
        self.starts += 1
        began, quiet = time.monotonic(), subprocess.DEVNULL
        process = subprocess.Popen([*self.line, "--out", str(self.run.path)], stdout=quiet, stderr=quiet)
        try:
            process.wait(self.chance.uniform(0.0, self.window))
            struck, self.window = False, min(self.window, time.monotonic() - began)
        except subprocess.TimeoutExpired:
            struck = True
            process.send_signal(shot)
        code = process.wait()
        if code not in (0, -shot, 128 + shot):
            raise TrainingFailed(f"{self.run.path}: the run left with {code} after {shot.name}")
        return struck


def _steps_done(run: RunFolder) -> int:
    found = run.found()
    return step_of(found[-1]) if found else 0


def compare(a: RunFolder, b: RunFolder) -> list[str]:
    """What differs between two finished runs: bytes of the last checkpoint's tensors, metrics but for seconds."""
    differences = []
    ends = [run.named("last") for run in (a, b)]
    if None in ends:
        return ["one of them has no last checkpoint"]
    for name in COMPARED:
        if len({atomic.sha256(end / name) for end in ends if end is not None}) != 1:
            differences.append(name)
    if len({best and best.name for best in (run.named("best") for run in (a, b))}) != 1:
        differences.append("best.json")
    for file in ("metrics", "vitals"):
        rows = [[{**row, "seconds": 0} for row in read_rows(getattr(run, file))] for run in (a, b)]
        if rows[0] != rows[1]:
            differences.append(f"{file}.jsonl")
    return differences
