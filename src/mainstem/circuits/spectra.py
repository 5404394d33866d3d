"""Spectra of heads: singular values of OV and QK, eigenvalues of OV, and copying scores.

The full OV circuit W_E W_V W_O W_U, (V, V), gives the logits that a head raises when it attends to a token. A copying
head raises the logit of that token; the eigenvalues of its circuit are positive (Elhage et al. 2021, "copying"):

    score  =  sum Re(lambda) / sum |lambda|

runs from 1 (copies) through 0 (random weights) to -1 (suppresses what it attends to). It is a summary, not a proof. The
same score of W_E QK_2 (W_E OV_1)^T measures whether a later head attends where an earlier head wrote the token of its
query into the key. An induction head scores near 1 on both.

The nonzero eigenvalues of a (V, V) circuit are those of the product of its factors in cyclic order, (D, D), with
W_U W_E inside. Norm scales, a positive number for each token, are left out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mainstem.circuits.factors import Factored
from mainstem.circuits.head_weights import at_offset, heads
from mainstem.circuits.paths import NoPath, by_cause, check_path
from mainstem.circuits.weights import reader, readers, writer, writers
from mainstem.model import names
from mainstem.model.gpt import GPT
from mainstem.results import SHOWN, Item, Rows, plain, ranked, summary


@dataclass(frozen=True, eq=False, repr=False)
class Spectra:
    """Singular values, eigenvalues and copying scores of n = L H heads, block by block."""

    labels: list[str]
    ov_singular_values: Tensor
    """Singular values of OV, (n, D), descending."""
    qk_singular_values: Tensor
    """Singular values of QK, (n, D), descending; at the offset, where positions are rotary."""
    ov_eigenvalues: Tensor
    """Eigenvalues of OV = W_V W_O, (n, D), complex, by descending magnitude."""
    copying: Tensor
    """The copying score of the full OV circuit, (n,); NaN where all its eigenvalues are 0 and where there is no path
    from `embed` through the head to `unembed`."""
    offset: int | None
    """The distance from query to key in QK; None if positions are not rotary."""
    reasons: dict[int, str]
    """For blocks whose heads lack this path, the cause."""
    notes: tuple[str, ...]
    """What the numbers leave out, and which are missing."""

    def __repr__(self) -> str:
        return summary(
            f"Spectra of {len(self.labels)} heads; the copying score of each", self.top(SHOWN), len(self.labels)
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values, one a head: `label`, `copying`, largest `ov_singular_value` and `qk_singular_value`."""
        columns = self.labels, self.copying, self.ov_singular_values[:, 0], self.qk_singular_values[:, 0]
        names = "label", "copying", "ov_singular_value", "qk_singular_value"
        return [dict(zip(names, row, strict=True)) for row in zip(*map(plain, columns), strict=True)]

    def top(self, n: int = 10) -> Rows[Item]:
        """The n heads with the highest copying scores, highest first; heads without a score are dropped."""
        return ranked(self.labels, self.copying.tolist(), n, "heads: copying score")


def positive_share(eigenvalues: Tensor) -> Tensor:
    """The score sum Re(lambda) / sum |lambda| over the last axis: from -1 to 1; NaN where all are 0."""
    return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)


def spectra(model: GPT, offset: int | None = None) -> Spectra:
    """Singular values, eigenvalues and copying scores of every head: `ms.spectra(model).top(5)`.

    Raises ConfigError for a model without heads, and for an offset where positions are not rotary.
    """
    every, written, read = heads(model, offset), writers(model), readers(model)
    ov, qk = Factored(every.W_V, every.W_O), Factored(every.W_Q, every.W_K.mT)
    between = read["unembed"].matrix @ written["embed"].matrix  # W_U W_E, (C, C)
    copying = positive_share(torch.linalg.eigvals(every.W_O @ between @ every.W_V))
    reasons, per_block = {}, len(every.labels) // len(model.blocks)
    for block in range(len(model.blocks)):
        try:
            check_path(model, written["embed"], read[names.head(block, 0, "V")])
            check_path(model, written[names.head(block, 0)], read["unembed"])
        except NoPath as reason:
            reasons[block] = reason.cause
            copying[block * per_block : (block + 1) * per_block] = torch.nan
    singular = ov.singular_values(), qk.singular_values()
    missing_notes = by_cause(reasons, f"of {len(model.blocks)} blocks lack a copying score")
    values = *singular, ov.eigenvalues(), copying
    return Spectra(every.labels, *values, every.offset, reasons, (*every.notes, *missing_notes))


def matching(model: GPT, earlier: str, later: str, offset: int | None = None) -> float:
    """The matching score of two heads: whether the later one attends to keys in which the earlier one wrote its token.

    It is the score of W_E QK_2 (W_E OV_1)^T, (V, V), from 1 (attends to the same token) to -1 (avoids it).

    Args:
        model: any GPT.
        earlier, later: labels of heads, `L0H1`.
        offset: with rotary positions, the distance from query to key; default 1.

    Raises ConfigError for an unknown head, and with the reason where there is no path.
    """
    tokens, moves = writer(model, "embed"), reader(model, f"{earlier}.V")
    queries, keys, moved = reader(model, f"{later}.Q"), reader(model, f"{later}.K"), writer(model, earlier)
    for source, target in ((tokens, moves), (tokens, queries), (moved, keys)):
        check_path(model, source, target)
    W_E = tokens.matrix
    query_side = W_E @ at_offset(model, queries.matrix, offset)  # (V, D)
    key_side = W_E @ moves.matrix @ (moved.matrix @ keys.matrix)  # (V, D)
    return positive_share(Factored(query_side, key_side.mT).eigenvalues()).item()
