"""A product kept as two factors is the product: norms, spectra, products and entries are those of the dense matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.circuits import chunks
from mainstem.circuits.factors import Factored, product_norms
from mainstem.errors import ConfigError
from models import error, few

widths = st.integers(1, 9)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(m, r, n, *batch, seed=0):
    return Factored(drawn(*batch, m, r, seed=seed), drawn(*batch, r, n, seed=seed + 1))


@few
@given(widths, widths, widths, st.sampled_from(((), (3,))))
def test_norm_and_singular_values_are_the_dense_ones(m, r, n, batch):
    """Also where the inner width is the largest, and for a batch."""
    product = pair(m, r, n, *batch)
    dense, rank = product.dense(), min(m, r, n)
    assert error(product.norm(), torch.linalg.matrix_norm(dense)) < 1e-10
    assert product.singular_values().shape == (*batch, rank)
    assert error(product.singular_values(), torch.linalg.svdvals(dense)[..., :rank]) < 1e-10

    U, S, Vh = product.svd()
    assert error(U * S[..., None, :] @ Vh, dense) < 1e-10
    assert error(U.mT @ U, torch.eye(rank).expand(*batch, rank, rank)) < 1e-10
    assert error(Vh @ Vh.mT, torch.eye(rank).expand(*batch, rank, rank)) < 1e-10
    assert error(S, product.singular_values()) < 1e-10


@few
@given(widths, widths)
def test_eigenvalues_are_the_dense_ones_without_the_zeros(m, r):
    product = pair(m, r, m)
    found, dense = product.eigenvalues(), torch.linalg.eigvals(product.dense())
    assert len(found) == min(m, r)
    found = torch.cat((found, torch.zeros(m - len(found))))
    distances = (found[:, None] - dense).abs()
    assert max(distances.amin(0).max(), distances.amin(1).max()) < 1e-9 * dense.abs().max()
    assert (found.abs().diff() <= 1e-12).all()


@few
@given(widths, widths, widths, widths, widths)
def test_products_and_transposes(m, r, n, s, p):
    """The inner width of a product of two is the smaller one."""
    first, second, plain = pair(m, r, n), pair(n, s, p, seed=2), drawn(n, p)
    product = first @ second
    assert product.shape == (m, p)
    assert product.inner == min(r, s)
    assert error(product.dense(), first.dense() @ second.dense()) < 1e-10
    assert error((first @ plain).dense(), first.dense() @ plain) < 1e-10
    assert torch.equal(first.T.T.dense(), first.dense())


def test_the_norm_is_not_cyclic_and_the_eigenvalues_are():
    product = pair(64, 8, 64)
    turned = product.right @ product.left  # (8, 8)
    assert error(product.norm(), torch.linalg.matrix_norm(turned)) > 0.5
    assert error(product.eigenvalues().sum().real, turned.trace()) < 1e-10


@few
@given(widths, widths, widths, st.integers(1, 30), st.sampled_from((1, 7, 1 << 22)))
def test_the_largest_entries_are_found_a_few_rows_at_a_time(m, r, n, count, chunk):
    product = pair(m, r, n)
    dense = product.dense()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", chunk)
        values, rows, columns = product.largest(count)
    assert len(values) == min(count, m * n)
    assert error(dense[rows, columns], values) < 1e-12
    assert error(values.abs(), dense.abs().flatten().sort(descending=True).values[: len(values)]) < 1e-12
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == len(values)


@few
@given(widths, widths, widths, widths, widths, st.sampled_from((1, 50, 1 << 22)))
def test_the_norms_of_all_products_of_two_stacks(n, m, p, q, C, chunk):
    left, right = drawn(n, p, C), drawn(m, q, C, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", chunk)
        norms = product_norms(left, right)
    assert error(norms, torch.linalg.matrix_norm(left[:, None] @ right.mT)) < 1e-10


def test_what_has_no_answer_is_refused():
    with pytest.raises(ConfigError, match=r"shapes \(3, 2\) and \(4, 3\) have no product; .* as many columns as"):
        Factored(drawn(3, 2), drawn(4, 3))
    with pytest.raises(ConfigError, match=r"shape \(3, 4\) has no eigenvalues; use its singular values"):
        pair(3, 2, 4).eigenvalues()
    with pytest.raises(ConfigError, match="count: 0 is not supported"):
        pair(3, 2, 4).largest(0)
    with pytest.raises(ConfigError, match="choose one of them"):
        pair(3, 2, 4, 5).largest(1)
