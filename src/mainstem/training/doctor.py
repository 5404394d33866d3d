"""The doctor: before step 0, whether a run can work here; after a failure, what went wrong. No torch."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mainstem import counts
from mainstem.config import ModelConfig, TrainConfig
from mainstem.runs.folder import RunFolder, read_rows


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    text: str
    """What was found, with its numbers, and the fix where it is not well."""


def free_memory() -> int:
    """Bytes of memory that a new process can have without swapping."""
    return int(psutil.virtual_memory().available)


MARGIN = 1.5
"""Training is refused where its estimate, whose activations are from above, is this many times the free memory."""


def memory(model: ModelConfig, train: TrainConfig) -> Finding:
    """Whether training fits in memory on the CPU; the loop refuses to start where this is not well."""
    need = counts.memory(model, train.windows_at_once, train.optimizer, train.recompute)["training"]
    free = free_memory()
    text = f"training needs about {need / 1e9:.2f} GB of memory, and {free / 1e9:.1f} GB are free"
    advice = "" if train.recompute else "set `recompute`, or "
    return _finding("memory", need <= MARGIN * free, text, advice + "lower `micro_batch`, `batch_size` or `d_model`")


def disk(model: ModelConfig, train: TrainConfig, folder: Path, saved: int = 0) -> Finding:
    """Whether a run's checkpoints fit on the disk of `folder`; a keeper refuses to start where this is not well.

    There are at most `keep` checkpoints, the best one and the one being written; `saved` of them are there already.
    """
    number = max(1, train.keep + 2 - saved)
    need = number * counts.memory(model, optimizer=train.optimizer)["checkpoint"]
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    text = f"{number} checkpoints need {need / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free at {place}"
    return _finding("disk", need <= free, text, "lower `keep`, free some space, or choose another disk")


def before(model: ModelConfig, train: TrainConfig, folder: Path, train_tokens: int | None) -> list[Finding]:
    """What can be said before the first step. `train_tokens` is the size of the training text, if it is known."""
    model = model.resolved()
    parameters, per_step = counts.parameters(model).total, train.batch_size * model.n_ctx
    total, flops = train.steps * per_step, counts.flops_per_token(model)["training"]
    found = [memory(model, train), disk(model, train, folder, len(RunFolder(folder).found()))]
    found.append(_finding("tokens", True, f"{total:,} for {parameters:,} parameters, {total / parameters:.1f} each"))
    if train_tokens is not None:
        epochs = total / max(1, train_tokens)
        text = f"{epochs:.1f} passes over {train_tokens:,} training tokens"
        found.append(_finding("epochs", epochs <= 20, text, "expect over-fitting: add dropout or text"))
    found.append(_finding("work", True, f"{flops * total:.2e} floating-point operations"))
    found.append(_rate(model, train))
    text = f"the rate rises over {train.warmup:,} of {train.steps:,} steps"
    found.append(_finding("warmup", train.warmup < train.steps, text, "lower `warmup`"))
    return found


def _finding(name: str, ok: bool, text: str, advice: str = "") -> Finding:
    return Finding(name, ok, text if ok or not advice else f"{text}; {advice}")


def _rate(model: ModelConfig, train: TrainConfig) -> Finding:
    """Against two rules of thumb: AdamW's rate falls as 1/sqrt(width); Muon's does not depend on the width."""
    if train.optimizer == "muon":
        text = f"muon_lr {train.muon_lr:g}; 0.02 to 0.05 is usual"
        return _finding("rate", train.muon_lr <= 0.1, text, "lower `muon_lr`")
    usual = 6e-3 * (128 / model.d_model) ** 0.5
    text = f"lr {train.lr:g} at width {model.d_model}; up to {usual:.1e} is usual"
    return _finding("rate", train.lr <= 2 * usual, text, "lower `lr`")


def after(run: RunFolder) -> list[Finding]:
    """What a run's own files tell: checkpoints, the last rows, a failure, over-fitting, a stream that went bad."""
    rows = read_rows(run.metrics)
    steps, failures, evaluations = ([r for r in rows if r.get("kind") == kind] for kind in ("train", "failure", "eval"))
    found = _checkpoints(run)
    if steps:
        found += _progress(steps, run.settings()["train"]["steps"])
    for row in failures:
        text = f"step {row['step']:,} was not finite, first at {row['where']}, at lr {row['lr']:g}"
        found.append(_finding("failure", False, text, "lower `lr` or lengthen `warmup`, in a new folder"))
    if len(evaluations) > 1:
        best, last = min(evaluations, key=lambda row: row["loss"]), evaluations[-1]
        text = f"loss {last['loss']:.4f} at step {last['step']:,}, best {best['loss']:.4f} at {best['step']:,}"
        calm = last["loss"] <= 1.02 * best["loss"]
        found.append(_finding("held-out", calm, text, "it over-fits; the best is what opens"))
    if vitals := read_rows(run.vitals):
        found.append(_stream([row for row in vitals if row["step"] == vitals[-1]["step"]]))
    return found


def _checkpoints(run: RunFolder) -> list[Finding]:
    newest, passed_over = run.newest()
    found = [_finding("checkpoint", False, f"damaged: {fault}") for fault in passed_over]
    if newest is None:
        return [*found, _finding("checkpoint", False, "none is valid; the run would start again from step 0")]
    return [*found, _finding("checkpoint", True, f"{newest} verifies")]


def _progress(steps: list[dict[str, Any]], planned: int) -> list[Finding]:
    last, norms = steps[-1], sorted(row["grad_norm"] for row in steps[-100:])
    text = f"step {last['step']:,} of {planned:,}, loss {last['loss']:.4f}"
    middle, largest = norms[len(norms) // 2], norms[-1]
    spikes = f"gradient norm up to {largest:.3g}, median {middle:.3g}, over the last {len(norms)} steps"
    return [
        _finding("progress", True, text),
        _finding("spikes", largest <= 10 * middle, spikes, "lower `lr` or `clip`"),
    ]


def _stream(look: list[dict[str, Any]]) -> Finding:
    for row in look:
        for name, value in row.items():
            if value is None:
                return _finding("stream", False, f"step {row['step']:,}: {name} is not finite at block {row['block']}")
    first, last = look[0], look[-1]
    grows = f"RMS {first['stream']:.3g} before the first block, {last['stream']:.3g} after the last"
    return _finding("stream", True, f"step {first['step']:,}: {grows}")


def leftovers(run: RunFolder) -> list[Finding]:
    """Temporary folders of processes that died; the next start removes them."""
    names = [path.name for path in run.checkpoints.glob(".*")] if run.checkpoints.is_dir() else []
    return [Finding("leftovers", True, f"{name} is unfinished; the next start removes it") for name in names]
