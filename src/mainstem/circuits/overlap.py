"""Overlap of the subspaces of the residual stream that heads read and write.

A head reads three subspaces, the columns of W_Q, W_K and W_V, and writes one, the rows of W_O. For orthonormal bases U
and W of two of them, of ranks p and q, the projection kernel |U^T W|^2 is the sum of the squared cosines of their
principal angles: 0 where they are orthogonal, min(p, q) where one contains the other. Unlike composition it does not
weight directions by their singular values, and it also compares heads of one block.

Two subspaces drawn at random in d dimensions have, exactly,

    mean  p q / d        variance  2 p q (d - p) (d - q) / (d^2 (d - 1) (d + 2))

which follow from the moments of the uniform distribution over projections.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mainstem.circuits.factors import product_norms
from mainstem.circuits.head_weights import heads
from mainstem.errors import ConfigError, nearest
from mainstem.model.gpt import GPT
from mainstem.results import SHOWN, Rows, at_least_one, summary

ROLES = ("Q", "K", "V", "O")
RANK_TOLERANCE = 1e-5
"""Relative tolerance of the rank: singular values above this share of the largest count. It is above float32's rounding
and the same for every dtype, so a model's ranks do not depend on the precision that it is loaded in."""
ROWS = 32
"""Subspaces that are compared with all later ones at once."""


class SubspacePair(NamedTuple):
    """Two subspaces, `L0H3.O` and `L1H2.K`, and their overlap."""

    first: str
    second: str
    kernel: float
    z: float
    share: float

    @property
    def label(self) -> str:
        """The labels of both subspaces: `L0H3.O ~ L1H2.K`."""
        return f"{self.first} ~ {self.second}"

    @property
    def value(self) -> float:
        """The z-score: standard deviations from the mean of random subspaces."""
        return self.z


@dataclass(frozen=True, eq=False, repr=False)
class Overlap:
    """The overlaps of N = 4 L H subspaces; tables are (N, N), symmetric, in the order of `labels`: role by role.

    All tensors are on the CPU: the moments of random subspaces need float64, which not every device has.
    """

    labels: list[str]
    bases: Tensor
    """Orthonormal rows, (N, D, C), zero beyond the rank."""
    ranks: Tensor
    """The rank of each subspace, (N,)."""
    kernel: Tensor
    """The projection kernel, (N, N): sums of squared cosines of the principal angles."""
    width: int
    """Dimensions d of the stream that are read: C, or C - 1 where every reader that heads have a path to centres."""

    def span(self, role: str) -> slice:
        """The slice of a role's subspaces: `overlap.z[overlap.span("O"), overlap.span("K")]` is (L H, L H)."""
        if role not in ROLES:
            raise ConfigError(f"role: unknown value {role!r}; {nearest(role, ROLES)}")
        count, index = len(self.labels) // len(ROLES), ROLES.index(role)
        return slice(index * count, (index + 1) * count)

    @cached_property
    def mean(self) -> Tensor:
        """The mean kernel of random subspaces of these ranks, (N, N)."""
        return random_moments(self.ranks[:, None], self.ranks, self.width)[0]

    @cached_property
    def z(self) -> Tensor:
        """The z-scores, (N, N): standard deviations from the mean; NaN where a subspace is empty or everything."""
        mean, variance = random_moments(self.ranks[:, None], self.ranks, self.width)
        return ((self.kernel - mean) / variance.sqrt()).where(variance > 0, torch.nan)

    @cached_property
    def share(self) -> Tensor:
        """The kernel divided by min(p, q), (N, N): from 0 to 1; NaN where a subspace is empty."""
        return self.kernel / torch.minimum(self.ranks[:, None], self.ranks)

    @cached_property
    def chance(self) -> Tensor:
        """The mean share of random subspaces of these ranks, (N, N); NaN where one is empty."""
        return self.mean / torch.minimum(self.ranks[:, None], self.ranks)

    def angles(self, first: str, second: str) -> Tensor:
        """The min(p, q) principal angles of two subspaces by their labels, in radians, ascending.

        Small angles are computed from sines and large ones from cosines, so that both are accurate (Björck and
        Golub 1973). Raises ConfigError for an unknown label.
        """
        a, b = sorted((self._basis(first), self._basis(second)), key=len)  # (p, C), (q, C), p <= q
        inside = a @ b.T
        cosines = torch.linalg.svdvals(inside).clamp(max=1)
        sines = torch.linalg.svdvals(a - inside @ b).flip(0).clamp(max=1)
        return torch.where(cosines.square() > 0.5, sines.asin(), cosines.acos())

    def _basis(self, label: str) -> Tensor:
        if label not in self.labels:
            raise ConfigError(f"subspace: {label!r} is not in this model; {nearest(label, self.labels)}")
        index = self.labels.index(label)
        return self.bases[index, : int(self.ranks[index])]

    def __repr__(self) -> str:
        N = len(self.labels)
        title = f"Overlap of {N} subspaces in {self.width} dimensions; standard deviations from the mean of random ones"
        return summary(title, self.top(SHOWN), N * (N - 1) // 2)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values, one a pair of subspaces with a z-score: `label` and the fields of `SubspacePair`."""
        return self.top(len(self.labels) ** 2 + 1).to_dicts()

    def top(self, n: int = 10) -> Rows[SubspacePair]:
        """The n pairs of different subspaces with the highest z, highest first."""
        first, second = torch.triu_indices(len(self.labels), len(self.labels), offset=1)
        z = self.z[first, second].nan_to_num(nan=-torch.inf)
        best = z.argsort(descending=True, stable=True)[: min(at_least_one(n), int(z.isfinite().sum()))]
        i, j = first[best], second[best]
        numbers = zip(*(table[i, j].tolist() for table in (self.kernel, self.z, self.share)), strict=True)
        pairs = ((self.labels[a], self.labels[b]) for a, b in zip(i.tolist(), j.tolist(), strict=True))
        rows = (SubspacePair(*pair, *row) for pair, row in zip(pairs, numbers, strict=True))
        return Rows(rows, "pairs of subspaces: standard deviations from chance")


def random_moments(p: Tensor | int, q: Tensor | int, width: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the kernel of two random subspaces of ranks p and q in `width` dimensions."""
    p, q, d = (torch.as_tensor(value, dtype=torch.float64) for value in (p, q, width))
    return p * q / d, 2 * p * q * (d - p) * (d - q) / (d.square() * (d - 1) * (d + 2))


def subspaces(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Bases and ranks of row spaces, (N, k, C) -> orthonormal rows (N, min(k, C), C), 0 beyond the rank, and (N,)."""
    Q, R = torch.linalg.qr(rows.mT)
    U, S, _ = torch.linalg.svd(R, full_matrices=False)
    in_rank = S / S[:, :1] > RANK_TOLERANCE  # false for NaN, 0 / 0
    return (Q @ U).mT * in_rank[..., None], in_rank.sum(-1)


def overlap(model: GPT) -> Overlap:
    """The overlaps of the four subspaces of every head with one another: `ms.overlap(model).top(5)`.

    A rotation of queries or keys, and an offset, change no subspace. Raises ConfigError for a model without heads.
    """
    every = heads(model)
    stacks = (every.W_Q.mT, every.W_K.mT, every.W_V.mT, every.W_O)
    bases, ranks = subspaces(torch.cat(stacks))
    half = bases.new_zeros(len(bases), len(bases))
    for start in range(0, len(bases), ROWS):
        chunk = slice(start, start + ROWS)
        half[chunk, start:] = product_norms(bases[chunk], bases[start:]).square()
    kernel = half.triu() + half.triu(1).T
    labels = [f"{label}.{role}" for role in ROLES for label in every.labels]
    return Overlap(labels, bases.cpu(), ranks.cpu(), kernel.cpu(), every.width)
