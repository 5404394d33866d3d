"""The loop: steps, evaluations, checkpoints; it yields events and leaves a run folder that can be resumed exactly.

Everything that a step does follows from (seed, step): which windows it reads, and what dropout drops. So a checkpoint
holds weights, optimizer moments and a step number, and a resumed run ends in the bytes of an uninterrupted one.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mainstem import atomic, counts
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import ConfigError, Interrupted, RunError, TrainingFailed
from mainstem.formats.load import load
from mainstem.model.gpt import GPT
from mainstem.model.kernels.gelu_backend import choose_gelu
from mainstem.model.quantized import weights_of
from mainstem.runs import checkpoint, folder
from mainstem.runs.folder import RunFolder, append_row, cut_rows, refuse_changes
from mainstem.runs.provenance import software
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tokens import Prepared, Windows, bytes_per_token
from mainstem.training import allocator, compiled
from mainstem.training.device import Device
from mainstem.training.doctor import free_memory
from mainstem.training.evaluate import evaluate
from mainstem.training.events import Evaluated, Evaluating, Event, Notice, Observed, Sampled, Saved, Step
from mainstem.training.optim import Optimizer
from mainstem.training.step import TrainStep
from mainstem.training.vitals import Vitals, first_non_finite


@dataclass
class Training:
    """A run: `for event in Training(...).events()` trains it to its last step, or from where it stopped.

    Args:
        run: where it lives.
        model_config: vocab_size must be the tokenizer's.
        config: how it is trained.
        data: the token files.
        settings: what else `run.json` should say (preset, where the data are).
        init_from: a RUN whose weights are the start of a new run.
        extend: whether `steps` may differ from what the run was started with.
        sample: called with model and tokenizer every `sample_every` steps, returns the text to show.
        should_stop: called often; it raises Interrupted to end the run at a safe point, where it is saved.
    """

    run: RunFolder
    model_config: ModelConfig
    config: TrainConfig
    data: Prepared
    settings: dict[str, Any] = field(default_factory=dict)
    init_from: Path | str | None = None
    extend: bool = False
    sample: Callable[[GPT, Tokenizer], str] | None = None
    should_stop: Callable[[], None] = lambda: None

    done: int = field(default=0, init=False)
    """Steps done."""
    best: float = field(default=math.inf, init=False)
    """The lowest held-out loss so far."""
    evaluated: int = field(default=-1, init=False)
    """The step of the last evaluation."""

    def __post_init__(self) -> None:
        self._require_memory()
        config, n_ctx, vocab_size = self.config, self.model_config.n_ctx, self.model_config.vocab_size
        self.device = Device.choose(config.device)
        self._require_replay()
        self.windows = Windows(self.data.train, n_ctx, config.seed, vocab_size, str(self.data.path))
        self.token_bytes = bytes_per_token(self.data.tokenizer)
        self.model = GPT(self.model_config, seed=config.seed).to(self.device.device)
        self.model.recompute = config.recompute
        tokens = config.windows_at_once * n_ctx
        self.kernels = choose_gelu(self.model, self.device.device, tokens, compiled=config.compile)
        self.optimizer = Optimizer(self.model, config, fused=self.device.fused)
        self.train_step = TrainStep(self.model, self.optimizer, config, self.device)

    def events(self) -> Iterator[Event]:
        """Train. Raises TrainingFailed (non-finite numbers, full disk), Interrupted, or RunError (cannot resume)."""
        with self.run.locked():
            yield from self._start()
            try:
                yield from self._evaluate_if_due()
                while self.done < self.config.steps:
                    yield from self._step()
                    yield from self._save_if_due()
                    yield from self._evaluate_if_due()
            except Interrupted:
                if self.done and atomic.fault(self.run.checkpoint_at(self.done)) is not None:
                    yield self._save()
                raise

    def _start(self) -> Iterator[Event]:
        config = self.config
        newest, passed_over = self.run.newest()
        for fault in passed_over:
            yield Notice(f"passed over {fault}")
        if newest is None and self.init_from is not None:
            self._take_weights(self.init_from)
        yield from self._keep_settings(newest)
        if newest is not None:
            state, moments = checkpoint.resume(newest, self.model)
            self.done = state["step"]
            self.optimizer.load_tensors(moments, self.done)
            yield Notice(f"resumed at step {self.done:,} of {config.steps:,} from {newest}")
        elif passed_over:
            yield Notice("no checkpoint was sound; started again from step 0")
        self._cut_rows()
        if self.done >= config.steps:
            yield Notice(f"this run has done its {config.steps:,} steps; `extend` with more `steps` trains it on")
            return
        self._require_room()
        if config.recompute:
            allocator.return_freed()
        else:
            allocator.keep_freed()
        if config.compile:
            x, y = self._batch()
            at_once = config.windows_at_once
            yield Notice(compiled.compile_blocks(self.model, x[:at_once], y[:at_once], self.device))
        self.model.train()

    def _take_weights(self, source: Path | str) -> None:
        """Begin with another model's weights; its ids must mean what ours do, and rows past them are padding."""
        model, tokenizer = load(source)
        if tokenizer is not None and tokenizer.hash != self.data.tokenizer.hash:
            raise RunError(
                f"{source}: trained with another tokenizer than these tokens; prepare the text with its own "
                f"(`tokenizer` {source})"
            )
        if (weights := weights_of(model)) != "fp32":
            raise RunError(f"{source}: its weights are {weights}; take the model that they were made from")
        theirs = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name in theirs.keys() & {"wte.weight", "lm_head.weight"}:
            theirs[name] = theirs[name][: self.data.tokenizer.vocab_size]
        checkpoint.fill(self.model, theirs, lambda name: source)

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next step reads and predicts: x, y, each (B, T)."""
        x, y = self.windows.batch(self.done, self.config.batch_size)
        return torch.from_numpy(x).to(self.device.device), torch.from_numpy(y).to(self.device.device)

    def _step(self) -> Iterator[Event]:
        start, config = time.perf_counter(), self.config
        x, y = self._batch()
        torch.manual_seed(_mix(config.seed, self.done))  # dropout follows from (seed, step)
        looked = Vitals(self.model, x, y, self.device) if _due(self.done, config.vitals_every) else None
        loss, grad_norm = self.train_step.gradient(x, y, self.should_stop)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = f"loss {loss:g}, gradient norm {grad_norm:g}"
            bad_weights = not math.isfinite(loss) and self.evaluated != self.done
            self._fail(self.done + 1, what, self._first_bad(x), bad_weights)
        rate = self.train_step.move(self.done, grad_norm)
        self.done += 1
        bits = loss * y.numel() / math.log(2) / max(1, int(self.token_bytes[y.cpu().numpy()].sum()))
        event = Step(self.done, loss, bits, config.lr * rate, grad_norm, y.numel(), time.perf_counter() - start)
        append_row(self.run.metrics, {"kind": "train", **vars(event)})
        yield event
        if looked is not None:
            rows = looked.rows(self.done - 1)
            for row in rows:
                append_row(self.run.vitals, row)
            yield Observed(self.done - 1, rows)
        if self.sample is not None and config.sample_every and _due(self.done, config.sample_every):
            yield Sampled(self.done, self.sample(self.model, self.data.tokenizer))
            self.model.train()

    def _save_if_due(self) -> Iterator[Event]:
        """At each evaluation too, before it: a run that dies in the evaluation has lost nothing."""
        if _due(self.done, self.config.save_every) or self._evaluation_is_due():
            yield self._save()

    def _save(self) -> Saved:
        for rows in (self.run.metrics, self.run.vitals):  # a checkpoint never outlives the rows that lead to it
            if rows.is_file():
                atomic.sync(rows)
        path = self.run.checkpoint_at(self.done)
        state = {"step": self.done, "tokens": self.done * self.config.batch_size * self.model_config.n_ctx}
        checkpoint.save(
            path,
            self.model,
            self.data.tokenizer,
            train=self.config.to_dict(),
            optimizer=self.optimizer.tensors(),
            state=state,
        )
        self.run.name("last", path, step=self.done)
        self.run.prune(self.config.keep)
        return Saved(self.done, path)

    def _evaluation_is_due(self) -> bool:
        return self.done == self.config.steps or (self.done > 0 and _due(self.done, self.config.eval_every))

    def _evaluate_if_due(self) -> Iterator[Event]:
        if not self._evaluation_is_due() or self.evaluated == self.done or len(self.data.val) < 2:
            return
        yield Evaluating(self.done, len(self.data.val) - 1)
        start = time.perf_counter()
        result = evaluate(
            self.model,
            self.data.val,
            self.token_bytes,
            batch_size=self.config.batch_size,
            device=self.device,
            should_stop=self.should_stop,
        )
        if not math.isfinite(result.loss):
            self._fail(self.done, f"held-out loss {result.loss:g}", "the held-out text", bad_weights=True)
        seconds, self.evaluated = time.perf_counter() - start, self.done
        is_best = result.loss < self.best
        row = {"kind": "eval", "step": self.done, "loss": result.loss, "bits_per_byte": result.bits_per_byte}
        append_row(self.run.metrics, {**row, "seconds": seconds})
        if is_best:
            self.best = result.loss
            atomic.sync(self.run.metrics)
            self.run.name("best", self.run.checkpoint_at(self.done), **row)
        yield Evaluated(self.done, result, is_best, seconds)

    def _cut_rows(self) -> None:
        """Drop what is past the step that training starts at, and recall the best evaluation that is left."""
        rows = cut_rows(self.run.metrics, lambda row: row.get("kind") != "failure" and row["step"] <= self.done)
        cut_rows(self.run.vitals, lambda row: row["step"] < self.done)
        evaluations = [row for row in rows if row.get("kind") == "eval"]
        self.evaluated = max((row["step"] for row in evaluations), default=-1)
        best = min((row for row in evaluations if row["loss"] is not None), key=lambda row: row["loss"], default=None)
        if best is None or not self.run.checkpoint_at(best["step"]).is_dir():
            self.run.unname("best")
        else:
            self.best = best["loss"]
            facts = {key: best[key] for key in ("kind", "step", "loss", "bits_per_byte")}
            self.run.name("best", self.run.checkpoint_at(best["step"]), **facts)

    def _keep_settings(self, newest: Path | None) -> Iterator[Event]:
        """Write `run.json`; refuse other data than it names, and say when bytes may differ from one run's."""
        data = {name: said["sha256"] for name, said in self.data.passport["files"].items()}
        device, threads = str(self.device.device), torch.get_num_threads()
        made_with = {"torch": str(torch.__version__), "threads": threads, "device": device, "kernels": self.kernels}
        configs = {"model": self.model.config.to_dict(), "train": self.config.to_dict()}
        saved = self.run.settings() if self.run.exists() else {}
        if saved:
            for name, sha256 in saved.get("data", data).items():
                if data.get(name) != sha256:
                    raise RunError(
                        f"{self.data.path / name}: not what {self.run.path} was started with (its sha256 differs); "
                        "give the same data, or choose another folder"
                    )
            for kind, now in configs.items():
                refuse_changes(self.run.path, saved[kind], now, self.extend)
            if self.extend and newest is not None and self.config.steps < folder.step_of(newest):
                done = folder.step_of(newest)
                raise RunError(
                    f"{self.run.path}: {done:,} steps are done, more than the {self.config.steps:,} asked for"
                )
            before = saved.get("made_with", made_with)
            if before != made_with:
                yield Notice(f"begun with {before}, resumed with {made_with}: the bytes may differ from one run's")
        made_by = saved.get("software") or software()
        settings = {**configs, "data": data, "made_with": made_with, "software": made_by, **self.settings}
        self.run.write_settings(settings)

    def _require_memory(self) -> None:
        """Refuse to build what cannot be trained here. Raises ConfigError with both numbers."""
        free = free_memory() if self.config.device in ("auto", "cpu") and not torch.cuda.is_available() else None
        train = self.config
        need = counts.memory(self.model_config, train.windows_at_once, train.optimizer, train.recompute)["training"]
        if free is not None and need > 1.5 * free:  # activations are estimated from above
            raise ConfigError(
                f"this model and batch need about {need / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free; "
                + ("" if train.recompute else "set `recompute`, or ")
                + "lower `micro_batch`, `batch_size` or `d_model`"
            )

    def _require_replay(self) -> None:
        """Refuse to compute again what would not be the same again. Raises ConfigError."""
        model = self.model_config.resolved()
        dropouts = (model.attn_dropout, model.attn_out_dropout, model.mlp_dropout, model.mlp_out_dropout)
        if self.config.recompute and any(dropouts) and not self.device.replays_dropout:
            raise ConfigError(
                f"recompute: on {self.device.device} dropout in the blocks cannot be drawn a second time; "
                "leave out `recompute`, or set `dropout` 0"
            )

    def _require_room(self) -> None:
        """Refuse to start what cannot be saved. Raises TrainingFailed with both numbers."""
        memory = counts.memory(self.model_config, optimizer=self.config.optimizer)
        need, free = 2 * memory["checkpoint"], shutil.disk_usage(self.run.path).free
        if free < need:
            raise TrainingFailed(
                f"{self.run.path}: two checkpoints need {need / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free; "
                "free some space, or choose another disk"
            )

    def _rates(self) -> str:
        muon = f" and `muon_lr` (it is {self.config.muon_lr:g})" if self.config.optimizer == "muon" else ""
        return f"lower `lr` (it is {self.config.lr:g}){muon} or lengthen `warmup`,"

    def _first_bad(self, x: torch.Tensor) -> str:
        """The first layer that went bad on this batch: of the stream, else of the gradients."""
        point = first_non_finite(self.model, x, self.device, self.config.windows_at_once)
        parameters = reversed(list(self.model.named_parameters()))
        bad = (name for name, p in parameters if p.grad is not None and not torch.isfinite(p.grad).all())
        return point or next((f"the gradient of {name}" for name in bad), "the loss")

    def _fail(self, step: int, what: str, where: str, bad_weights: bool) -> None:
        """Name the step and the first layer that went bad.

        With `bad_weights` the weights as they are did it, so their checkpoint goes; one that was evaluated, or whose
        gradient alone is bad, stays.
        """
        if bad_weights and self.run.checkpoint_at(self.done).is_dir():
            shutil.rmtree(self.run.checkpoint_at(self.done))
        newest, _ = self.run.newest()
        if newest is None:
            self.run.unname("last")
        else:
            self.run.name("last", newest, step=folder.step_of(newest))
        append_row(self.run.metrics, {"kind": "failure", "step": step, "where": where, "lr": self.config.lr})
        left = f"{newest} is the newest before it" if newest else "no checkpoint is left"
        raise TrainingFailed(
            f"{self.run.path}: step {step:,} is not finite ({what}), first at {where}; nothing of it was kept and "
            f"{left}; {self._rates()} in a new folder"
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mix(seed: int, step: int) -> int:
    """One 64-bit seed from two numbers, without near repeats for near steps."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])
