"""The vocabulary size of a model and of its tokenizer: the same, or larger in the model by padding rows.

Trainers often round the vocabulary up to a multiple of a power of two. No token has those rows, and they are dropped on
export to formats that count tokens by rows.
"""

from collections.abc import Mapping
from typing import Any

from mainstem.errors import DataError
from mainstem.text.tokenizer import Tokenizer


def check(rows: int, tokenizer: Tokenizer, source: object) -> int:
    """The tokenizer's vocabulary size. Raises DataError unless further rows of the model are padding.

    Args:
        rows: the model's vocab_size.
        tokenizer: the model's tokenizer.
        source: where both are from; the message begins with it.
    """
    ids = tokenizer.vocab_size
    padding = min(rows & -rows, rows // 2 + rows % 2)  # below the largest power of two that divides it
    if not rows - padding < ids <= rows:
        raise DataError(
            f"{source}: the model has {rows:,} tokens and the tokenizer {ids:,}; use the tokenizer that the "
            "model was trained with"
        )
    return ids


def trimmed(tensors: Mapping[str, Any], ids: int) -> dict[str, Any]:
    """The tensors by mainstem's names, with embedding and unembedding cut to `ids` rows."""
    by_token = ("wte.weight", "lm_head.weight")
    return {name: tensor[:ids] if name in by_token else tensor for name, tensor in tensors.items()}


def left_out(rows: int, tokenizer: Tokenizer | None) -> list[str]:
    """A note on the padding rows, if there are any."""
    padding = 0 if tokenizer is None else rows - tokenizer.vocab_size
    return [f"{padding:,} of {rows:,} rows of the vocabulary are padding, without a token"] if padding else []
