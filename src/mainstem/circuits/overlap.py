"""Overlap of the subspaces of the stream that heads read and write, of any two and in any roles.

A head reads three subspaces, the columns of W_Q, W_K and W_V, and writes one, the rows of W_O. For orthonormal bases U
and W of two of them, of ranks p and q, the projection kernel |U^T W|^2 is the sum of the squared cosines of their
principal angles: 0 where they are orthogonal, min(p, q) where one holds the other. Unlike composition it does not weigh
directions by their singular values, and it also compares heads of one block.

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
"""A direction counts where its singular value is above this share of the largest. It is above float32's rounding, and
the same for every dtype: a model's ranks do not depend on the precision that it is loaded in."""
ROWS = 32
"""Subspaces that are compared with all later ones in one step."""


class SubspacePair(NamedTuple):
    """Two subspaces, `L0H3.O` and `L1H2.K`, and how they lie."""

    first: str
    second: str
    kernel: float
    z: float
    share: float

    @property
    def label(self) -> str:
        """Both subspaces."""
        return f"{self.first} ~ {self.second}"

    @property
    def value(self) -> float:
        """Standard deviations from the mean of random subspaces."""
        return self.z


@dataclass(frozen=True, eq=False, repr=False)
class Overlap:
    """The overlaps of N = 4 L H subspaces; tables are (N, N), symmetric, in the order of `labels`: role by role.

    All tensors are on the CPU: the moments of random subspaces need float64, which not every device has.
    """

    labels: list[str]
    bases: Tensor
    """(N, D, C): orthonormal rows, zero beyond the rank."""
    ranks: Tensor
    """(N,)."""
    kernel: Tensor
    """(N, N), sums of squared cosines."""
    width: int
    """d, the dimensions that are read: C, and C - 1 where all the readers centre that heads have a path to."""

    def span(self, role: str) -> slice:
        """Where the subspaces of a role lie: `overlap.z[overlap.span("O"), overlap.span("K")]` is (L H, L H)."""
        if role not in ROLES:
            raise ConfigError(f"role: {role!r} is not one of a head's; {nearest(role, ROLES)}")
        count, index = len(self.labels) // len(ROLES), ROLES.index(role)
        return slice(index * count, (index + 1) * count)

    @cached_property
    def mean(self) -> Tensor:
        """(N, N), of random subspaces of these ranks."""
        return random_moments(self.ranks[:, None], self.ranks, self.width)[0]

    @cached_property
    def z(self) -> Tensor:
        """(N, N), standard deviations from the mean; NaN where a subspace is empty or is all of the stream."""
        mean, variance = random_moments(self.ranks[:, None], self.ranks, self.width)
        return ((self.kernel - mean) / variance.sqrt()).where(variance > 0, torch.nan)

    @cached_property
    def share(self) -> Tensor:
        """(N, N), kernel / min(p, q): from 0 to 1, and NaN where a subspace is empty."""
        return self.kernel / torch.minimum(self.ranks[:, None], self.ranks)

    @cached_property
    def chance(self) -> Tensor:
        """(N, N), the share that random subspaces of these ranks have in the mean; NaN where one is empty."""
        return self.mean / torch.minimum(self.ranks[:, None], self.ranks)

    def angles(self, first: str, second: str) -> Tensor:
        """The min(p, q) principal angles of two subspaces by their labels, in radians, rising.

        Small angles are taken from their sines and large ones from their cosines, so that both are exact (Björck and
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
        """Every pair of two different subspaces, neither empty nor all of the stream: `label`, and `SubspacePair`'s."""
        return self.top(len(self.labels) ** 2 + 1).to_dicts()

    def top(self, n: int = 10) -> Rows[SubspacePair]:
        """The n pairs of two different subspaces of the highest z, highest first."""
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
    """The row spaces of a stack (N, k, C): orthonormal rows (N, min(k, C), C), zero beyond the rank; ranks (N,)."""
    Q, R = torch.linalg.qr(rows.mT)
    U, S, _ = torch.linalg.svd(R, full_matrices=False)
    kept = S / S[:, :1] > RANK_TOLERANCE  # 0 / 0 is above nothing
    return (Q @ U).mT * kept[..., None], kept.sum(-1)


def overlap(model: GPT) -> Overlap:
    """The overlaps of every head's four subspaces with every other's, heads of one block included.

    A rotation of queries or keys, and an offset, change no subspace. Raises ConfigError for a model without heads.
    """
    every = heads(model)
    stacks = (every.W_Q.mT, every.W_K.mT, every.W_V.mT, every.W_O)
    bases, ranks = subspaces(torch.cat(stacks))
    half = bases.new_zeros(len(bases), len(bases))
    for start in range(0, len(bases), ROWS):
        some = slice(start, start + ROWS)
        half[some, start:] = product_norms(bases[some], bases[start:]).square()
    kernel = half.triu() + half.triu(1).T
    labels = [f"{label}.{role}" for role in ROLES for label in every.labels]
    return Overlap(labels, bases.cpu(), ranks.cpu(), kernel.cpu(), every.width)
