"""What attention moves from token to token: weights, lengths of what is moved, and both by word.

Lengths are of what is added: a head's write is taken after `ln_out`, at the scale which that norm had, and after the
gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mainstem.errors import ConfigError, nearest
from mainstem.model.attention import Attention
from mainstem.model.block import Site
from mainstem.model.names import head
from mainstem.model.precision import wide
from mainstem.results import SHOWN, Rows, at_least_one, summary
from mainstem.stream.passage import Passage, RecordedNorm, factor
from mainstem.stream.record import Record
from mainstem.text.units import Unit

CHUNK = 64 << 20
"""Bytes of the largest intermediate tensor; longer texts are worked through in parts."""

WEIGHTINGS = ("pattern", "value")
REDUCTIONS = ("mean", "last")


class Move(NamedTuple):
    """What one head moves from an earlier position, or unit of text, to a later one."""

    head: str
    source: int
    target: int
    value: float

    @property
    def label(self) -> str:
        """The head, the position that reads, and the one that is read."""
        return f"{self.head} {self.target} <- {self.source}"


@dataclass(frozen=True, eq=False, repr=False)
class Flow:
    """What each head of a block moves from key to query."""

    values: Tensor
    """(B, H, T query, T key); by unit of text, (B, H, U query, U key)."""
    layer: int
    weighting: str
    """One of WEIGHTINGS."""

    def __repr__(self) -> str:
        B, H, T, _ = self.values.shape
        what = {"pattern": "attention weights", "value": "lengths of what is moved"}[self.weighting]
        title = f"Flow: {what} of {H} heads of block {self.layer}, {B} x {T} positions; row 0, target <- source"
        return summary(title, self.top(SHOWN), H * T * (T - 1) // 2)

    def to_dicts(self, row: int = 0) -> list[dict[str, Any]]:
        """Every move in one row of the batch: `label`, `head`, `source`, `target`, `value`."""
        return self.top(self.values[row].numel(), row).to_dicts()

    def top(self, n: int = 10, row: int = 0) -> Rows[Move]:
        """The n largest moves in one row of the batch, none from a position to itself."""
        targets, sources = torch.tril_indices(
            self.values.shape[2], self.values.shape[2], -1
        )  # every earlier source, (pairs,)
        sizes = self.values[row][:, targets, sources].flatten()  # (H pairs,)
        values, order = sizes.topk(min(at_least_one(n), len(sizes)))
        heads, pairs = [i // len(targets) for i in order.tolist()], order % max(1, len(targets))
        ends = zip(sources[pairs].tolist(), targets[pairs].tolist(), strict=True)
        rows = zip(heads, ends, values.tolist(), strict=True)
        return Rows((Move(head(self.layer, h), *end, value) for h, end, value in rows), "moves, target <- source")

    def grouped(self, units: Sequence[Unit], reduce: str = "mean") -> "Flow":
        """The flow between units of text; see `grouped`."""
        return replace(self, values=grouped(self.values, units, reduce))


def block_joins(record: Record, layer: int) -> list[Site]:
    """Attention's join of one block and the MLP's, if it has one. Raises ConfigError for a block that is not there."""
    L = len(record.model.blocks)
    if not -L <= layer < L:
        raise ConfigError(f"layer: there is no block {layer}; the model has {L}, from 0")
    return [site for site in record.model.joins() if site.block == layer % L]


def head_writers(record: Record, site: Site) -> tuple[Tensor, Tensor | None]:
    """What each head of an attention join adds to the stream for each number of its z.

    Returns (H, D, C), through `ln_out` and gain; and the scale of `ln_out` at the query, (B, T, 1), by which it is
    still to be divided, or None where the row of the table has no such norm.
    """
    attn, passage = site.branch, Passage(record, site)
    assert isinstance(attn, Attention)
    directions, norm = wide(attn.W_O), passage.out
    if not isinstance(norm, RecordedNorm):
        return passage.gain.carry(directions), None
    return passage.gain.carry(norm._replace(scale=None).carry(directions)), norm.scale


def flow(record: Record, layer: int, weighting: str = "pattern") -> Flow:
    """What each head of a block moves from token to token; `values` are (B, H, T query, T key).

    Args:
        record: of one forward pass.
        layer: of the block.
        weighting: `pattern`: the attention weights. `value`: the lengths of the vectors that they move, the weight
            times |v W_O|, v with its bias; after `ln_out` and gain, where the row of the table has them.

    Kobayashi et al. 2020, "Attention is Not Only a Weight", section 3.
    """
    if weighting not in WEIGHTINGS:
        raise ConfigError(f"weighting: unknown value {weighting!r}; {nearest(weighting, WEIGHTINGS)}")
    site = block_joins(record, layer)[0]
    with torch.no_grad():
        pattern = wide(record[site.point("attn.pattern")])
        if weighting == "pattern":
            return Flow(pattern, site.block, weighting)
        v = wide(record[site.point("attn.v")])  # (B, T, H, D)
        directions, scale = head_writers(record, site)
        by_head = zip(v.unbind(2), directions, strict=True)
        lengths = torch.stack([(v_h @ directions_h).norm(dim=-1) for v_h, directions_h in by_head], dim=1)
        weighted = pattern * lengths[:, :, None]
        return Flow(weighted if scale is None else weighted / scale[:, None], site.block, weighting)


def moved(record: Record, layer: int) -> Tensor:
    """The length of what all heads of a block together move from key to query, (B, T query, T key).

    It is the norm of the sum over heads, so heads that oppose each other cancel: at most the sum of `flow`'s lengths.
    """
    site = block_joins(record, layer)[0]
    with torch.no_grad():
        v = wide(record[site.point("attn.v")])
        directions, scale = head_writers(record, site)
        sent = torch.einsum("bkhd,hdc->bkhc", v, directions)  # (B, T, H, C)
        B, T, _, C = sent.shape
        queries = max(1, CHUNK // (B * T * C * sent.element_size()))
        parts = wide(record[site.point("attn.pattern")]).split(queries, dim=2)
        lengths = torch.cat([torch.einsum("bhqk,bkhc->bqkc", part, sent).norm(dim=-1) for part in parts], dim=1)
        return lengths if scale is None else lengths / scale


def rollout(record: Record) -> Tensor:
    """How much of each input position is in each position of the stream after 0, 1, ... L blocks: (L + 1, B, T, T).

    Attention is averaged over heads, the skip carries each position on to itself, and the blocks are multiplied:
    R_l = (skip I + A_l) / (skip + 1) R_(l-1), with R_0 = I. With a skip of 1 that is the source's (I + A) / 2; without
    skips it is A alone. Each row sums to 1. Weights of positions, not what is in them: `moved` has lengths.

    Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", section 3.
    """
    with torch.no_grad():
        B, T = record.ids.shape
        eye = wide(torch.eye(T, dtype=record.model.wte.weight.dtype, device=record.ids.device)).expand(B, T, T)
        rolled = [eye]
        for site in record.model.joins():
            if site.kind == "attn":  # the MLP moves nothing
                mixed = factor(site.join.skip).carry(eye) + wide(record[site.point("attn.pattern")]).mean(1)
                rolled.append(mixed / mixed.sum(-1, keepdim=True) @ rolled[-1])
        return torch.stack(rolled)


def grouped(matrix: Tensor, units: Sequence[Unit], reduce: str = "mean") -> Tensor:
    """A matrix over tokens, (..., T query, T key), as one over units, (..., U query, U key).

    The keys of a unit are summed: it was read as often as its tokens were. Of its queries the mean is taken, or with
    `last` its last one, so that where the units are the whole text and a row sums to 1, it still does.

    Args:
        matrix: the values of a `flow`, `moved` or `rollout`. Lengths that are summed are an upper bound of the length
            of the sum.
        units: those of `mainstem.text.units`, of the same tokens.
        reduce: one of REDUCTIONS.

    Raises ConfigError for an unknown reduction and a unit that the matrix does not hold.
    """
    if reduce not in REDUCTIONS:
        raise ConfigError(f"reduce: unknown value {reduce!r}; {nearest(reduce, REDUCTIONS)}")
    held = membership(units, matrix.shape[-1]).to(matrix)
    by_key = matrix @ held.T
    if reduce == "mean":
        return held / held.sum(-1, keepdim=True) @ by_key
    return by_key[..., [unit.last - 1 for unit in units], :]


def membership(units: Sequence[Unit], length: int) -> Tensor:
    """1 where a unit, of U, holds a token, of `length`, else 0. Raises ConfigError for a unit beyond the tokens."""
    held = torch.zeros(len(units), length)
    for row, unit in zip(held, units, strict=True):
        if not 0 <= unit.first < unit.last <= length:
            raise ConfigError(f"units: {unit.text!r} is tokens {unit.first} to {unit.last}, of {length}")
        row[unit.first : unit.last] = 1
    return held
