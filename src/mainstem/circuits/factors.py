"""Matrices of low rank as two factors, whose product would be large.

A head's OV and QK are (C, C) and of rank D, the direct path from embedding to unembedding is (V, V) and of rank C.
Norms, singular values and eigenvalues are computed from the factors; the product is never stored. The Frobenius norm is
not cyclic: |A B| and |B A| differ, though their eigenvalues do not. So it is computed from the triangles of both
factors: A = Q_a R_a and B^T = Q_b R_b give |A B| = |R_a R_b^T|.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import vector_norm

from mainstem.circuits.chunks import Largest, row_chunks
from mainstem.errors import ConfigError


def triangle(factor: Tensor) -> Tensor:
    """The triangle R of factor = Q R, (..., m, r) -> (..., min(m, r), r): |factor @ X| = |R @ X| for every X."""
    return torch.linalg.qr(factor, mode="r").R


@dataclass(frozen=True, eq=False)
class Factored:
    """A matrix left @ right by its factors, (..., m, r) and (..., r, n); leading axes are a batch.

    Raises ConfigError if the inner widths differ.
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        if self.left.shape[-1] != self.right.shape[-2]:
            raise ConfigError(
                f"factors of shapes {tuple(self.left.shape)} and {tuple(self.right.shape)} have no product; "
                "the first must have as many columns as the second has rows"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the product, (m, n)."""
        return self.left.shape[-2], self.right.shape[-1]

    @property
    def inner(self) -> int:
        """The inner width r, which the rank does not exceed."""
        return self.left.shape[-1]

    @property
    def T(self) -> "Factored":
        """The transpose, (n, m)."""
        return Factored(self.right.mT, self.left.mT)

    def dense(self) -> Tensor:
        """The product as one tensor, (..., m, n)."""
        return self.left @ self.right

    def __matmul__(self, other: "Factored | Tensor") -> "Factored":
        """The product with a matrix (n, p), with the smaller of the two inner widths."""
        if isinstance(other, Tensor):
            return Factored(self.left, self.right @ other)
        between = self.right @ other.left  # (..., r, r')
        if self.inner <= other.inner:
            return Factored(self.left, between @ other.right)
        return Factored(self.left @ between, other.right)

    @cached_property
    def _kernel(self) -> Tensor:
        """A small matrix with the product's norm and singular values, R_left R_right^T."""
        return triangle(self.left) @ triangle(self.right.mT).mT

    def norm(self) -> Tensor:
        """The Frobenius norm, (...)."""
        return torch.linalg.matrix_norm(self._kernel)

    def singular_values(self) -> Tensor:
        """The largest min(m, r, n) singular values, (..., min(m, r, n)), descending; the others are 0."""
        return torch.linalg.svdvals(self._kernel)

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """The SVD: U (..., m, s), S (..., s) descending, Vh (..., s, n), with s = min(m, r, n)."""
        q_left, r_left = torch.linalg.qr(self.left)
        q_right, r_right = torch.linalg.qr(self.right.mT)
        U, S, Vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
        return q_left @ U, S, Vh @ q_right.mT

    def eigenvalues(self) -> Tensor:
        """The min(m, r) eigenvalues that can differ from 0, complex, (..., min(m, r)), by descending magnitude.

        A B and B A have the same nonzero eigenvalues, so the smaller product is solved. Raises ConfigError if the
        product is not square.
        """
        if self.shape[0] != self.shape[1]:
            raise ConfigError(f"a matrix of shape {self.shape} has no eigenvalues; use its singular values")
        small = self.right @ self.left if self.inner <= self.shape[0] else self.dense()
        values = torch.linalg.eigvals(small)
        return values.gather(-1, values.abs().argsort(-1, descending=True))

    def largest(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Values, rows and columns of the `count` entries of largest magnitude, each (count,).

        The product is computed a few rows at a time. Raises ConfigError for a batch, and for a count below 1.
        """
        if self.left.ndim != 2 or self.right.ndim != 2:
            raise ConfigError("`largest` is not supported for a batch of matrices; choose one of them")
        best = Largest(count, self.left, others=1)
        for start, chunk in row_chunks(self.left, self.shape[1]):
            entries = chunk @ self.right
            best.add(start, entries.abs(), entries)
        rows, columns = best.places.T
        return best.entries[1], rows, columns


def product_norms(left: Tensor, right: Tensor) -> Tensor:
    """The Frobenius norms |left[i] @ right[j]^T| of two stacks of matrices, (n, p, C) and (m, q, C) -> (n, m).

    The products are computed as blocks of larger ones, a few million numbers at a time.
    """
    n, p, C = left.shape
    m, q, _ = right.shape
    rows = left.reshape(n * p, C)
    norms = left.new_empty(n, m)
    for start, chunk in row_chunks(right, n * p * q):
        blocks = (rows @ chunk.reshape(-1, C).T).view(n, p, len(chunk), q)
        norms[:, start : start + len(chunk)] = vector_norm(vector_norm(blocks, dim=-1), dim=1)
    return norms
