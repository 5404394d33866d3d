"""The proof of law 9 on this machine: kill a run at random moments, resume it, compare with an uninterrupted one."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstem import atomic
from mainstem.errors import ConfigError, TrainingFailed
from mainstem.presets import preset
from mainstem.runs.folder import MODEL, OPTIM, RunFolder, read_rows, step_of
from mainstem.text import tokens
from mainstem.text.corpus import Source


def verify_resume(
    name: str,
    where: Path,
    data: Sequence[str] = (),
    *,
    kills: int = 20,
    terms: int = 5,
    steps: int = 800,
    save_every: int = 20,
    dropout: float = 0.1,
    seed: int = 1,
    should_stop: Callable[[], None] = lambda: None,
    progress: Callable[[int, str], None] = lambda signals, text: None,
) -> dict[str, Any]:
    """Train once undisturbed and once under signals, and compare. The text is prepared before the first signal.

    Args:
        name: the preset that is trained.
        where: an empty folder, in which the runs are written and their processes work.
        data: text files or a bundled corpus; the preset's if there are none.
        kills: how often the process is killed (SIGKILL) at a random moment.
        terms: how often it is asked to stop (SIGTERM) at a random moment.
        steps, save_every, dropout: of the run.
        seed: of the run, and of the moments.
        should_stop: called before each start; it may raise.
        progress: called with the signals that met a running process, and a sentence.

    Returns `identical`, `differences` (what `compare` returns), `kills`, `terms`, `starts`, `steps` and `seconds`.
    Raises TrainingFailed if a run ends by itself with an error.
    """
    start = preset(name)
    for field, count in (("kills", kills), ("terms", terms)):
        if count < 0:
            raise ConfigError(f"{field}: {count} is not possible; it must be at least 0")
    start.train.replace(steps=steps, save_every=save_every, seed=seed)
    start.model.replace(dropout=dropout)
    where = where.resolve()
    source = Source(tuple(data) or (start.data,))
    tokens.prepare(source, where / "data", vocab_size=start.model.vocab_size, should_stop=should_stop)
    line = [  # -P: nothing in the working folder is imported
        sys.executable, "-P", "-m", "mainstem", "train", "--preset", name, "--data", str(where / "data"), "--json",
        "--steps", str(steps), "--save-every", str(save_every), "--eval-every", str(steps // 2),
        "--vitals-every", "50", "--device", "cpu", "--seed", str(seed), "--model.dropout", str(dropout),
    ]  # fmt: skip
    undisturbed, disturbed = RunFolder(where / "undisturbed"), RunFolder(where / "disturbed")
    began = time.monotonic()
    _finish(line, undisturbed)
    signals = [signal.SIGKILL] * kills + [signal.SIGTERM] * terms
    target = _Target(line, disturbed, steps, time.monotonic() - began, random.Random(seed))
    target.chance.shuffle(signals)
    for number, signum in enumerate(signals, 1):
        met = False
        while not met:
            should_stop()
            met = target.interrupt(signum)
        progress(number, f"step {_steps_done(disturbed)}")
    _finish(line, disturbed)
    differences = compare(undisturbed, disturbed)
    return {
        "identical": not differences,
        "differences": differences,
        "kills": kills,
        "terms": terms,
        "starts": target.starts + 1,
        "steps": steps,
        "seconds": time.monotonic() - began,
    }


def _finish(line: list[str], run: RunFolder) -> None:
    """Let the run train to its end."""
    done = subprocess.run([*line, "--out", str(run.path)], capture_output=True, text=True, cwd=run.path.parent)
    if done.returncode:
        raise TrainingFailed(f"{run.path}: the run left with {done.returncode}: {done.stderr.strip()[-500:]}")


@dataclass
class _Target:
    """A run that is interrupted."""

    line: list[str]
    run: RunFolder
    steps: int
    window: float
    """Seconds from a start within which the signal is sent."""
    chance: random.Random
    starts: int = 0

    def interrupt(self, signum: signal.Signals) -> bool:
        """Start the run, wait for a random moment, and send the signal; returns whether it met a running process.

        A run that has done all its steps is resumed from an earlier checkpoint, so that there is one to meet.
        """
        if _steps_done(self.run) >= self.steps:
            for checkpoint in self.run.found()[-self.chance.randint(1, 2) :]:
                (checkpoint / atomic.MANIFEST).unlink(missing_ok=True)  # the next start passes over it
        self.starts += 1
        began, quiet = time.monotonic(), subprocess.DEVNULL
        process = subprocess.Popen(
            [*self.line, "--out", str(self.run.path)], stdout=quiet, stderr=quiet, cwd=self.run.path.parent
        )
        try:
            try:
                process.wait(self.chance.uniform(0.0, self.window))
                met, self.window = False, min(self.window, time.monotonic() - began)
            except subprocess.TimeoutExpired:
                met = True
                process.send_signal(signum)
            code = process.wait()
        finally:  # also where the wait is interrupted
            process.kill()
            process.wait()
        if code not in (0, -signum, 128 + signum):
            raise TrainingFailed(f"{self.run.path}: the run left with {code} after {signum.name}")
        return met


def _steps_done(run: RunFolder) -> int:
    checkpoints = run.found()
    return step_of(checkpoints[-1]) if checkpoints else 0


def compare(a: RunFolder, b: RunFolder) -> list[str]:
    """The files that differ between two finished runs: tensors of the last checkpoint by their bytes, the name of the
    best checkpoint, rows of metrics and vitals but for seconds."""
    ends = [run.named("last") for run in (a, b)]
    if None in ends:
        return ["one of them has no last checkpoint"]
    differences = [
        name for name in (MODEL, OPTIM) if len({atomic.sha256(end / name) for end in ends if end is not None}) != 1
    ]
    if len({best and best.name for best in (run.named("best") for run in (a, b))}) != 1:
        differences.append("best.json")
    for file in ("metrics", "vitals"):
        rows = [[{**row, "seconds": 0} for row in read_rows(getattr(run, file))] for run in (a, b)]
        if rows[0] != rows[1]:
            differences.append(f"{file}.jsonl")
    return differences
