"""What heads attend to, by its place: the token before, an earlier occurrence of the present one, what followed that.

On random tokens that repeat, nothing but the repetition can be predicted, and a head that attends to what followed the
earlier occurrence of the present token is doing induction (Olsson et al. 2022, "In-context Learning and Induction
Heads"). There and in a text each kind has its targets, and a head's score is the attention that it pays to them:

    induction    j with ids[j - 1] = ids[t], j - 1 < t    what followed an earlier occurrence
    duplicate    j with ids[j] = ids[t], j < t            an earlier occurrence
    previous     j = t - 1
    current      j = t
    first        j = 0                                    where heads rest (Xiao et al. 2023, 2309.17453)

The score is summed over a query's targets and averaged over the queries that have any. The first token, which sees
itself alone, is no query; padding is neither query nor target. B rows, T positions, L blocks, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError, nearest
from mainstem.model import names
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.precision import wide
from mainstem.results import SHOWN, Item, Rows, ranked, summary
from mainstem.stream.record import Record

KINDS = ("induction", "duplicate", "previous", "current", "first")
LONGEST = 64
"""Tokens of a period, where none is given and context and vocabulary hold more."""
ROOM = 1 << 24
"""Elements of a block's patterns, or of logits, that are held at once, of whatever dtype."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores:
    """How much of its attention each head pays to each kind of target, from 0 to 1."""

    by_kind: dict[str, Tensor]
    """For each of KINDS, (L, H), float64 on the CPU; NaN where no query has such a target."""
    even: dict[str, float]
    """The score of a head that attends evenly to all that it sees."""
    queries: dict[str, int]
    """How many queries have such a target."""

    def __getitem__(self, kind: str) -> Tensor:
        """The scores of one kind, (L, H). Raises ConfigError with the nearest kind."""
        if kind not in self.by_kind:
            raise ConfigError(f"kind: unknown value {kind!r}; {nearest(kind, KINDS)}")
        return self.by_kind[kind]

    def __repr__(self) -> str:
        heads = len(self.labels)
        title = f"{type(self).__name__}: attention to {', '.join(self.by_kind)} tokens, by {heads} heads; induction"
        return summary(title, self.top(SHOWN), heads)

    @property
    def labels(self) -> list[str]:
        """The heads, block by block."""
        L, H = self.by_kind[KINDS[0]].shape
        return [names.head(block, head) for block in range(L) for head in range(H)]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Each head: `label`, and its score of each kind by the kind's name."""
        scores = zip(*(self[kind].flatten().tolist() for kind in KINDS), strict=True)
        return [
            {"label": label} | dict(zip(KINDS, row, strict=True))
            for label, row in zip(self.labels, scores, strict=True)
        ]

    def top(self, n: int = 10, kind: str = "induction") -> Rows[Item]:
        """The n heads of the highest scores of one kind, highest first; those without a score are left out."""
        return ranked(self.labels, self[kind].flatten().tolist(), n, f"heads: attention to {kind} tokens")


@dataclass(frozen=True, eq=False, repr=False)
class RepetitionScores(HeadScores):
    """The scores on repeated random tokens, and what the model makes of the repetition."""

    period: int
    first_loss: float
    """Nats per token of the first half, in which a token is not to be known."""
    second_loss: float
    """Nats per token of the second half, without its first token: nothing says that the repetition begins."""


def head_scores(
    model: GPT, period: int | None = None, sequences: int = 32, seed: int = 1, bos: int | None = None
) -> RepetitionScores:
    """What each head does with random tokens and the same ones again.

    The tokens of a row differ from each other. So in the second half every token has one earlier occurrence, and with t
    counted from the first of them induction is the mean of pattern[t, t - period + 1], and duplicate the mean of
    pattern[t, t - period], both over t >= period.

    Args:
        model: any GPT with blocks. It is read in evaluation mode.
        period: tokens before they repeat; None: as many as context and vocabulary hold, up to LONGEST.
        sequences: how many rows of tokens.
        seed: of the tokens.
        bos: an id to begin each row with, such as the tokenizer's `eot_id`.

    Raises ConfigError for a period that context or vocabulary does not hold, and for a model without blocks.
    """
    ids, start = repeated(model.config, period, sequences, seed, bos).to(model.wte.weight.device), int(bos is not None)
    T = ids.shape[1]
    period, row = (T - start) // 2, max(model.config.n_head * T**2, model.config.vocab_size * T)
    readings, first, second = [], 0.0, 0.0
    with torch.no_grad(), evaluating(model):
        for some in ids.split(max(1, ROOM // row)):
            readings.append(_PatternTap(model, some))
            logits = model(some, tap=readings[-1])
            nats = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), some[:, 1:], reduction="none")
            first += nats[:, : start + period - 1].sum().item()  # nats[:, i] is the loss of token i + 1
            second += nats[:, start + period :].sum().item()
    losses = first / (sequences * (start + period - 1)), second / (sequences * (period - 1))
    return RepetitionScores(*_means(readings), period, *losses)


def head_scores_on(record: Record) -> HeadScores:
    """What each head does in a text, by the matches that the text has.

    One block's pattern is held at a time, unless the record keeps them. Raises ConfigError for a model without blocks,
    and where the record lacks what a block read.
    """
    reading = _PatternTap(record.model, record.ids, record.mask)
    for point in reading.points:
        reading(point, record[point])
    return HeadScores(*_means([reading]))


def repeated(config: ModelConfig, period: int | None, sequences: int, seed: int, bos: int | None = None) -> Tensor:
    """Sequences of different random tokens and the same again, (sequences, 2 period), or one more with `bos` first.

    The arguments and errors are those of `head_scores`.
    """
    V, start = config.vocab_size, int(bos is not None)
    if bos is not None and not 0 <= bos < V:
        raise ConfigError(f"bos: id {bos} is outside 0..{V - 1}")
    if sequences < 1:
        raise ConfigError(f"sequences: {sequences} are none to look at; give at least 1")
    fits = min((config.n_ctx - start) // 2, V - start)
    period = min(LONGEST, fits) if period is None else period
    if not 2 <= period <= fits:
        raise ConfigError(
            f"period: {period} is not possible; 2 to {fits} different tokens, twice, "
            f"fit n_ctx {config.n_ctx} and vocab_size {V}"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.rand(sequences, V - start, generator=generator).argsort(1)[:, :period]
    if bos is None:
        return tokens.repeat(1, 2)
    tokens += tokens >= bos
    return F.pad(tokens.repeat(1, 2), (1, 0), value=bos)


def targets(ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """For each of KINDS, which keys are targets of which queries: bool, (B, T query, T key).

    Args:
        ids: (B, T).
        mask: (B, T) bool, false at padding, which is on the left.
    """
    T = ids.shape[1]
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    ones = torch.ones(T, T, dtype=torch.bool, device=ids.device)
    first = real & (real.cumsum(1) == 1)  # (B, T)
    seen = ones.tril() & real[:, None, :] & (real & ~first)[:, :, None]
    duplicate = (ids[:, :, None] == ids[:, None, :]) & ones.tril(-1) & seen
    return {
        "induction": F.pad(duplicate[:, :, :-1], (1, 0)),
        "duplicate": duplicate,
        "previous": ones.tril(-1).triu(-1) & seen,
        "current": ones.tril().triu() & seen,
        "first": first[:, None, :] & seen,
    }


class _PatternTap:
    """A tap that weighs each block's pattern at the targets, and keeps no pattern."""

    def __init__(self, model: GPT, ids: Tensor, mask: Tensor | None = None):
        if len(model.blocks) == 0:
            raise ConfigError("a model without blocks has no heads; give one with n_layer at least 1")
        self.points = {names.point("attn.pattern", layer): layer for layer in range(len(model.blocks))}
        self.targets = targets(ids, mask)
        real = torch.ones_like(ids) if mask is None else mask.long()
        self.visible = real.cumsum(1).clamp(min=1).cpu()  # (B, T)
        self.paid = {kind: torch.zeros(len(model.blocks), model.config.n_head).double() for kind in KINDS}

    def __call__(self, point: str, pattern: Tensor) -> Tensor:
        weights = wide(pattern)  # half precision cannot sum thousands
        for kind, chosen in self.targets.items():
            paid = torch.einsum("bhts,bts->h", weights, chosen.to(weights.dtype))
            self.paid[kind][self.points[point]] = paid.cpu()
        return pattern


def _means(readings: Sequence[_PatternTap]) -> tuple[dict[str, Tensor], dict[str, float], dict[str, int]]:
    """The fields of HeadScores, over the queries of all the readings."""
    by_kind, even, queries = {}, {}, {}
    for kind in KINDS:
        counts = [reading.targets[kind].sum(-1).cpu() for reading in readings]  # (B, T) each; float64 needs the CPU
        shares = [count.double() / reading.visible for count, reading in zip(counts, readings, strict=True)]
        queries[kind] = sum(int((count > 0).sum()) for count in counts)
        asked = queries[kind] or float("nan")
        even[kind] = sum(share.sum().item() for share in shares) / asked
        by_kind[kind] = torch.stack([reading.paid[kind] for reading in readings]).sum(0) / asked
    return by_kind, even, queries
