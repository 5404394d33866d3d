"""Which token comes next: a frozen recipe, and one function that follows it for every row of a batch.

The order is fixed: forbidden tokens masked, repetition penalty, the best one if greedy, temperature, top-k, top-p,
min-p; all in float32, with the largest score subtracted first.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from mainstem.config import Sampling
from mainstem.errors import RunError

NUCLEUS = 1024
"""Tokens that top-p looks at before it looks at all."""


def row_generator(seed: int, sample: int) -> torch.Generator:
    """The source of chance of one row, on the CPU: the same in a batch as alone, and on every device."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence((seed, sample)).generate_state(1, np.uint64)[0]))


def choose(
    logits: Tensor,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    seen: Sequence[Collection[int]] = (),
    forbidden: Tensor | None = None,
) -> list[int]:
    """The next id of each row.

    Args:
        logits: (B, V), of any float dtype.
        sampling: the recipe.
        generators: one a row, on the CPU; each gives one number a call, and none when greedy.
        seen: each row's ids of prompt and text so far, for the repetition penalty.
        forbidden: (B, V) bool, true for tokens that must not be chosen; at least one a row is false.

    Raises RunError for logits that are not finite.
    """
    scores = (logits.cpu() if logits.device.type == "mps" else logits).float()  # MPS has returned ids of -2^63
    if forbidden is not None:
        scores = scores.masked_fill(forbidden.to(scores.device), -math.inf)
    if sampling.repetition_penalty != 1:
        scores = _penalise(scores, seen, sampling.repetition_penalty)
    best = scores.amax(-1, keepdim=True)  # (B, 1)
    if not torch.isfinite(best).all():
        raise RunError("the model's logits are not finite, so its weights are damaged; open an earlier checkpoint")
    if sampling.greedy:
        return scores.argmax(-1).tolist()
    probabilities = _narrow((scores - best) / sampling.temperature, sampling).softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    cumulative = cumulative / cumulative[:, -1:]  # ends in exactly 1, which every draw is below
    draws = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    return torch.searchsorted(cumulative, draws.to(cumulative.device), right=True)[:, 0].tolist()


def _penalise(scores: Tensor, seen: Sequence[Collection[int]], penalty: float) -> Tensor:
    """Scores (B, V) with each row's seen ids made less likely: a positive one divided, a negative one multiplied."""
    scores = scores.clone()
    for row, ids in zip(scores, seen, strict=True):
        index = torch.tensor(list(ids), dtype=torch.long, device=scores.device)
        row[index] = torch.where(row[index] > 0, row[index] / penalty, row[index] * penalty)
    return scores


def _narrow(scores: Tensor, sampling: Sampling) -> Tensor:
    """Scores (B, V), the best of each row 0, with -inf for the tokens that the recipe leaves out."""
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = _top_k(scores, sampling.top_k)
    if sampling.top_p < 1:
        scores = _top_p(scores, sampling.top_p)
    if sampling.min_p > 0:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -math.inf)
    return scores


def _top_k(scores: Tensor, k: int) -> Tensor:
    """Exactly k tokens stay."""
    return _keep(scores, scores.topk(k).values, torch.full_like(scores[:, :1], k, dtype=torch.long))


def _top_p(scores: Tensor, p: float) -> Tensor:
    """The fewest tokens that reach p stay, at least one."""
    total, V = scores.logsumexp(-1, keepdim=True), scores.shape[-1]
    for width in (min(NUCLEUS, V), V):  # as a rule few are enough, and to sort all takes longer than a small model
        ordered = scores.topk(width).values  # (B, width)
        shares = (ordered - total).exp().double()
        reached = shares.cumsum(-1)
        if (reached[:, -1] >= p).all():
            break
    count = (reached - shares < p).sum(-1, keepdim=True).clamp(min=1)  # those before it are not enough
    return _keep(scores, ordered, count)


def _keep(scores: Tensor, ordered: Tensor, count: Tensor) -> Tensor:
    """The best `count`, (B, 1), stay; of equals at the edge, those of the lowest ids. `ordered`: from the best on."""
    edge = ordered.gather(-1, count - 1)  # (B, 1)
    above, equal = scores > edge, scores == edge
    keep = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    return scores.masked_fill(~keep, -math.inf)
