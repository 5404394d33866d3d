"""Bigrams in the weights: what a token says about the next one, alone.

Without blocks a model is a table of bigrams, W_E W_U, the direct path (Elhage et al. 2021, "Zero-Layer Transformers").
V vocabulary. The table, (V, V), is never held: rows of it are made, looked at and dropped.
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
    """One entry of the direct path."""

    token: int
    out: int
    logit: float
    """Less the mean of the token's row, on which no prediction depends."""

    @property
    def label(self) -> str:
        """Both ids."""
        return f"{self.token} -> {self.out}"

    @property
    def value(self) -> float:
        """The logit."""
        return self.logit


@dataclass(frozen=True, eq=False, repr=False)
class Bigrams:
    """The direct path from `embed` to `unembed`, [token, next token], as logits."""

    matrix: Factored
    """(V, V)."""
    notes: tuple[str, ...]
    """What the table leaves open: the scale of `ln_f`, a positive number for each token, and the biases behind it."""

    def row(self, token: int) -> Tensor:
        """(V,), the logits after a token. Raises ConfigError for an id outside the vocabulary."""
        return self._left(token)[0] @ self.matrix.right

    def __repr__(self) -> str:
        V = self.matrix.shape[0]
        return summary(f"Bigrams: {V:,} tokens x {V:,} next ones; top(n) reads all of the table, top(n, token) a row")

    def to_dicts(self, n: int = 100) -> list[dict[str, Any]]:
        """The rows of `top(n)`: `label`, `token`, `out` and `logit`; the whole table is never held."""
        return self.top(n).to_dicts()

    def top(self, n: int = 10, token: int | None = None) -> Rows[Bigram]:
        """The n entries highest above the means of their rows, highest first; of one token's row, or of all.

        Raises ConfigError for an id outside the vocabulary.
        """
        left = self.matrix.left if token is None else self._left(token)
        right = self.matrix.right - self.matrix.right.mean(1, keepdim=True)
        best = Largest(n, left)
        for start, rows in row_chunks(left, right.shape[1]):
            best.add(start + (token or 0), rows @ right)
        entries = zip(best.places.tolist(), best.entries[0].tolist(), strict=True)
        bigrams = (Bigram(token, out, logit) for (token, out), logit in entries)
        return Rows(bigrams, "bigrams by their ids: the logit of each above its row's mean")

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
