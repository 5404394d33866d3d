"""Bigrams in the weights: what a token says about the next one, alone.

Without blocks a model is a table of bigrams, W_E W_U, the direct path (Elhage et al. 2021, "Zero-Layer Transformers").
V vocabulary. The table, (V, V), is never held: rows of it are made, looked at and dropped.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.circuits.chunks import Largest, row_chunks
from mainstem.circuits.factors import Factored
from mainstem.circuits.virtual import virtual
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.norms import Norm


class Bigram(NamedTuple):
    """One entry of the direct path."""

    token: int
    out: int
    logit: float
    """Less the mean of the token's row, on which no prediction depends."""


@dataclass(frozen=True, eq=False)
class Bigrams:
    """The direct path from `embed` to `unembed`, [token, next token], as logits."""

    matrix: Factored
    """(V, V)."""
    notes: tuple[str, ...]
    """What the table leaves open: the scale of `ln_f`, a positive number for each token, and the biases behind it."""

    def row(self, token: int) -> Tensor:
        """(V,), the logits after a token. Raises ConfigError for an id outside the vocabulary."""
        return self._left(token)[0] @ self.matrix.right

    def top(self, count: int = 10, token: int | None = None) -> list[Bigram]:
        """The entries that stand highest above the means of their rows, highest first; of one token's row, or of all.

        Raises ConfigError for an id outside the vocabulary.
        """
        left = self.matrix.left if token is None else self._left(token)
        right = self.matrix.right - self.matrix.right.mean(1, keepdim=True)
        best = Largest(count, left)
        for start, rows in row_chunks(left, right.shape[1]):
            best.add(start + (token or 0), rows @ right)
        found = zip(best.places.tolist(), best.entries[0].tolist(), strict=True)
        return [Bigram(token, out, logit) for (token, out), logit in found]

    def _left(self, token: int) -> Tensor:
        """(1, C)."""
        V = self.matrix.shape[0]
        if not 0 <= token < V:
            raise ConfigError(f"token: id {token} is outside 0..{V - 1}")
        return self.matrix.left[token : token + 1]


def bigrams(model: GPT) -> Bigrams:
    """What the direct path says about the next token: all that a model without blocks knows.

    Where no `ln_f` stands before the unembedding, rows are the logits of such a model, `lm_head`'s bias included.
    Raises ConfigError, with the reason, where there is no direct path (`paths.check_path`).
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
