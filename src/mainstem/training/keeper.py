"""The keeper: writes a run folder from a training's events, so that it can be resumed exactly."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mainstem import atomic
from mainstem.errors import Interrupted, RunError, TrainingFailed
from mainstem.formats.load import load
from mainstem.formats.run import ModelFolder
from mainstem.runs import checkpoint, folder
from mainstem.runs.folder import RunFolder, append_row, cut_rows, refuse_changes
from mainstem.runs.provenance import software
from mainstem.training import doctor
from mainstem.training.events import CheckpointDue, Evaluated, Event, Notice, Observed, Saved, Step
from mainstem.training.loop import NonFinite, Training


@dataclass
class Keeper:
    """A run on disk: `for event in Keeper(RunFolder("runs/x"), training).events()` starts it, or resumes it.

    It alone writes: `run.json`, `metrics.jsonl`, `vitals.jsonl`, checkpoints, `last.json` and `best.json`.

    Args:
        run: the run folder.
        training: at step 0; it is moved to the newest valid checkpoint.
        settings: what else `run.json` should hold; `asked` is the request, compared by whoever made it.
        init_from: a RUN whose weights are the initial ones of a new run.
        extend: whether `steps` may differ from what the run was started with.
    """

    run: RunFolder
    training: Training
    settings: dict[str, Any] = field(default_factory=dict)
    init_from: Path | str | ModelFolder | None = None
    extend: bool = False

    def events(self) -> Iterator[Event]:
        """Train, and write each event down before it is yielded; a checkpoint that is due becomes Saved.

        Raises TrainingFailed (non-finite numbers, full disk), Interrupted, or RunError (cannot resume).
        """
        training = self.training
        with self.run.locked():
            yield from self._start()
            try:
                for event in training.events():
                    yield self._keep(event)
            except NonFinite as error:
                self._fail(error)
            except Interrupted:
                if training.done and atomic.fault(self.run.checkpoint_at(training.done)) is not None:
                    yield self._save()
                raise

    def _keep(self, event: Event) -> Event:
        """Write an event to the folder."""
        if isinstance(event, Step):
            append_row(self.run.metrics, event.row())
        elif isinstance(event, Observed):
            for row in event.rows:
                append_row(self.run.vitals, row)
        elif isinstance(event, CheckpointDue):
            return self._save()
        elif isinstance(event, Evaluated):
            append_row(self.run.metrics, event.row())
            if event.best:
                atomic.sync(self.run.metrics)
                self._name_best(event.row())
        return event

    def _start(self) -> Iterator[Event]:
        training, config = self.training, self.training.config
        newest, faults = self.run.newest()
        for fault in faults:
            yield Notice(f"passed over {fault}")
        if newest is None and self.init_from is not None:
            name = self.init_from.name if isinstance(self.init_from, ModelFolder) else self.init_from
            training.begin_with(*load(self.init_from), name)
        yield from self._keep_settings(newest)
        if newest is not None:
            state, moments = checkpoint.resume(newest, training.model)
            training.resume(state["step"], moments)
            yield Notice(f"resumed at step {training.done:,} of {config.steps:,} from {newest}")
        elif faults:
            yield Notice("no checkpoint was valid; started again from step 0")
        self._cut_rows()
        if training.done >= config.steps:
            yield Notice(f"this run has done its {config.steps:,} steps; `extend` with more `steps` trains it on")
            return
        disk = doctor.disk(training.model_config, config, self.run.path, len(self.run.found()))
        if not disk.ok:
            raise TrainingFailed(f"{self.run.path}: {disk.text}")

    def _save(self) -> Saved:
        training = self.training
        for rows in (self.run.metrics, self.run.vitals):  # a checkpoint never outlives the rows that lead to it
            if rows.is_file():
                atomic.sync(rows)
        path = self.run.checkpoint_at(training.done)
        tokens = training.done * training.config.batch_size * training.model_config.n_ctx
        checkpoint.save(
            path,
            training.model,
            training.data.tokenizer,
            train=training.config.to_dict(),
            optimizer=training.optimizer.tensors(),
            state={"step": training.done, "tokens": tokens},
        )
        self.run.name("last", path, step=training.done)
        self.run.prune(training.config.keep)
        return Saved(training.done, path)

    def _name_best(self, row: dict[str, Any]) -> None:
        facts = {key: row[key] for key in ("kind", "step", "loss", "bits_per_byte")}
        self.run.name("best", self.run.checkpoint_at(row["step"]), **facts)

    def _cut_rows(self) -> None:
        """Drop the rows past the step that training starts at, and recall the best evaluation that is left."""
        training = self.training
        rows = cut_rows(self.run.metrics, lambda row: row.get("kind") != "failure" and row["step"] <= training.done)
        cut_rows(self.run.vitals, lambda row: row["step"] < training.done)
        evaluations = [row for row in rows if row.get("kind") == "eval"]
        training.evaluated = max((row["step"] for row in evaluations), default=-1)
        best = min((row for row in evaluations if row["loss"] is not None), key=lambda row: row["loss"], default=None)
        if best is None or not self.run.checkpoint_at(best["step"]).is_dir():
            self.run.unname("best")
        else:
            training.best = best["loss"]
            self._name_best(best)

    def _keep_settings(self, newest: Path | None) -> Iterator[Event]:
        """Write `run.json`; refuse other data than it names, and say when bytes may differ from one run's."""
        training = self.training
        data = {name: entry["sha256"] for name, entry in training.data.passport["files"].items()}
        device, threads = str(training.device.device), torch.get_num_threads()
        made_with = {
            "torch": str(torch.__version__), "threads": threads, "device": device, "kernels": training.kernels
        }  # fmt: skip
        configs = {"model": training.model.config.to_dict(), "train": training.config.to_dict()}
        saved = self.run.settings() if self.run.exists() else {}
        if saved:
            for name, sha256 in saved.get("data", data).items():
                if data.get(name) != sha256:
                    raise RunError(
                        f"{training.data.path / name}: not what {self.run.path} was started with (its sha256 differs); "
                        "give the same data, or choose another folder"
                    )
            if not ("asked" in saved and "asked" in self.settings):  # two requests were compared by who made them
                for kind, now in configs.items():
                    refuse_changes(self.run.path, saved[kind], now, self.extend)
            if self.extend and newest is not None and training.config.steps < folder.step_of(newest):
                done = folder.step_of(newest)
                raise RunError(
                    f"{self.run.path}: {done:,} steps are done, more than the {training.config.steps:,} asked for"
                )
            before = saved.get("made_with", made_with)
            if before != made_with:
                yield Notice(f"begun with {before}, resumed with {made_with}: the bytes may differ from one run's")
        made_by = saved.get("software") or software()
        asked = {"asked": saved["asked"]} if "asked" in saved else {}
        if asked and "asked" not in self.settings:  # what may change has changed there too
            asked["asked"] = asked["asked"] | {"train": asked["asked"]["train"] | configs["train"]}
        settings = {**configs, "data": data, "made_with": made_with, "software": made_by, **asked, **self.settings}
        self.run.write_settings(settings)

    def _fail(self, error: NonFinite) -> None:
        """Remove the checkpoint of weights that are to blame, name the newest valid one, and leave a row.

        A checkpoint that was evaluated, or whose gradient alone is not finite, stays. Raises TrainingFailed.
        """
        at = self.run.checkpoint_at(self.training.done)
        if error.bad_weights and at.is_dir():
            shutil.rmtree(at)
        newest, _ = self.run.newest()
        if newest is None:
            self.run.unname("last")
        else:
            self.run.name("last", newest, step=folder.step_of(newest))
        row = {"kind": "failure", "step": error.step, "where": error.where, "lr": self.training.config.lr}
        append_row(self.run.metrics, row)
        left = f"{newest} is the newest before it" if newest else "no checkpoint is left"
        raise TrainingFailed(f"{self.run.path}: {error.found} and {left}; {error.fix} in a new folder") from None
