"""Attention scores of heads: induction, duplicate-token, previous-token, current-token and first-token attention.

In a random sequence repeated once, only the repetition can be predicted. A head that attends to the token after an
earlier occurrence of the current token does induction (Olsson et al. 2022, "In-context Learning and Induction Heads").
Each kind of score has its targets j for a query t; a head's score is its attention weight on them:

    induction    j with ids[j - 1] = ids[t], j - 1 < t    the token after an earlier occurrence
    duplicate    j with ids[j] = ids[t], j < t            an earlier occurrence
    previous     j = t - 1
    current      j = t
    first        j = 0                                    the attention sink (Xiao et al. 2023, 2309.17453)

The score is summed over a query's targets and averaged over the queries that have any. The first token, which sees
only itself, is not a query; padding is neither query nor target. B rows, T positions, L blocks, H heads.
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
"""The default period, in tokens, where context and vocabulary hold more."""
ROOM = 1 << 24
"""Elements of a block's patterns, or of logits, in memory at once, of any dtype."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores:
    """The attention weight of each head on each kind of target, from 0 to 1."""

    by_kind: dict[str, Tensor]
    """The scores of each of KINDS, (L, H), float64 on the CPU; NaN where no query has such a target."""
    even: dict[str, float]
    """The score of a head with uniform attention over all visible tokens."""
    queries: dict[str, int]
    """The number of queries that have such a target."""

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
        """The labels of the heads, block by block: `L0H0`, ..."""
        L, H = self.by_kind[KINDS[0]].shape
        return [names.head(block, head) for block in range(L) for head in range(H)]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values, one a head: `label`, and the score of each kind by its name."""
        scores = zip(*(self[kind].flatten().tolist() for kind in KINDS), strict=True)
        return [
            {"label": label} | dict(zip(KINDS, row, strict=True))
            for label, row in zip(self.labels, scores, strict=True)
        ]

    def top(self, n: int = 10, kind: str = "induction") -> Rows[Item]:
        """The n heads with the highest scores of one kind, highest first; heads without a score are dropped."""
        return ranked(self.labels, self[kind].flatten().tolist(), n, f"heads: attention to {kind} tokens")


@dataclass(frozen=True, eq=False, repr=False)
class RepetitionScores(HeadScores):
    """The scores on a repeated random sequence, and the model's loss on both halves."""

    period: int
    first_loss: float
    """Loss on the first half in nats per token; random tokens cannot be predicted."""
    second_loss: float
    """Loss on the second half in nats per token, without its first token, which cannot be predicted either."""


def head_scores(
    model: GPT, period: int | None = None, sequences: int = 32, seed: int = 1, bos: int | None = None
) -> RepetitionScores:
    """The attention scores of each head on random sequences that are repeated once.

        ms.head_scores(model).top(5, "induction")

    The tokens of a row differ from each other. So in the second half every token has one earlier occurrence. With t
    counted from the first token, induction is the mean of pattern[t, t - period + 1], and duplicate the mean of
    pattern[t, t - period], both over t >= period.

    Args:
        model: any GPT with blocks. It is run in evaluation mode.
        period: tokens before the repetition; default: as many as context and vocabulary hold, at most LONGEST.
        sequences: how many sequences.
        seed: the seed of the tokens.
        bos: an id to begin each sequence with, such as the tokenizer's `eot_id`.

    Raises ConfigError for a period that context or vocabulary does not hold, and for a model without blocks.
    """
    ids, start = repeated(model.config, period, sequences, seed, bos).to(model.wte.weight.device), int(bos is not None)
    T = ids.shape[1]
    period, row = (T - start) // 2, max(model.config.n_head * T**2, model.config.vocab_size * T)
    taps, first, second = [], 0.0, 0.0
    with torch.no_grad(), evaluating(model):
        for chunk in ids.split(max(1, ROOM // row)):
            taps.append(_PatternTap(model, chunk))
            logits = model(chunk, tap=taps[-1])
            nats = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), chunk[:, 1:], reduction="none")
            first += nats[:, : start + period - 1].sum().item()  # nats[:, i] is the loss of token i + 1
            second += nats[:, start + period :].sum().item()
    losses = first / (sequences * (start + period - 1)), second / (sequences * (period - 1))
    return RepetitionScores(*_means(taps), period, *losses)


def head_scores_on(record: Record) -> HeadScores:
    """The attention scores of each head on a recorded text.

    One block's pattern is in memory at a time, unless the record stores them. Raises ConfigError for a model without
    blocks, and where the record lacks the stream that a block read.
    """
    tap = _PatternTap(record.model, record.ids, record.mask)
    for point in tap.points:
        tap(point, record[point])
    return HeadScores(*_means([tap]))


def repeated(config: ModelConfig, period: int | None, sequences: int, seed: int, bos: int | None = None) -> Tensor:
    """Random sequences repeated once, (sequences, 2 period), or one token more with `bos` first.

    The arguments and errors are those of `head_scores`.
    """
    V, start = config.vocab_size, int(bos is not None)
    if bos is not None and not 0 <= bos < V:
        raise ConfigError(f"bos: id {bos} is outside 0..{V - 1}")
    if sequences < 1:
        raise ConfigError(f"sequences: {sequences} is not possible; give at least 1")
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
    """The target keys of each query, (B, T query, T key) bool for each of KINDS.

    Args:
        ids: (B, T).
        mask: (B, T) bool, false at padding, which is on the left.
    """
    T = ids.shape[1]
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    ones = torch.ones(T, T, dtype=torch.bool, device=ids.device)
    first = real & (real.cumsum(1) == 1)  # (B, T)
    visible = ones.tril() & real[:, None, :] & (real & ~first)[:, :, None]
    duplicate = (ids[:, :, None] == ids[:, None, :]) & ones.tril(-1) & visible
    return {
        "induction": F.pad(duplicate[:, :, :-1], (1, 0)),
        "duplicate": duplicate,
        "previous": ones.tril(-1).triu(-1) & visible,
        "current": ones.tril().triu() & visible,
        "first": first[:, None, :] & visible,
    }


class _PatternTap:
    """A tap that sums each block's attention weights on the targets; it stores no pattern."""

    def __init__(self, model: GPT, ids: Tensor, mask: Tensor | None = None):
        if len(model.blocks) == 0:
            raise ConfigError("a model without blocks has no heads; give one with n_layer at least 1")
        self.points = {names.point("attn.pattern", layer): layer for layer in range(len(model.blocks))}
        self.targets = targets(ids, mask)
        real = torch.ones_like(ids) if mask is None else mask.long()
        self.visible = real.cumsum(1).clamp(min=1).cpu()  # (B, T)
        self.sums = {kind: torch.zeros(len(model.blocks), model.config.n_head).double() for kind in KINDS}

    def __call__(self, point: str, pattern: Tensor) -> Tensor:
        weights = wide(pattern)  # sums of thousands need float32
        for kind, chosen in self.targets.items():
            total = torch.einsum("bhts,bts->h", weights, chosen.to(weights.dtype))
            self.sums[kind][self.points[point]] = total.cpu()
        return pattern


def _means(taps: Sequence[_PatternTap]) -> tuple[dict[str, Tensor], dict[str, float], dict[str, int]]:
    """The fields of HeadScores, over the queries of all the taps."""
    by_kind, even, queries = {}, {}, {}
    for kind in KINDS:
        counts = [tap.targets[kind].sum(-1).cpu() for tap in taps]  # (B, T) each; float64 needs the CPU
        shares = [count.double() / tap.visible for count, tap in zip(counts, taps, strict=True)]
        queries[kind] = sum(int((count > 0).sum()) for count in counts)
        total = queries[kind] or float("nan")
        even[kind] = sum(share.sum().item() for share in shares) / total
        by_kind[kind] = torch.stack([tap.sums[kind] for tap in taps]).sum(0) / total
    return by_kind, even, queries
