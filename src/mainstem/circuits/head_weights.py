"""Heads as matrices from the stream to the stream: what attends, QK, and what is written for what is read, OV.

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
    """How far before its query a key stands: 1 unless it is given, and None where positions are not rotary.

    Raises ConfigError for an offset below 0, and for one where positions are not rotary.
    """
    position = model.config.position
    if position != "rotary" and offset is not None:
        raise ConfigError(
            f"offset: {offset} has no meaning here; rotary queries turn with the distance to the key, and this "
            f"model's position is {position}"
        )
    if offset is not None and offset < 0:
        raise ConfigError(f"offset: {offset} is a key after the query; a causal model reads keys at 0 or more")
    return 1 if position == "rotary" and offset is None else offset


def offset_notes(model: GPT, offset: int | None) -> tuple[str, ...]:
    """What a QK at this offset leaves open, in words. Raises ConfigError as `resolve_offset` does."""
    offset = resolve_offset(model, offset)
    return () if offset is None else (f"QK at offset {offset}: rotary queries turn with the distance to the key",)


def at_offset(model: GPT, queries: Tensor, offset: int | None) -> Tensor:
    """W_Q (..., C, D) as it meets the keys `offset` positions before it: W_Q R(offset), where positions are rotary.

    R(a) R(b)^T = R(a - b), so that the product depends on the distance alone (Su et al. 2021, section 3.2.1). None is 1
    with rotary positions, and without them the queries as they are. Raises ConfigError as `resolve_offset` does.
    """
    config, offset = model.config, resolve_offset(model, offset)
    if offset is None:
        return queries
    positions = torch.tensor([[offset]], device=queries.device)
    cos, sin = rotation(positions, config.d_head, config.rope_base, queries.dtype)  # (1, 1, 1, D / 2)
    return rotate(queries, cos.flatten(), sin.flatten())


def ov(model: GPT, layer: int, head: int) -> Factored:
    """W_V W_O of a head, (C, C) of rank D: what it writes for what it reads. Elhage et al. 2021, "OV circuit"."""
    label = names.head(layer, head)
    return Factored(reader(model, f"{label}.V").matrix, writer(model, label).matrix)


def qk(model: GPT, layer: int, head: int, offset: int | None = None) -> Factored:
    """W_Q W_K^T of a head, (C, C) of rank D: x_query @ QK @ x_key is what attends. Elhage et al. 2021, "QK circuit".

    The factor `attn_scale` is not in it. With rotary positions it is W_Q R(offset) W_K^T, for a key `offset` positions
    before the query; None is 1. Raises ConfigError as `at_offset` does, and for a head that the model does not have.
    """
    label = names.head(layer, head)
    queries = at_offset(model, reader(model, f"{label}.Q").matrix, offset)
    return Factored(queries, reader(model, f"{label}.K").matrix.mT)


@dataclass(frozen=True, eq=False)
class Heads:
    """The matrices of all heads, stacked, block by block: n = L H of them."""

    labels: list[str]
    W_Q: Tensor
    """(n, C, D), turned by the offset where positions are rotary."""
    W_K: Tensor
    """(n, C, D)."""
    W_V: Tensor
    """(n, C, D)."""
    W_O: Tensor
    """(n, D, C), centred where no reader that heads have a path to reads the stream's mean."""
    width: int
    """The dimensions of the stream that are read: C, and C - 1 where W_O is centred."""
    offset: int | None = None
    """How far before its query a key stands; None where positions are not rotary."""
    notes: tuple[str, ...] = ()
    """What QK leaves open, in words."""


def heads(model: GPT, offset: int | None = None) -> Heads:
    """Every head of the model. Raises ConfigError for a model without heads, and for an offset as `at_offset` does.

    Where the mean of a write reaches nobody (`mean_is_read`), it is taken away here.
    """
    written, read = writers(model), readers(model)
    labels = [label for label in written if f"{label}.V" in read]
    if not labels:
        raise ConfigError("a model without blocks has no heads; give one with n_layer at least 1")
    # (n, D, C) in memory, as the model has them, and as QR and products with the stream take them fastest
    W_Q, W_K, W_V = (torch.stack([read[f"{label}.{role}"].matrix.T for label in labels]).mT for role in "QKV")
    W_O, width = torch.stack([written[label].matrix for label in labels]), model.config.d_model
    if not mean_is_read(model):
        W_O, width = centred(W_O), width - 1
    direction = (f"QK: {DIRECTION_ONLY}",) if read[f"{labels[0]}.Q"].direction_only else ()
    notes = (*offset_notes(model, offset), *direction)
    return Heads(labels, at_offset(model, W_Q, offset), W_K, W_V, W_O, width, resolve_offset(model, offset), notes)
