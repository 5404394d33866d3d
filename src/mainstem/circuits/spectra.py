"""Spectra of heads: singular values of OV and QK, eigenvalues, and whether a head copies the token that it attends to.

The full OV circuit W_E W_V W_O W_U, (V, V), says which logits a head raises when it attends to a token; a head copies
where that is the token itself. The eigenvalues of a circuit that copies are positive (Elhage et al. 2021, "copying"):

    score  =  sum Re(lambda) / sum |lambda|

runs from 1 (copies) through 0 (random weights) to -1 (suppresses what it attends to). It is a summary and no proof. The
same score of W_E QK_2 (W_E OV_1)^T tells whether a later head looks for its own token among those that an earlier head
moved into the keys. An induction head scores near 1 on both.

The eigenvalues of a (V, V) circuit that are not 0 are those of its factors multiplied in turn, (D, D), with W_U W_E in
their middle. Norm scales, a positive number for each token, are left out.
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
    """What the weights of each head say about it alone; n = L H heads, block by block."""

    labels: list[str]
    ov_singular_values: Tensor
    """(n, D), falling."""
    qk_singular_values: Tensor
    """(n, D), falling; at the offset, where positions are rotary."""
    ov_eigenvalues: Tensor
    """(n, D), complex, by falling magnitude; of W_V W_O, from the stream to the stream."""
    copying: Tensor
    """(n,), the score of the full OV circuit; NaN where all its eigenvalues are 0, and where no path leads from `embed`
    through the head to `unembed`."""
    offset: int | None
    """The distance from query to key in QK; None if positions are not rotary."""
    reasons: dict[int, str]
    """Block -> what lies between, where its heads have no such path."""
    notes: tuple[str, ...]
    """What the numbers leave open, and which are missing, in words."""

    def __repr__(self) -> str:
        return summary(
            f"Spectra of {len(self.labels)} heads; the copying score of each", self.top(SHOWN), len(self.labels)
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        """Each head: `label`, `copying`, and the largest singular values, `ov_singular_value`, `qk_singular_value`."""
        columns = self.labels, self.copying, self.ov_singular_values[:, 0], self.qk_singular_values[:, 0]
        names = "label", "copying", "ov_singular_value", "qk_singular_value"
        return [dict(zip(names, row, strict=True)) for row in zip(*map(plain, columns), strict=True)]

    def top(self, n: int = 10) -> Rows[Item]:
        """The n heads of the highest copying scores, highest first; those without a score are left out."""
        return ranked(self.labels, self.copying.tolist(), n, "heads: the copying score of each")


def positive_share(eigenvalues: Tensor) -> Tensor:
    """sum Re / sum | |, over the last axis: from -1 to 1, and NaN where all are 0."""
    return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)


def spectra(model: GPT, offset: int | None = None) -> Spectra:
    """Singular values, eigenvalues and copying scores of every head.

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
    lacking = by_cause(reasons, f"of {len(model.blocks)} blocks lack a copying score")
    values = *singular, ov.eigenvalues(), copying
    return Spectra(every.labels, *values, every.offset, reasons, (*every.notes, *lacking))


def matching(model: GPT, earlier: str, later: str, offset: int | None = None) -> float:
    """Whether the later head's queries look for their own token among those that the earlier head put into its keys.

    The score of W_E QK_2 (W_E OV_1)^T, (V, V), from 1 (looks for the same token) to -1 (avoids it).

    Args:
        model: any GPT.
        earlier, later: heads by their labels, `L0H1`.
        offset: with rotary positions, how far before its query a key stands; None is 1.

    Raises ConfigError for an unknown head, and with the reason where there is no path.
    """
    tokens, moves = writer(model, "embed"), reader(model, f"{earlier}.V")
    queries, keys, moved = reader(model, f"{later}.Q"), reader(model, f"{later}.K"), writer(model, earlier)
    for source, target in ((tokens, moves), (tokens, queries), (moved, keys)):
        check_path(model, source, target)
    W_E = tokens.matrix
    asked = W_E @ at_offset(model, queries.matrix, offset)  # (V, D)
    offered = W_E @ moves.matrix @ (moved.matrix @ keys.matrix)  # (V, D)
    return positive_share(Factored(asked, offered.mT).eigenvalues()).item()
