"""Composition: how far later heads read what earlier heads write, by the weights alone.

The score of an earlier head 1 and a later head 2 is |OV_1 X| / (|OV_1| |X|) in Frobenius norms, where X is QK_2 for
Q-composition, QK_2^T for K-composition and OV_2 for V-composition (Elhage et al. 2021, "composition", here with row
vectors). It is 0 where the later head reads nothing of what the earlier one writes. Two baselines belong with it:

- *Chance.* Unrelated heads score 1 / sqrt(C), whatever their width. `z` counts standard deviations from the mean of
  random heads of the same shape.
- *Rank.* Heads of rank r with flat spectra score at most 1 / sqrt(r), when one reads all that the other writes.
  `rank_corrected` divides by the largest score that any rotation of the stream could give the two spectra, which is
  sqrt(sum s_i(OV_1)^2 s_i(X)^2) / (|OV_1| |X|) by von Neumann's trace inequality, and is 1 for a perfect match.

No (C, C) matrix is formed. OV_1 has the norms of R_V W_O, (D, C), and X those of W_Q R_K^T, W_K R_Q^T or W_V R_O^T,
(C, D), with R the triangle of the outer factor. So a score's numerator is the norm of one (D, D) block of a
large product. The scales of the norms between the heads, a positive number for each token, are left out.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import matrix_norm, svdvals

from mainstem.circuits.factors import product_norms, triangle
from mainstem.circuits.head_weights import Heads, heads
from mainstem.circuits.paths import NoPath, by_cause, check_path
from mainstem.circuits.weights import readers, writers
from mainstem.errors import ConfigError
from mainstem.model import names
from mainstem.model.gpt import GPT
from mainstem.results import SHOWN, Rows, at_least_one, summary

MODES = ("Q", "K", "V")


class HeadPair(NamedTuple):
    """One composition: the later head reads, as its queries, keys or values, what the earlier one writes."""

    writes: str
    reads: str
    mode: str
    score: float
    z: float
    rank_corrected: float

    @property
    def label(self) -> str:
        """The earlier head and the later head's input: `L0H1 -> L1H2.Q`."""
        return f"{self.writes} -> {self.reads}.{self.mode}"

    @property
    def value(self) -> float:
        """The composition score."""
        return self.score


@dataclass(frozen=True, eq=False, repr=False)
class Composition:
    """The scores of all pairs of heads; the tensors are (n, n), writer by reader, n = L H, for each of Q, K and V.

    NaN stands where there is no path, and where one of the two heads is zero.
    """

    labels: list[str]
    scores: dict[str, Tensor]
    ov: Tensor
    """Matrices (n, D, D) of norm 1 with the singular values of each head's OV, up to a factor."""
    qk: Tensor
    """Matrices (n, D, D) of norm 1 with the singular values of each head's QK, up to a factor."""
    width: int
    """Dimensions of the stream that are read: C, or C - 1 where every reader that heads have a path to centres."""
    seed: int
    """The seed of the random heads."""
    offset: int | None
    """The distance from query to key in QK; None if positions are not rotary."""
    reasons: dict[tuple[int, int], str]
    """For pairs (earlier block, later block) without a path, the cause."""
    notes: tuple[str, ...]
    """What the scores leave out, and which are missing."""

    @property
    def chance(self) -> float:
        """The root mean square score of unrelated heads, 1 / sqrt(width)."""
        return self.width**-0.5

    @cached_property
    def _random(self) -> tuple[float, float]:
        std, mean = torch.std_mean(random_scores(self.width, self.ov.shape[-1], self.seed))
        return mean.item(), std.item()

    @property
    def mean(self) -> float:
        """The mean score of random heads of the same shape."""
        return self._random[0]

    @property
    def std(self) -> float:
        """The standard deviation of the scores of random heads of the same shape."""
        return self._random[1]

    @cached_property
    def limits(self) -> dict[str, Tensor]:
        """The largest scores that the spectra of the two heads allow, (n, n) for each mode."""
        ov, qk = (svdvals(unit.nan_to_num()).square() for unit in (self.ov, self.qk))  # (n, D), descending
        by_qk, by_ov = (ov @ qk.T).sqrt(), (ov @ ov.T).sqrt()
        return {"Q": by_qk, "K": by_qk, "V": by_ov}

    @cached_property
    def z(self) -> dict[str, Tensor]:
        """The z-scores, (n, n) for each mode: standard deviations from the mean of random heads."""
        return {mode: (scores - self.mean) / self.std for mode, scores in self.scores.items()}

    @cached_property
    def rank_corrected(self) -> dict[str, Tensor]:
        """The scores divided by their limits, (n, n) for each mode: 1 is a perfect match."""
        return {mode: scores / self.limits[mode] for mode, scores in self.scores.items()}

    def __repr__(self) -> str:
        chance = f"random heads score {self.mean:.4f} (standard deviation {self.std:.4f})"
        pairs = sum(int(scores.isfinite().sum()) for scores in self.scores.values())
        return summary(f"Composition of {len(self.labels)} heads; {chance}", self.top(SHOWN), pairs)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Every pair of heads with a path, in each mode: `label` and the fields of `HeadPair`."""
        return self.top(len(MODES) * len(self.labels) ** 2 + 1).to_dicts()

    def top(self, n: int = 10, modes: str = "QKV") -> Rows[HeadPair]:
        """The n pairs with the highest scores in these modes, highest first. Raises ConfigError for another mode."""
        for mode in modes or " ":
            if mode not in MODES:
                raise ConfigError(f"modes: {modes!r} is not possible; give some of Q, K and V, as in QK")
        scores = torch.stack([self.scores[mode] for mode in modes]).nan_to_num(nan=-1.0)
        count = min(at_least_one(n), int((scores >= 0).sum()))
        best = torch.unravel_index(scores.flatten().argsort(descending=True, stable=True)[:count], scores.shape)
        tables = (torch.stack([table[mode] for mode in modes]) for table in (self.scores, self.z, self.rank_corrected))
        numbers = zip(*(table[best].tolist() for table in tables), strict=True)
        places = zip(*(index.tolist() for index in best), strict=True)
        pairs = ((self.labels[writes], self.labels[reads], modes[index]) for index, writes, reads in places)
        rows = (HeadPair(*pair, *row) for pair, row in zip(pairs, numbers, strict=True))
        return Rows(rows, "pairs of heads: composition score")


def composition(model: GPT, offset: int | None = None, seed: int = 1) -> Composition:
    """The composition scores of every earlier head with every later one: `ms.composition(model).top(5)`.

    Args:
        model: any GPT with at least two blocks of heads.
        offset: with rotary positions, the distance from query to key; default 1.
        seed: the seed of the random heads.

    Raises ConfigError, with the reason, where no pair of heads has a path: one block only, norms over the stream
    (`post`, `deepnorm`), or skips of 0.
    """
    every, missing = heads(model, offset), _missing(model)
    depth, per_block = len(model.blocks), len(every.labels) // len(model.blocks)
    pairs = depth * (depth - 1) // 2
    if not pairs:
        raise ConfigError("a model of one block has no composition; give n_layer at least 2")
    if len(missing) == pairs:
        raise next(iter(missing.values()))
    reasons = {blocks: reason.cause for blocks, reason in missing.items()}
    missing_notes = by_cause(reasons, f"of {pairs} pairs of blocks lack a path")
    written, read, ov, qk = _units(every)
    n = len(every.labels)
    scores = {mode: written.new_full((n, n), torch.nan) for mode in MODES}
    for block in range(depth):
        later = [other for other in range(block + 1, depth) if (block, other) not in reasons]
        if later:  # contiguous: what cuts one reader off cuts off all later ones
            rows = slice(block * per_block, (block + 1) * per_block)
            columns = slice(later[0] * per_block, (later[-1] + 1) * per_block)
            for mode in MODES:
                scores[mode][rows, columns] = product_norms(written[rows], read[mode][columns])
    notes = (*every.notes, *missing_notes)
    return Composition(every.labels, scores, ov, qk, every.width, seed, every.offset, reasons, notes)


def random_scores(width: int, d_head: int, seed: int = 1, count: int = 8) -> Tensor:
    """Scores of `count` random heads (normal entries) with one another, (3, count, count) by mode; float64."""
    generator = torch.Generator().manual_seed(seed)
    W_Q, W_K, W_V, W_O = torch.randn(4, count, width, d_head, generator=generator, dtype=torch.float64)
    written, read, _, _ = _units(Heads([], W_Q, W_K, W_V, W_O.mT, width))
    return torch.stack([product_norms(written, read[mode]) for mode in MODES])


def _missing(model: GPT) -> dict[tuple[int, int], NoPath]:
    """The reason for each pair (earlier block, later block) without a path between their heads."""
    written, read, reasons = writers(model), readers(model), {}
    for earlier, later in combinations(range(len(model.blocks)), 2):
        try:
            check_path(model, written[names.head(earlier, 0)], read[names.head(later, 0, "V")])
        except NoPath as reason:
            reasons[earlier, later] = reason
    return reasons


def _units(of: Heads) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """Every OV as a writer, (n, D, C); every QK, QK^T and OV as a reader, (n, D, C); and OV and QK, (n, D, D).

    All have Frobenius norm 1, so that the norm of writer @ reader^T is the score. The last two have the singular values
    of OV and QK.
    """
    R_Q, R_K, R_V, R_O = (triangle(factor) for factor in (of.W_Q, of.W_K, of.W_V, of.W_O.mT))  # each (n, D, D)
    ov, qk = R_V @ R_O.mT, R_Q @ R_K.mT
    ov_norm, qk_norm = matrix_norm(ov, keepdim=True), matrix_norm(qk, keepdim=True)  # (n, 1, 1)
    written = R_V / ov_norm @ of.W_O
    read = {"Q": R_K / qk_norm @ of.W_Q.mT, "K": R_Q / qk_norm @ of.W_K.mT, "V": R_O / ov_norm @ of.W_V.mT}
    return written, read, ov / ov_norm, qk / qk_norm
