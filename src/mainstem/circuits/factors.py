"""Matrices that are kept as two factors, because the product would be large and of low rank.

A head's OV and QK are (C, C) and of rank D, the direct path from embedding to unembedding is (V, V) and of rank C.
Norms, singular values and eigenvalues follow from the factors; the product itself is never held. The Frobenius norm is
not cyclic: |A B| and |B A| differ, though their eigenvalues do not. It is therefore taken from the triangles of both
factors, A = Q_a R_a and B^T = Q_b R_b giving |A B| = |R_a R_b^T|, and never from the product the other way round.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import vector_norm

from mainstem.circuits.chunks import Largest, row_chunks
from mainstem.errors import ConfigError


def triangle(factor: Tensor) -> Tensor:
    """R of factor = Q R, (..., m, r) -> (..., min(m, r), r): |factor @ X| = |R @ X| for every X."""
    return torch.linalg.qr(factor, mode="r").R


@dataclass(frozen=True, eq=False)
class Factored:
    """left @ right, (..., m, r) and (..., r, n), by its factors; leading axes are a batch.

    Raises ConfigError if the inner widths differ.
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        if self.left.shape[-1] != self.right.shape[-2]:
            raise ConfigError(
                f"factors of shapes {tuple(self.left.shape)} and {tuple(self.right.shape)} have no product; "
                "the first one's columns must be as many as the second one's rows"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of the product."""
        return self.left.shape[-2], self.right.shape[-1]

    @property
    def inner(self) -> int:
        """r, the width between the factors: the rank is at most this."""
        return self.left.shape[-1]

    @property
    def T(self) -> "Factored":
        """The transpose, (n, m)."""
        return Factored(self.right.mT, self.left.mT)

    def dense(self) -> Tensor:
        """The product itself, (..., m, n)."""
        return self.left @ self.right

    def __matmul__(self, other: "Factored | Tensor") -> "Factored":
        """The product with another, (n, p), kept at the smaller of the two inner widths."""
        if isinstance(other, Tensor):
            return Factored(self.left, self.right @ other)
        between = self.right @ other.left  # (..., r, r')
        if self.inner <= other.inner:
            return Factored(self.left, between @ other.right)
        return Factored(self.left @ between, other.right)

    @cached_property
    def _kernel(self) -> Tensor:
        """R_left R_right^T: small, with the product's norm and singular values."""
        return triangle(self.left) @ triangle(self.right.mT).mT

    def norm(self) -> Tensor:
        """The Frobenius norm, (...)."""
        return torch.linalg.matrix_norm(self._kernel)

    def singular_values(self) -> Tensor:
        """The largest min(m, r, n) singular values, (..., min(m, r, n)), falling; the others are 0."""
        return torch.linalg.svdvals(self._kernel)

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U (..., m, s), S (..., s) falling, Vh (..., s, n), with s = min(m, r, n): U diag(S) Vh is the product."""
        q_left, r_left = torch.linalg.qr(self.left)
        q_right, r_right = torch.linalg.qr(self.right.mT)
        U, S, Vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
        return q_left @ U, S, Vh @ q_right.mT

    def eigenvalues(self) -> Tensor:
        """The min(m, r) eigenvalues that can differ from 0, complex, (..., min(m, r)), by falling magnitude.

        A B and B A have the same ones but for zeros, so the smaller of the two is solved. Raises ConfigError if the
        product is not square.
        """
        if self.shape[0] != self.shape[1]:
            raise ConfigError(f"a matrix of shape {self.shape} has no eigenvalues; ask for its singular values")
        small = self.right @ self.left if self.inner <= self.shape[0] else self.dense()
        values = torch.linalg.eigvals(small)
        return values.gather(-1, values.abs().argsort(-1, descending=True))

    def largest(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` entries of the largest magnitude: their values, rows and columns, each (count,).

        The product is made a few rows at a time. Raises ConfigError for a batch, and for a count below 1.
        """
        if self.left.ndim != 2 or self.right.ndim != 2:
            raise ConfigError("the largest entries are those of one matrix; choose one of the batch")
        best = Largest(count, self.left, others=1)
        for start, some in row_chunks(self.left, self.shape[1]):
            entries = some @ self.right
            best.add(start, entries.abs(), entries)
        rows, columns = best.places.T
        return best.entries[1], rows, columns


def product_norms(left: Tensor, right: Tensor) -> Tensor:
    """|left[i] @ right[j]^T|, the Frobenius norms of all products of two stacks: (n, p, C) and (m, q, C) give (n, m).

    They are blocks of large products, which are made a few million numbers at a time and summed while in the cache.
    """
    n, p, C = left.shape
    m, q, _ = right.shape
    rows = left.reshape(n * p, C)
    norms = left.new_empty(n, m)
    for start, some in row_chunks(right, n * p * q):
        blocks = (rows @ some.reshape(-1, C).T).view(n, p, len(some), q)
        norms[:, start : start + len(some)] = vector_norm(vector_norm(blocks, dim=-1), dim=1)
    return norms
