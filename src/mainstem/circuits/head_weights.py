"""QK and OV matrices of heads, both from the stream to the stream.

C d_model, D d_head, H heads, L blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.circuits.factors import Factored
from mainstem.circuits.paths import mean_is_read
from mainstem.circuits.weights import DIRECTION_ONLY, centred, reader, readers, writer, writers
from mainstem.errors import ConfigError
from mainstem.model import names
from mainstem.model.attention import rotate, rotation
from mainstem.model.gpt import GPT


def resolve_offset(model: GPT, offset: int | None) -> int | None:
    """The distance from query to key: default 1 with rotary positions, None where positions are not rotary.

    Raises ConfigError for an offset below 0, and for one where positions are not rotary.
    """
    position = model.config.position
    if position != "rotary" and offset is not None:
        raise ConfigError(
            f"offset: {offset} is not supported; it is for rotary positions, and this model's `position` is {position}"
        )
    if offset is not None and offset < 0:
        raise ConfigError(f"offset: {offset} is a key after the query; give 0 or more")
    return 1 if position == "rotary" and offset is None else offset


def offset_notes(model: GPT, offset: int | None) -> tuple[str, ...]:
    """The note on a QK at this offset, if positions are rotary. Raises ConfigError as `resolve_offset` does."""
    offset = resolve_offset(model, offset)
    return () if offset is None else (f"QK at offset {offset}: rotary queries depend on the distance to the key",)


def at_offset(model: GPT, queries: Tensor, offset: int | None) -> Tensor:
    """W_Q (..., C, D) rotated for keys `offset` positions earlier: W_Q R(offset) where positions are rotary.

    R(a) R(b)^T = R(a - b), so the product depends only on the distance (Su et al. 2021, section 3.2.1). With rotary
    positions the default is 1; other positions leave W_Q unchanged. Raises ConfigError as `resolve_offset` does.
    """
    config, offset = model.config, resolve_offset(model, offset)
    if offset is None:
        return queries
    positions = torch.tensor([[offset]], device=queries.device)
    cos, sin = rotation(positions, config.d_head, config.rope_base, queries.dtype)  # (1, 1, 1, D / 2)
    return rotate(queries, cos.flatten(), sin.flatten())


def ov(model: GPT, layer: int, head: int) -> Factored:
    """The OV matrix of a head, W_V W_O, (C, C) of rank D. Elhage et al. 2021, "OV circuit"."""
    label = names.head(layer, head)
    return Factored(reader(model, f"{label}.V").matrix, writer(model, label).matrix)


def qk(model: GPT, layer: int, head: int, offset: int | None = None) -> Factored:
    """The QK matrix of a head, W_Q W_K^T, (C, C) of rank D. Elhage et al. 2021, "QK circuit".

    The attention score is attn_scale * x_query @ QK @ x_key. With rotary positions it is W_Q R(offset) W_K^T, for a key
    `offset` positions before the query; default 1. Raises ConfigError as `at_offset` does, and for a head that the
    model does not have.
    """
    label = names.head(layer, head)
    queries = at_offset(model, reader(model, f"{label}.Q").matrix, offset)
    return Factored(queries, reader(model, f"{label}.K").matrix.mT)


@dataclass(frozen=True, eq=False)
class Heads:
    """The matrices of all n = L H heads, stacked, block by block."""

    labels: list[str]
    W_Q: Tensor
    """Query projections, (n, C, D), rotated by the offset where positions are rotary."""
    W_K: Tensor
    """Key projections, (n, C, D)."""
    W_V: Tensor
    """Value projections, (n, C, D)."""
    W_O: Tensor
    """Output projections, (n, D, C), centred where no reader that heads have a path to reads the stream's mean."""
    width: int
    """Dimensions of the stream that are read: C, or C - 1 where W_O is centred."""
    offset: int | None = None
    """The distance from query to key in QK; None where positions are not rotary."""
    notes: tuple[str, ...] = ()
    """What QK leaves out."""


def heads(model: GPT, offset: int | None = None) -> Heads:
    """The matrices of every head. Raises ConfigError for a model without heads, and for an offset as `at_offset` does.

    W_O is centred where no reader reads the mean of a write (`mean_is_read`).
    """
    written, read = writers(model), readers(model)
    labels = [label for label in written if f"{label}.V" in read]
    if not labels:
        raise ConfigError("a model without blocks has no heads; give one with n_layer at least 1")
    # stored as (n, D, C), as in the model: QR and products with the stream are fastest on it
    W_Q, W_K, W_V = (torch.stack([read[f"{label}.{role}"].matrix.T for label in labels]).mT for role in "QKV")
    W_O, width = torch.stack([written[label].matrix for label in labels]), model.config.d_model
    if not mean_is_read(model):
        W_O, width = centred(W_O), width - 1
    direction = (f"QK: {DIRECTION_ONLY}",) if read[f"{labels[0]}.Q"].direction_only else ()
    notes = (*offset_notes(model, offset), *direction)
    return Heads(labels, at_offset(model, W_Q, offset), W_K, W_V, W_O, width, resolve_offset(model, offset), notes)
