"""Very small runs, and what the tests do to them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import Interrupted
from mainstem.runs.folder import RunFolder, read_rows
from mainstem.text.tokens import Prepared
from mainstem.training.events import Event
from mainstem.training.keeper import Keeper
from mainstem.training.loop import Training

SHAPE = {"n_ctx": 16, "n_layer": 2, "n_head": 2, "d_model": 32}
PACE = {"steps": 12, "batch_size": 8, "lr": 3e-3, "warmup": 2, "eval_every": 5, "save_every": 4, "vitals_every": 0}
EPOCH = 5
"""Steps of PACE that read what `cut` leaves once."""
TENSORS = ("model.safetensors", "optim.safetensors")


def cut(data: Prepared, train: int = 16 * (8 * EPOCH + 1), val: int = 150) -> Prepared:
    """The same token files, of which so many are seen."""
    made = dataclasses.replace(data)
    vars(made).update(train=data.train[:train], val=data.val[:val])
    return made


def training(
    path: Path | str, data: Prepared, *, model: dict[str, Any] | None = None, init_from: Path | str | None = None,
    extend: bool = False, should_stop: Callable[[], None] = lambda: None, **pace: Any,
) -> Keeper:  # fmt: skip
    """A run of SHAPE at PACE, with changes."""
    config = ModelConfig(**{**SHAPE, "vocab_size": data.tokenizer.vocab_size, **(model or {})})
    loop = Training(config, TrainConfig(**{**PACE, **pace}), data, should_stop=should_stop)
    return Keeper(RunFolder(path), loop, init_from=init_from, extend=extend)


def finish(training: Keeper) -> list[Event]:
    """Every event to the end."""
    return list(training.events())


class StopAt:
    """A `should_stop` that raises at its n-th call, counted from 0."""

    def __init__(self, call: int | None = None):
        self.call, self.calls = call, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.call:
            raise Interrupted("stopped by SIGTERM", 15)


def end(run: RunFolder) -> dict[str, Any]:
    """All that law 9 compares: bytes of the last checkpoint's tensors, rows but for seconds, what best names."""
    last, best = run.named("last"), run.named("best")
    assert last is not None
    return {
        **{name: (last / name).read_bytes() for name in TENSORS},
        **{file.name: [{**row, "seconds": 0} for row in read_rows(file)] for file in (run.metrics, run.vitals)},
        "best": best and best.name,
    }
