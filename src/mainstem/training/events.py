"""The events of training: frozen values that the loop yields, a keeper writes down and anyone may show."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstem.training.evaluate import Evaluation


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Nats per token of its batch, before the step."""
    bits_per_byte: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float

    def row(self) -> dict[str, Any]:
        """The row of `metrics.jsonl`."""
        return {"kind": "train", **vars(self)}


@dataclass(frozen=True)
class Evaluating:
    """An evaluation that begins; it can take as long as many steps."""

    step: int
    tokens: int
    """Held-out tokens to predict."""


@dataclass(frozen=True)
class Evaluated:
    """An evaluation over the whole validation split."""

    step: int
    result: Evaluation
    best: bool
    """Whether the loss is the lowest so far."""
    seconds: float

    def row(self) -> dict[str, Any]:
        """The row of `metrics.jsonl`."""
        numbers = {"loss": self.result.loss, "bits_per_byte": self.result.bits_per_byte, "seconds": self.seconds}
        return {"kind": "eval", "step": self.step, **numbers}


@dataclass(frozen=True)
class CheckpointDue:
    """A step after which `save_every` or an evaluation asks for a checkpoint; a keeper yields Saved instead."""

    step: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk."""

    step: int
    path: Path


@dataclass(frozen=True)
class Observed:
    """The vitals before a step, a row a block (`mainstem.training.vitals.COLUMNS`)."""

    step: int
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Sampled:
    """A sample of text after a step."""

    step: int
    text: str


@dataclass(frozen=True)
class Notice:
    """Something that a person should know."""

    text: str


Event = Step | Evaluating | Evaluated | CheckpointDue | Saved | Observed | Sampled | Notice
