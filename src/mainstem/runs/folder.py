"""A run folder: which file is where, who may write, which checkpoint is valid. No torch, so that `info` stays quick.

RUN/run.json            what was asked for: preset, model, training, data
RUN/metrics.jsonl       a row a step, a row an evaluation
RUN/vitals.jsonl        a row a block, at chosen steps
RUN/data/               token files with their passport (or the path of a prepared folder in run.json)
RUN/checkpoints/        step-00001200/ and so on, each whole or absent
RUN/last.json best.json each names a checkpoint
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mainstem import atomic
from mainstem.errors import RunError
from mainstem.text.tokens import PASSPORT, TOKENIZER

FORMAT = "mainstem/1"
CONFIG = "config.json"
MODEL, OPTIM, STATE, CARD = "model.safetensors", "optim.safetensors", "state.json", "README.md"
BUNDLED = {"bard": Path(__file__).with_name("bundled") / "bard"}
"""The models that come with the package, by name: checkpoint folders; each has its card, README.md."""
_STEP = re.compile(r"^step-(\d{8,})$")


def is_step(path: Path) -> bool:
    """Whether the path has a checkpoint folder's name."""
    return _STEP.match(path.name) is not None


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder name says."""
    match = _STEP.match(checkpoint.name)
    if match is None:
        raise RunError(f"{checkpoint}: not a checkpoint folder; its name should be step- and eight digits")
    return int(match[1])


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.run_json, self.data = self.path / "run.json", self.path / "data"
        self.metrics, self.vitals = self.path / "metrics.jsonl", self.path / "vitals.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self._held = False

    def exists(self) -> bool:
        """Whether a run was started in this folder."""
        return self.run_json.is_file()

    def settings(self) -> dict[str, Any]:
        """The value of `run.json`. Raises RunError if it is no run's."""
        settings = atomic.read_json(self.run_json)
        if not _is_ours(settings, "model", "train"):
            raise RunError(f"{self.run_json}: not a {FORMAT} run; it was written by another program or version")
        return settings

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Replace `run.json`."""
        atomic.write_text(self.run_json, atomic.to_json({"format": FORMAT, **settings}))

    def prepared(self) -> Path | None:
        """The folder of the run's token files, its own or the prepared one that it was started with.

        None if that is missing or its hashes have changed.
        """
        settings = self.settings() if self.exists() else {}
        for place in (self.data, *map(Path, settings.get("asked", {}).get("data", ()))):
            if (place / PASSPORT).is_file():
                files = atomic.read_json(place / PASSPORT).get("files", {})
                hashes = {name: entry.get("sha256") for name, entry in files.items()}
                if hashes == settings.get("data", hashes):
                    return place
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator["RunFolder"]:
        """Lock the run for writing; this object may enter it again while it holds the lock.

        Raises RunError with the pid of the process that holds the lock, and where no run can be: in a folder that
        cannot be created, that is inside another run, or whose run.json is missing.
        """
        if self._held:
            yield self
            return
        weights = (self.path / CONFIG).exists() or any(self.path.glob("*.safetensors"))
        if weights and not self.exists():
            raise RunError(
                f"{self.path}: a model's folder, in which nothing is trained; start a run in a new folder with "
                f"`init_from` {self.path}"
            )
        if self.found() and not self.exists():
            raise RunError(f"{self.path}: checkpoints and no run.json; restore that, or choose another folder")
        if self.path.name == "checkpoints" or is_step(self.path):
            raise RunError(f"{self.path}: a place inside a run folder; name the run folder itself, or another")
        here = self.path.absolute()
        fresh = [folder for folder in (here, *here.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be made ({error.strerror}); choose another folder") from None
        file, holder = self.path / "lock", self.path / "lock.pid"
        unlocked = not file.exists()
        lock = FileLock(file, thread_local=False)  # the system releases it when the process ends
        try:
            lock.acquire(timeout=0)
        except Timeout:
            pid = holder.read_text(encoding="utf-8") if holder.is_file() else "?"
            raise RunError(
                f"{self.path}: process {pid} is writing to this run; wait for it, stop it, or choose another folder"
            ) from None
        with lock:
            holder.write_text(str(os.getpid()), encoding="utf-8")  # a locked file cannot be read on every system
            for folder in (self.path, self.checkpoints):
                atomic.remove_leftovers(folder, ours=True)
            self._held = True
            try:
                yield self
            finally:
                self._held = False
                holder.unlink(missing_ok=True)
                refused = unlocked and not self.exists()  # before it began: what was not there is removed again
                if refused:
                    with contextlib.suppress(OSError):  # Windows keeps a locked file
                        file.unlink(missing_ok=True)  # while it is held: nobody else can hold what is removed
                lock.release(force=True)
                if refused:
                    with contextlib.suppress(OSError):
                        for folder in fresh:
                            folder.rmdir()

    def found(self) -> list[Path]:
        """Every checkpoint folder by step, valid or damaged."""
        if not self.checkpoints.is_dir():
            return []
        return sorted((p for p in self.checkpoints.iterdir() if is_step(p) and p.is_dir()), key=step_of)

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest valid checkpoint, every file verified, and the fault of each newer one that is damaged."""
        passed_over: list[str] = []
        for checkpoint in reversed(self.found()):
            fault = atomic.fault(checkpoint)
            if fault is None:
                return checkpoint, passed_over
            passed_over.append(fault)
        return None, passed_over

    def checkpoint_at(self, step: int) -> Path:
        """Where the checkpoint of a step stands."""
        return self.checkpoints / f"step-{step:08d}"

    def named(self, name: str) -> Path | None:
        """The checkpoint that `last` or `best` names, if the file is valid and the checkpoint exists."""
        try:
            value = atomic.read_json(self.path / f"{name}.json")
        except RunError:
            return None  # it only repeats what the rows and the checkpoints tell
        named = str(value.get("checkpoint", "") if isinstance(value, dict) else "")
        checkpoint = self.checkpoints / named
        return checkpoint if _STEP.match(named) and checkpoint.is_dir() else None

    def name(self, name: str, checkpoint: Path, **facts: Any) -> None:
        """Let `last` or `best` name a checkpoint."""
        atomic.write_text(self.path / f"{name}.json", atomic.to_json({"checkpoint": checkpoint.name, **facts}))

    def unname(self, name: str) -> None:
        """Let `last` or `best` name nothing."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest `keep` and those that `last` and `best` name."""
        spared = {self.named("last"), self.named("best")}
        for checkpoint in self.found()[:-keep]:
            if checkpoint not in spared:
                shutil.rmtree(checkpoint)

    def best_or_last(
        self, notice: Callable[[str], None] = lambda text: None, names: Collection[str] | None = None
    ) -> Path:
        """The checkpoint to open: best if there is one, else last, else the newest valid one.

        `names` are the files whose sha256 is compared, all if None. `notice` is called with a sentence for each damaged
        checkpoint that is passed over. Raises RunError if no checkpoint is valid.
        """
        faults: dict[Path, str] = {}
        for checkpoint in (self.named("best"), self.named("last"), *reversed(self.found())):
            if checkpoint is None or checkpoint in faults:
                continue
            if (fault := atomic.fault(checkpoint, names, optional=(TOKENIZER,))) is None:
                for text in faults.values():
                    notice(f"passed over {text}; {checkpoint} is opened")
                return checkpoint
            faults[checkpoint] = fault
        raise RunError(f"{self.path}: nothing to open: {'; '.join(faults.values()) or 'it has no checkpoint yet'}")


def run_of(checkpoint: Path) -> RunFolder | None:
    """The run in which a checkpoint folder stands; None for one that stands alone."""
    checkpoint = checkpoint.resolve()
    run = RunFolder(checkpoint.parent.parent)
    inside = is_step(checkpoint) and checkpoint.parent == run.checkpoints and run.exists()
    return run if inside else None


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file of ours; a last line that a kill left unfinished is passed over."""
    if not file.is_file():
        return []
    rows: list[dict[str, Any]] = []
    lines = file.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise ValueError
            rows.append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                raise RunError(f"{file}, line {number}: no row of ours; restore the file or remove the line") from None
    return rows


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Add one row."""
    with atomic.room_for(file), open(file, "a", encoding="utf-8") as out:
        out.write(atomic.to_json(row, indent=None) + "\n")


def cut_rows(file: Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrite a JSONL file with the rows to keep, and return them."""
    rows = [row for row in read_rows(file) if keep(row)]
    if file.is_file():
        atomic.write_text(file, "".join(atomic.to_json(row, indent=None) + "\n" for row in rows))
    return rows


MAY_CHANGE = {"save_every", "eval_every", "vitals_every", "sample_every", "keep", "device", "recompute"}
"""Settings of a run that may change as it goes on; `steps` may where that is asked for, the rest may not."""


def refuse_changes(run: Path, saved: dict[str, Any], now: dict[str, Any], extend: bool) -> None:
    """Raise RunError with both values of a setting that a run cannot change as it goes on."""
    changed = [name for name in saved if name in now and saved[name] != now[name] and name not in MAY_CHANGE]
    if extend and "steps" in changed:
        changed.remove("steps")
    if changed == ["steps"]:
        raise RunError(
            f"{run}: steps: the run was started for {saved['steps']:,}, and {now['steps']:,} were asked for; "
            "add `extend` to go on to that step, with the schedule stretched to it"
        )
    if changed:
        pairs = "; ".join(f"{name}: saved {saved[name]!r}, asked for {now[name]!r}" for name in changed)
        raise RunError(f"{run}: a run cannot change as it goes on ({pairs}); choose another folder")


def checkpoint_settings(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's `config.json` says: `model` and `train`."""
    settings = atomic.read_json(checkpoint / CONFIG)
    if not _is_ours(settings, "model"):
        raise RunError(f"{checkpoint / 'config.json'}: not {FORMAT}; it was written by another program or version")
    return settings


def _is_ours(settings: Any, *parts: str) -> bool:
    ours = isinstance(settings, dict) and settings.get("format") == FORMAT
    return ours and all(isinstance(settings.get(part), dict) for part in parts)
