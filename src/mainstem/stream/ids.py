"""Inputs of calls: a tensor of ids, rows of ids of any lengths, or texts, as one padded batch."""

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainstem.errors import ConfigError, DataError
from mainstem.model.gpt import GPT
from mainstem.stream.pairs import difference

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

Ids = Tensor | Sequence[Sequence[int]] | str | Sequence[str]
"""Ids (B, T); rows of ids of any lengths; or texts, with a tokenizer."""


def padded(
    model: GPT, ids: Ids, mask: Tensor | None = None, tokenizer: "Tokenizer | None" = None
) -> tuple[Tensor, Tensor | None]:
    """Ids (B, T) on the model's device, padded on the left, and a mask (B, T) if there is padding.

    Raises DataError for a text without a tokenizer, an id outside the vocabulary and a row without tokens, ConfigError
    for a mask of another shape or with padding that is not on the left.
    """
    device, V = model.wte.weight.device, model.config.vocab_size
    rows = _encoded(ids, tokenizer)
    if isinstance(rows, Tensor):
        ids = rows
    else:
        T = max(map(len, rows), default=0)
        if min(map(len, rows), default=0) == 0:
            raise DataError("a prompt has no tokens; give each at least one")
        if any(len(row) < T for row in rows):
            mask = torch.tensor([[i >= T - len(row) for i in range(T)] for row in rows])
        ids = torch.tensor([[0] * (T - len(row)) + row for row in rows])
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim != 2 or not whole or ids.numel() == 0:
        raise DataError(f"ids of shape {tuple(ids.shape)} and {ids.dtype}; give whole numbers, (B, T), at least one")
    for i in (int(ids.min()), int(ids.max())):
        if not 0 <= i < V:
            raise DataError(f"token id {i} is outside 0..{V - 1}; is it another tokenizer's?")
    if mask is not None:
        mask = mask.bool().to(device)
        if mask.shape != ids.shape:
            raise ConfigError(f"a mask of shape {tuple(mask.shape)} for ids of {tuple(ids.shape)}; give the same shape")
        if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
            raise ConfigError("mask: padding must be on the left of each row; give such a mask, or lists of ids")
    return ids.to(device, torch.long), mask


def _encoded(ids: Ids, tokenizer: "Tokenizer | None") -> Tensor | list[list[int]]:
    """A tensor unchanged; rows or texts as rows of ids, of any lengths."""
    if isinstance(ids, Tensor):
        return ids
    rows = [ids] if isinstance(ids, str) else ids
    if not isinstance(rows, Sequence):
        raise DataError(f"{rows!r} is neither ids nor texts; give a tensor (B, T), rows of ids, or texts")
    return [_row(row, tokenizer) for row in rows]


def _row(row: str | Sequence[int], tokenizer: "Tokenizer | None") -> list[int]:
    if not isinstance(row, str):
        try:
            return [operator.index(i) for i in row]
        except TypeError:
            raise DataError(f"{row!r} is not a row of ids; give whole numbers, or a text") from None
    if tokenizer is None:
        raise DataError(f"{row!r} is a text, and there is no tokenizer; give ids, or `tokenizer`")
    return tokenizer.encode(row)


def paired(
    model: GPT, clean: Ids, corrupt: Ids, mask: Tensor | None = None, tokenizer: "Tokenizer | None" = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A clean and a corrupted batch, (B, T) both, and the mask of both.

    Raises ConfigError unless each pair of rows has equally many tokens; DataError for texts, with the tokens at which
    they differ; and as `padded` does.
    """
    rows = [_encoded(ids, tokenizer) for ids in (clean, corrupt)]
    if tokenizer is not None and len(rows[0]) == len(rows[1]):
        for row, (one, other) in enumerate(zip(*rows, strict=True)):
            if len(one) != len(other):
                raise DataError(f"row {row}: {difference(tokenizer, list(map(int, one)), list(map(int, other)))}")
    (one, left), (other, right) = (padded(model, ids, mask) for ids in rows)
    alike = one.shape == other.shape and (left is None) == (right is None)
    if not alike or (left is not None and right is not None and not left.equal(right)):
        raise ConfigError(
            f"clean ids of shape {tuple(one.shape)} and corrupt ids of {tuple(other.shape)}; a patch goes from a "
            "position to the same position, so give both rows of the same lengths"
        )
    return one, other, left
