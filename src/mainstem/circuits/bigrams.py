"""Bigrams in the weights: the logits of the next token along the direct path from embedding to unembedding.

A model without blocks is the bigram table W_E W_U, the direct path (Elhage et al. 2021, "Zero-Layer Transformers").
V vocabulary. The table, (V, V), is computed some rows at a time and never stored.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mainstem.circuits.chunks import Largest, row_chunks
from mainstem.circuits.factors import Factored
from mainstem.circuits.virtual import virtual
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.norms import Norm
from mainstem.results import Rows, summary


class Bigram(NamedTuple):
    """One entry of the direct path: the logit of token `out` after `token`."""

    token: int
    out: int
    logit: float
    """The logit less the mean of the token's row, which changes no prediction."""

    @property
    def label(self) -> str:
        """Both token ids: `17 -> 4`."""
        return f"{self.token} -> {self.out}"

    @property
    def value(self) -> float:
        """The logit, less the mean of its row."""
        return self.logit


@dataclass(frozen=True, eq=False, repr=False)
class Bigrams:
    """The direct path from `embed` to `unembed`, [token, next token], as logits."""

    matrix: Factored
    """The table of logits, (V, V), in two factors."""
    notes: tuple[str, ...]
    """What the table leaves out: the scale of `ln_f`, a positive number for each token, and the biases after it."""

    def row(self, token: int) -> Tensor:
        """The logits after a token, (V,). Raises ConfigError for an id outside the vocabulary."""
        return self._left(token)[0] @ self.matrix.right

    def __repr__(self) -> str:
        V = self.matrix.shape[0]
        return summary(f"Bigrams: {V:,} tokens x {V:,} next tokens; top(n) is of all, top(n, token) of one row")

    def to_dicts(self, n: int = 100) -> list[dict[str, Any]]:
        """The rows of `top(n)`: `label`, `token`, `out` and `logit`; the whole table is never stored."""
        return self.top(n).to_dicts()

    def top(self, n: int = 10, token: int | None = None) -> Rows[Bigram]:
        """The n entries with the largest logits (less the row's mean), largest first; of one token's row, or of all.

        Raises ConfigError for an id outside the vocabulary.
        """
        left = self.matrix.left if token is None else self._left(token)
        right = self.matrix.right - self.matrix.right.mean(1, keepdim=True)
        best = Largest(n, left)
        for start, rows in row_chunks(left, right.shape[1]):
            best.add(start + (token or 0), rows @ right)
        entries = zip(best.places.tolist(), best.entries[0].tolist(), strict=True)
        bigrams = (Bigram(token, out, logit) for (token, out), logit in entries)
        return Rows(bigrams, "bigrams by token ids: the logit above the mean of its row")

    def _left(self, token: int) -> Tensor:
        """The row of a token in the left factor, (1, C)."""
        V = self.matrix.shape[0]
        if not 0 <= token < V:
            raise ConfigError(f"token: id {token} is outside 0..{V - 1}")
        return self.matrix.left[token : token + 1]


def bigrams(model: GPT) -> Bigrams:
    """The bigram table of the direct path from the token embedding to the unembedding.

        ms.bigrams(model).top(10)

    Without `ln_f`, the rows are the logits of the model without its blocks, and include the bias of `lm_head`. Raises
    ConfigError, with the reason, where there is no direct path (`paths.check_path`).
    """
    path, bias = virtual(model, "embed", "unembed"), model.lm_head.bias
    left, right = path.matrix.left, path.matrix.right
    if isinstance(model.ln_f, Norm):
        hidden = bias is not None or getattr(model.ln_f, "bias", None) is not None
        return Bigrams(path.matrix, path.notes + (("without the biases of ln_f and lm_head",) if hidden else ()))
    if bias is None:
        return Bigrams(path.matrix, path.notes)
    one, row = left.new_ones(len(left), 1), bias.detach()[None].to(right.dtype)
    return Bigrams(Factored(torch.cat((left, one), dim=1), torch.cat((right, row))), path.notes)
