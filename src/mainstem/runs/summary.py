"""What a run came to, from its rows. No torch."""

import sys
from collections.abc import Iterable
from typing import Any

import psutil

from mainstem import counts
from mainstem.config import ModelConfig
from mainstem.runs.folder import RunFolder, read_rows


def summary(run: RunFolder) -> dict[str, Any]:
    """The summary of a run folder: `run`, and what `summarize` returns for its rows and its model."""
    config = ModelConfig.from_dict(run.settings()["model"])
    return {"run": str(run.path), **summarize(read_rows(run.metrics), config)}


def summarize(rows: Iterable[dict[str, Any]], model: ModelConfig) -> dict[str, Any]:
    """Steps, tokens, seconds and losses of the rows of `metrics.jsonl`, and the model's parameters.

    Losses are in nats per token, `bits_per_byte` in bits per byte of text; None where nothing was evaluated.
    """
    rows = list(rows)
    steps = [row for row in rows if row.get("kind") == "train"]
    evaluations = [row for row in rows if row.get("kind") == "eval"]
    last = evaluations[-1] if evaluations else {}
    best = min((row for row in evaluations if row["loss"] is not None), key=lambda row: row["loss"], default={})
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "parameters": counts.parameters(model).total,
        "tokens": sum(row["tokens"] for row in steps),
        "train_seconds": sum(row["seconds"] for row in steps),
        "train_loss": steps[-1]["loss"] if steps else None,
        "val_loss": last.get("loss"),
        "val_bits_per_byte": last.get("bits_per_byte"),
        "best_step": best.get("step"),
        "best_val_bits_per_byte": best.get("bits_per_byte"),
    }


def peak_memory() -> int:
    """The most memory that this process ever held, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # psutil has no peak here

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
