"""Metrics of ablation and patching: a number for each row of a batch.

A metric is any function of the logits, (B, T, V) -> (B,). For a metric at a single position use an `AtPosition`, so
that only that position is unembedded. A token may be given as text, `LogitDifference(" thou", " a")`, in calls with a
`tokenizer=`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.stream.distributions import log_probabilities
from mainstem.stream.points import position
from mainstem.text.units import single_token

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

Metric = Callable[[Tensor], Tensor]
"""A function of the logits, (B, T, V) -> (B,)."""
Tokens = int | str | Tensor | Sequence[int | str]
"""One token for all rows, or one for each: an id, the text of one token, or ids (B,)."""


class AtPosition(ABC):
    """A metric of the logits at one position."""

    pos: int
    """The position, from 0, or from -1 backwards."""

    @abstractmethod
    def at(self, logits: Tensor) -> Tensor:
        """The metric from the logits at the position, (B, V) -> (B,)."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The metric from all logits, (B, T, V) -> (B,)."""
        return self.at(logits[:, position(self.pos, logits.shape[1])])


@dataclass(frozen=True, eq=False)
class TokenLogit(AtPosition):
    """The logit of a token."""

    token: Tokens
    pos: int = -1

    def at(self, logits: Tensor) -> Tensor:
        """The logit, (B, V) -> (B,)."""
        return _chosen(logits, self.token, "token")


@dataclass(frozen=True, eq=False)
class TokenLogProb(AtPosition):
    """The log-probability of a token, in nats."""

    token: Tokens
    pos: int = -1

    def at(self, logits: Tensor) -> Tensor:
        """The log-probability, (B, V) -> (B,)."""
        return _chosen(log_probabilities(logits), self.token, "token")


@dataclass(frozen=True, eq=False)
class LogitDifference(AtPosition):
    """The logit of a token less that of another, the foil; a shift of all logits does not change it."""

    token: Tokens
    foil: Tokens
    pos: int = -1

    def at(self, logits: Tensor) -> Tensor:
        """The logit difference, (B, V) -> (B,)."""
        return _chosen(logits, self.token, "token") - _chosen(logits, self.foil, "foil")


@dataclass(frozen=True, eq=False)
class Loss:
    """The mean cross-entropy of each row's next tokens, in nats.

    Args:
        ids: the input ids, (B, T).
        mask: (B, T) bool, false at padding, which is ignored.
    """

    ids: Tensor
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape[1] < 2:
            raise ConfigError(f"ids of shape {tuple(self.ids.shape)} have no next tokens; give (B, T), T at least 2")

    def __call__(self, logits: Tensor) -> Tensor:
        """The loss of each row, (B, T, V) -> (B,)."""
        if logits.shape[:2] != self.ids.shape:
            raise ConfigError(f"logits of {tuple(logits.shape[:2])} positions, and ids of {tuple(self.ids.shape)}")
        nats = F.cross_entropy(logits[:, :-1].transpose(1, 2), self.ids[:, 1:], reduction="none")  # (B, T - 1)
        if self.mask is None:
            return nats.mean(1)
        read = (self.mask[:, :-1] & self.mask[:, 1:]).to(nats.dtype)
        return (nats * read).sum(1) / read.sum(1)


def _chosen(logits: Tensor, tokens: Tokens, what: str) -> Tensor:
    """The logit of each row's token, (B, V) -> (B,)."""
    B, V = logits.shape
    chosen = torch.as_tensor(_ids(tokens, what), device=logits.device)
    if chosen.shape not in ((), (B,)):
        raise ConfigError(f"{what}: ids of shape {tuple(chosen.shape)} for {B} rows; give one, or one for each row")
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < V:
        raise ConfigError(f"{what}: id {int(chosen.max())} is outside 0..{V - 1}")
    return logits.gather(1, chosen.expand(B)[:, None])[:, 0]


def with_ids(metric: Metric, tokenizer: "Tokenizer | None") -> Metric:
    """The metric with token texts replaced by ids; other metrics are returned unchanged.

    Raises ConfigError for a text without a tokenizer, DataError for a text that is not a single token.
    """
    if not isinstance(metric, TokenLogit | TokenLogProb | LogitDifference):
        return metric
    names = [field.name for field in fields(metric) if field.name != "pos"]
    ids: dict[str, Any] = {name: _ids(getattr(metric, name), name, tokenizer) for name in names}
    return replace(metric, **ids)


def _ids(tokens: Tokens, what: str, tokenizer: "Tokenizer | None" = None) -> int | Tensor:
    if isinstance(tokens, str):
        if tokenizer is None:
            raise ConfigError(f"{what}: {tokens!r} is a text, and there is no tokenizer; give an id, or `tokenizer`")
        return single_token(tokenizer, tokens)
    return torch.tensor([_ids(token, what, tokenizer) for token in tokens]) if isinstance(tokens, Sequence) else tokens


def checked(value: Tensor, rows: int) -> Tensor:
    """The value of a metric. Raises ConfigError unless it is a number for each row."""
    if not isinstance(value, Tensor) or value.shape != (rows,):
        actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"metric: it returned {actual}; it must return a number for each row, ({rows},)")
    return value


def measured(model: GPT, final: Tensor, metric: Metric) -> Tensor:
    """The metric of a pass, (B,), from `resid_final`, (B, T, C); only the positions of the metric are unembedded."""
    if isinstance(metric, AtPosition):
        value = metric.at(model.unembed(final[:, position(metric.pos, final.shape[1])]))
    else:
        value = metric(model.unembed(final))
    return checked(value, final.shape[0])
