"""Sampling: the choice of the next token of every row of a batch.

The order is fixed: mask forbidden tokens, repetition penalty, argmax if greedy, temperature, top-k, top-p, min-p; all
in float32, after the largest score is subtracted.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from mainstem.config import Sampling
from mainstem.errors import RunError

NUCLEUS = 1024
"""Top-p sorts only the largest NUCLEUS scores where these suffice."""


def row_generator(seed: int, sample: int) -> torch.Generator:
    """The random generator of one row, on the CPU: the same in any batch and on every device."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence((seed, sample)).generate_state(1, np.uint64)[0]))


def choose(
    logits: Tensor,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    previous: Sequence[Collection[int]] = (),
    forbidden: Tensor | None = None,
) -> list[int]:
    """The next id of each row.

    Args:
        logits: (B, V), of any float dtype.
        sampling: the sampling parameters.
        generators: one for each row, on the CPU; each draws one number per call, none if greedy.
        previous: each row's ids of prompt and text so far, for the repetition penalty.
        forbidden: (B, V) bool, true for tokens that must not be chosen; false at least once in each row.

    Raises RunError for logits that are not finite.
    """
    scores = (logits.cpu() if logits.device.type == "mps" else logits).float()  # MPS has returned ids of -2^63
    if forbidden is not None:
        scores = scores.masked_fill(forbidden.to(scores.device), -math.inf)
    if sampling.repetition_penalty != 1:
        scores = _penalise(scores, previous, sampling.repetition_penalty)
    best = scores.amax(-1, keepdim=True)  # (B, 1)
    if not torch.isfinite(best).all():
        raise RunError("the model's logits are not finite, so its weights are damaged; open an earlier checkpoint")
    if sampling.greedy:
        return scores.argmax(-1).tolist()
    probabilities = _truncated((scores - best) / sampling.temperature, sampling).softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    cumulative = cumulative / cumulative[:, -1:]  # ends in exactly 1, which every draw is below
    draws = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    return torch.searchsorted(cumulative, draws.to(cumulative.device), right=True)[:, 0].tolist()


def _penalise(scores: Tensor, previous: Sequence[Collection[int]], penalty: float) -> Tensor:
    """Scores (B, V) with the repetition penalty on previous ids: positive ones divided, negative ones multiplied."""
    scores = scores.clone()
    for row, ids in zip(scores, previous, strict=True):
        index = torch.tensor(list(ids), dtype=torch.long, device=scores.device)
        row[index] = torch.where(row[index] > 0, row[index] / penalty, row[index] * penalty)
    return scores


def _truncated(scores: Tensor, sampling: Sampling) -> Tensor:
    """Scores (B, V), of which each row's largest is 0, with -inf for tokens outside top-k, top-p or min-p."""
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = _top_k(scores, sampling.top_k)
    if sampling.top_p < 1:
        scores = _top_p(scores, sampling.top_p)
    if sampling.min_p > 0:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -math.inf)
    return scores


def _top_k(scores: Tensor, k: int) -> Tensor:
    """The scores with all but the k largest of each row set to -inf."""
    return _keep(scores, scores.topk(k).values, torch.full_like(scores[:, :1], k, dtype=torch.long))


def _top_p(scores: Tensor, p: float) -> Tensor:
    """The scores with all but the smallest set of tokens whose probability reaches p set to -inf."""
    total, V = scores.logsumexp(-1, keepdim=True), scores.shape[-1]
    for width in (min(NUCLEUS, V), V):  # few usually suffice; sorting all would dominate the time of a small model
        ordered = scores.topk(width).values  # (B, width)
        shares = (ordered - total).exp().double()
        reached = shares.cumsum(-1)
        if (reached[:, -1] >= p).all():
            break
    count = (reached - shares < p).sum(-1, keepdim=True).clamp(min=1)  # the tokens before it do not reach p
    return _keep(scores, ordered, count)


def _keep(scores: Tensor, ordered: Tensor, count: Tensor) -> Tensor:
    """The scores with all but the `count` (B, 1) largest set to -inf; ties go to low ids. `ordered`: descending."""
    edge = ordered.gather(-1, count - 1)  # (B, 1)
    above, equal = scores > edge, scores == edge
    keep = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    return scores.masked_fill(~keep, -math.inf)
