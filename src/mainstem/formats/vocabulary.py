"""A model's vocabulary beside its tokenizer's: one has as many rows as the other ids, or a few more for padding.

Trainers round a vocabulary up to a multiple of a power of two, so that matrices have a handy size. No id reaches those
rows, and formats whose readers count tokens by them are written without.
"""

from collections.abc import Mapping
from typing import Any

from mainstem.errors import DataError
from mainstem.text.tokenizer import Tokenizer


def check(rows: int, tokenizer: Tokenizer, source: object) -> int:
    """The number of ids. DataError, which begins with the source, unless the rows beyond them are padding.

    Args:
        rows: the model's vocab_size.
        tokenizer: the model's.
        source: what both came from.
    """
    ids = tokenizer.vocab_size
    padding = min(rows & -rows, rows // 2 + rows % 2)  # below the largest power of two that divides it
    if not rows - padding < ids <= rows:
        raise DataError(
            f"{source}: the model has {rows:,} tokens and the tokenizer {ids:,}; give the tokenizer that it was "
            "trained with"
        )
    return ids


def trimmed(tensors: Mapping[str, Any], ids: int) -> dict[str, Any]:
    """The tensors by our names, embedding and unembedding with so many rows."""
    by_token = ("wte.weight", "lm_head.weight")
    return {name: tensor[:ids] if name in by_token else tensor for name, tensor in tensors.items()}


def left_out(rows: int, tokenizer: Tokenizer | None) -> list[str]:
    """What is said of rows that no id reaches; nothing if there are none."""
    more = 0 if tokenizer is None else rows - tokenizer.vocab_size
    return [f"{more:,} of {rows:,} rows of the vocabulary are past the tokenizer's ids, as padding is"] if more else []
