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

from mainstem import durable
from mainstem.cli.parse import Reading, parse
from mainstem.cli.screen import Bar, Screen
from mainstem.cli.signals import stoppable
from mainstem.config import preset
from mainstem.errors import TrainingFailed
from mainstem.text import tokens
from mainstem.training.folder import RunFolder, read_rows

COMPARED = ("model.safetensors", "optim.safetensors")


@dataclass(frozen=True)
class VerifyResume:
    """Prove on this machine that a run which is killed again and again ends in the bytes of one that is not."""

    preset: str = "tiny"
    """What is trained."""
    data: tuple[str, ...] = ()
    """On which text; without it the preset's."""
    kills: int = 20
    """Times that the process is killed (SIGKILL) at a random moment."""
    terms: int = 5
    """Times that it is asked to stop (SIGTERM) at a random moment."""
    steps: int = 400
    """Steps of the run."""
    save_every: int = 20
    """Steps between checkpoints."""
    dropout: float = 0.1
    """So that dropped units have to be the same too."""
    seed: int = 1
    """Of the moments, and of the run."""
    json: bool = False
    """One object on stdout: identical, kills, terms, resumes, ..."""


def main(argv: Sequence[str]) -> None:
    """Parse, verify, print. Raises TrainingFailed if one byte differs."""
    command = parse(VerifyResume, "verify-resume", argv)
    screen = Screen(command.json)
    with stoppable() as check, tempfile.TemporaryDirectory(prefix="mainstem-") as where:
        result = verify(command, Path(where), screen, check)
    screen.say(
        f"{result['kills']} kills and {result['terms']} requests to stop, {result['resumes']} resumes: "
        + ("identical" if result["identical"] else f"different: {', '.join(result['differences'])}")
    )
    if not result["identical"]:
        raise TrainingFailed(f"a resumed run ended differently: {', '.join(result['differences'])}")
    screen.result(result)


def verify(command: VerifyResume, where: Path, screen: Screen, check: Callable[[], None]) -> dict:
    """Train once undisturbed and once under fire, and compare. The text is prepared first: shots are for training."""
    start = preset(command.preset)
    source = Reading().source(command.data or (start.data,))
    tokens.prepare(source, where / "data", vocab_size=start.model.vocab_size, should_stop=check)
    line = [
        sys.executable, "-m", "mainstem", "train", "--preset", command.preset, "--data", str(where / "data"), "--json",
        "--steps", str(command.steps), "--save-every", str(command.save_every), "--eval-every", str(command.steps // 2),
        "--vitals-every", "50", "--seed", str(command.seed), "--model.dropout", str(command.dropout),
    ]  # fmt: skip
    quiet, fired = RunFolder(where / "undisturbed"), RunFolder(where / "disturbed")
    began = time.monotonic()
    _finish(line, quiet)
    whole = time.monotonic() - began
    shots = [signal.SIGKILL] * command.kills + [signal.SIGTERM] * command.terms
    chance = random.Random(command.seed)
    chance.shuffle(shots)
    sent = {signal.SIGKILL: 0, signal.SIGTERM: 0}
    resumes = 0
    with screen.bar("killing", len(shots)) as bar:
        for shot in shots:
            while (missed := _shoot(line, fired, shot, chance, whole, bar, sent, check)) is not None:
                whole, resumes = min(whole, missed), resumes + 1
            resumes += 1
    _finish(line, fired)
    differences = compare(quiet, fired)
    return {
        "identical": not differences,
        "differences": differences,
        "kills": sent[signal.SIGKILL],
        "terms": sent[signal.SIGTERM],
        "resumes": resumes,
        "steps": command.steps,
        "seconds": time.monotonic() - began,
    }


def _finish(line: list[str], run: RunFolder) -> None:
    done = subprocess.run([*line, "--out", str(run.path)], capture_output=True, text=True)
    if done.returncode:
        raise TrainingFailed(f"{run.path}: the run left with {done.returncode}: {done.stderr.strip()[-500:]}")


def _shoot(
    line: list[str], run: RunFolder, shot: int, chance: random.Random, whole: float, bar: Bar,
    sent: dict[signal.Signals, int], check: Callable[[], None],
) -> float | None:  # fmt: skip
    """Start the run, wait for a random moment of it, and shoot; returns its seconds if it ended before the shot.

    A run that has done all its steps is begun again at an earlier checkpoint, so that every shot meets one at work.
    """
    check()
    if _steps_done(run) >= int(line[line.index("--steps") + 1]):
        _rewind(run, chance)
    process = subprocess.Popen([*line, "--out", str(run.path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began, missed = time.monotonic(), None
    try:
        process.wait(chance.uniform(0.0, whole))
        missed = time.monotonic() - began
    except subprocess.TimeoutExpired:
        process.send_signal(shot)
        sent[signal.Signals(shot)] += 1
    code = process.wait()
    if code not in (0, -shot, 128 + shot):
        raise TrainingFailed(f"{run.path}: the run left with {code} after {signal.Signals(shot).name}")
    bar.at(sum(sent.values()), f"step {_steps_done(run)}")
    return missed


def _steps_done(run: RunFolder) -> int:
    found = run.found()
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _rewind(run: RunFolder, chance: random.Random) -> None:
    """Damage the newest checkpoints, so that the next start passes over them."""
    for checkpoint in run.found()[-chance.randint(1, 2) :]:
        (checkpoint / durable.MANIFEST).unlink(missing_ok=True)


def compare(a: RunFolder, b: RunFolder) -> list[str]:
    """What differs between two finished runs: bytes of the last checkpoint's tensors, metrics but for seconds."""
    differences = []
    ends = [run.named("last") for run in (a, b)]
    if None in ends:
        return ["one of them has no last checkpoint"]
    for name in COMPARED:
        if len({durable.sha256(end / name) for end in ends if end is not None}) != 1:
            differences.append(name)
    for file in ("metrics", "vitals"):
        rows = [[{**row, "seconds": 0} for row in read_rows(getattr(run, file))] for run in (a, b)]
        if rows[0] != rows[1]:
            differences.append(f"{file}.jsonl")
    return differences
