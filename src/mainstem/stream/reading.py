"""Who writes how much, who reads where, and what is erased.

Everything here is measured on what is added: a head's write is taken after `ln_out`, at the scale which that norm had,
and after the gain.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.errors import ConfigError, nearest
from mainstem.model.attention import Attention
from mainstem.model.stack import Place, places
from mainstem.stream.decompose import decompose, frozen, positions
from mainstem.stream.record import Record
from mainstem.text.units import Unit

CHUNK = 64 << 20
"""Bytes of the largest intermediate tensor; longer texts are worked through in parts."""

WEIGHTINGS = ("pattern", "value")
REDUCTIONS = ("mean", "last")
ERASERS = ("branch", "head")


@dataclass(frozen=True)
class Write:
    """What one branch added to the stream, token by token; each tensor is (B, T)."""

    label: str
    length: Tensor
    """Norm of the write."""
    ratio: Tensor
    """That over the norm of the stream which the branch read, before any skip; 0 where that stream is 0."""
    cosine: Tensor
    """To that stream: above 0 the write amplifies, below it erases; 0 where one of the two is 0."""
    means: dict[str, float]
    """Of each of the three over the tokens, padding left out."""


@dataclass(frozen=True)
class Level:
    """The stream at one point, token by token; each tensor is (B, T)."""

    point: str
    norm: Tensor
    mean: Tensor
    """Over the width."""
    std: Tensor
    """Over the width, dividing by C, as a LayerNorm does."""
    means: dict[str, float]
    """Of each of the three over the tokens, padding left out."""


def writes(record: Record) -> list[Write]:
    """A row for what each branch wrote, in the order of the forward pass."""
    rows = []
    for place in places(record.model):
        stream, write = record[place.reads], record[place.write]
        length, read = write.norm(dim=-1), stream.norm(dim=-1)
        values = {
            "length": length,
            "ratio": over(length, read),
            "cosine": over((write * stream).sum(-1), length * read),
        }
        rows.append(Write(place.label, **values, means=_means(record, values)))
    return rows


def levels(record: Record) -> list[Level]:
    """A row for the stream at each point where a branch reads it, and one for `resid_final`."""
    rows = []
    for point in [*(place.reads for place in places(record.model)), "resid_final"]:
        std, mean = torch.std_mean(record[point], dim=-1, correction=0)
        values = {"norm": record[point].norm(dim=-1), "mean": mean, "std": std}
        rows.append(Level(point, **values, means=_means(record, values)))
    return rows


def over(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where the whole is 0."""
    return torch.where(whole > 0, part / whole.where(whole > 0, 1), 0)


def _means(record: Record, values: dict[str, Tensor]) -> dict[str, float]:
    real = torch.ones_like(record.ids, dtype=torch.bool) if record.mask is None else record.mask.bool()
    return {name: value[real].mean().item() for name, value in values.items()}


def joins(record: Record, layer: int) -> list[Place]:
    """Attention's join of one block and the MLP's, if it has one. Raises ConfigError for a block that is not there."""
    L = len(record.model.blocks)
    if not -L <= layer < L:
        raise ConfigError(f"layer: there is no block {layer}; the model has {L}, from 0")
    return [place for place in places(record.model) if place.layer == layer % L]


def head_writers(record: Record, place: Place) -> tuple[Tensor, Tensor | None]:
    """What each head of an attention join adds to the stream for each number of its z.

    Returns (H, D, C), through `ln_out` and gain; and the scale of `ln_out` at the query, (B, T, 1), by which it is
    still to be divided, or None where the row of the table has no such norm.
    """
    attn, norm = place.branch, frozen(record, place, "ln_out")
    assert isinstance(attn, Attention)
    directions = attn.c_proj.weight.T.unflatten(0, (attn.n_head, attn.d_head))
    if norm.scale is not None:
        directions = norm._replace(scale=torch.ones_like(norm.scale[:1, :1])).carry(directions)
    return place.join.gain(directions), norm.scale


def flow(record: Record, layer: int, weighting: str = "pattern") -> Tensor:
    """What each head moves from token to token, (B, H, T query, T key).

    Args:
        record: of one forward pass.
        layer: of the block.
        weighting: `pattern`: the attention weights. `value`: the lengths of the vectors that they move, the weight
            times |v W_O|, v with its bias; after `ln_out` and gain, where the row of the table has them.

    Kobayashi et al. 2020, "Attention is Not Only a Weight", section 3.
    """
    if weighting not in WEIGHTINGS:
        raise ConfigError(f"weighting: unknown value {weighting!r}; {nearest(weighting, WEIGHTINGS)}")
    place = joins(record, layer)[0]
    with torch.no_grad():
        pattern = record[f"blocks.{place.layer}.attn.pattern"]
        if weighting == "pattern":
            return pattern
        v = record[f"blocks.{place.layer}.attn.v"]  # (B, T, H, D)
        directions, scale = head_writers(record, place)
        by_head = zip(v.unbind(2), directions, strict=True)
        lengths = torch.stack([(v_h @ directions_h).norm(dim=-1) for v_h, directions_h in by_head], dim=1)
        found = pattern * lengths[:, :, None]
        return found if scale is None else found / scale[:, None]


def moved(record: Record, layer: int) -> Tensor:
    """The length of what all heads of a block together move from key to query, (B, T query, T key).

    It is the norm of the sum over heads, so heads that oppose each other cancel: at most the sum of `flow`'s lengths.
    """
    place = joins(record, layer)[0]
    with torch.no_grad():
        v = record[f"blocks.{place.layer}.attn.v"]
        directions, scale = head_writers(record, place)
        sent = torch.einsum("bkhd,hdc->bkhc", v, directions)  # (B, T, H, C)
        B, T, _, C = sent.shape
        queries = max(1, CHUNK // (B * T * C * sent.element_size()))
        parts = record[f"blocks.{place.layer}.attn.pattern"].split(queries, dim=2)
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
        eye = torch.eye(T, dtype=record.model.wte.weight.dtype, device=record.ids.device).expand(B, T, T)
        found = [eye]
        for place in places(record.model):
            if place.kind == "attn":  # the MLP moves nothing
                mixed = place.join.skip(eye) + record[f"blocks.{place.layer}.attn.pattern"].mean(1)
                found.append(mixed / mixed.sum(-1, keepdim=True) @ found[-1])
        return torch.stack(found)


def grouped(matrix: Tensor, units: Sequence[Unit], reduce: str = "mean") -> Tensor:
    """A matrix over tokens, (..., T query, T key), as one over units, (..., U query, U key).

    The keys of a unit are summed: it was read as often as its tokens were. Of its queries the mean is taken, or with
    `last` its last one, so that where the units are the whole text and a row sums to 1, it still does.

    Args:
        matrix: of `flow`, `moved` or `rollout`. Lengths that are summed are an upper bound of the length of the sum.
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


class Erased(NamedTuple):
    """How far one later write takes back an earlier one."""

    later: str
    earlier: str
    share: float
    cosine: float


@dataclass(frozen=True)
class Erasure:
    """Each later write against each earlier one; the tensors are (rows, rows), later by earlier.

    Products and squares are summed over tokens before they are divided: where little was written counts little.
    """

    labels: list[str]
    after: Tensor
    """Whether the one is written after the other; where it is not, share and cosine are 0."""
    share: Tensor
    """-<later, earlier> / <earlier, earlier>: 1 wholly erased, below 0 amplified; 0 where the earlier is 0."""
    cosine: Tensor
    """<later, earlier> over the product of their lengths; 0 where one of them is 0."""
    length: Tensor
    """(rows,): the root of each row's mean square over tokens. Then share = -cosine * later's length / earlier's."""

    def top(self, count: int, by: str = "share") -> list[Erased]:
        """The pairs of the largest shares, or by `cosine` of the most negative cosines.

        A strong write that is only slightly against a weak one has a large share; its cosine tells.
        """
        if by not in ("share", "cosine"):
            raise ConfigError(f"by: unknown value {by!r}; {nearest(by, ('share', 'cosine'))}")
        order = (self.share if by == "share" else -self.cosine)[self.after].argsort(descending=True)[:count]
        return [
            Erased(self.labels[i], self.labels[j], self.share[i, j].item(), self.cosine[i, j].item())
            for i, j in self.after.nonzero()[order.cpu()].tolist()
        ]


def erasure(record: Record, pos: int | None = None, by: str = "branch") -> Erasure:
    """What later writes take back of earlier ones.

    Both are looked at in one place, `resid_final`: the rows of `decompose`, each carried there through the skips and
    the norms over the sum. A skip leaves share and cosine as they were where the later one was written. Where a skip is
    0 nothing earlier arrives, and nothing is erased.

    Args:
        record: of one forward pass.
        pos: one position, or None for all; padding is left out.
        by: `branch`, or `head` for attention's writes by head.

    The rows are held for some tokens at a time, and of them only their products are kept.
    """
    if by not in ERASERS:
        raise ConfigError(f"by: unknown value {by!r}; {nearest(by, ERASERS)}")
    with torch.no_grad():
        labels = decompose(record, by, pos=slice(0, 1)).labels
        R = len(labels)
        products, count = record["resid_final"].new_zeros(R, R), 0
        for rows in _tokens(record, pos, by, R):  # (n, R, C)
            products += (rows @ rows.transpose(1, 2)).sum(0)
            count += len(rows)
        stage = _stages(record, labels).to(products.device)
        after = stage[:, None] > stage
        squares, lengths = products.diagonal(), products.diagonal().sqrt()
        share = over(-products, squares.expand(R, R))
        cosine = over(products, lengths[:, None] * lengths)
        return Erasure(labels, after, share * after, cosine * after, lengths / max(count, 1) ** 0.5)


def _tokens(record: Record, pos: int | None, by: str, R: int) -> Iterator[Tensor]:
    """The rows at the tokens asked for, (n, R, C), as many of them at a time as CHUNK holds."""
    B, T = record.ids.shape
    C = record.model.config.d_model
    step = max(1, CHUNK // (B * R * max(R, C) * record.model.wte.weight.element_size()))
    asked = range(T)[positions(record, pos)]
    for start in range(asked.start, asked.stop, step):
        here = slice(start, min(start + step, asked.stop))
        rows = decompose(record, by, pos=here).values.flatten(1, 2).transpose(0, 1)
        yield rows if record.mask is None else rows[record.mask[:, here].bool().flatten()]


def _stages(record: Record, labels: Sequence[str]) -> Tensor:
    """When each row is written, (rows,): first the embeddings, then at each join its write, then its norm's bias."""
    order = {(place.layer, place.kind): index for index, place in enumerate(places(record.model))}
    stages = []
    for label in labels:
        written = re.match(r"L(?P<of_head>\d+)H|(?P<layer>\d+)_(?P<kind>attn|mlp)", label)
        if written is None:
            stages.append(0)
            continue
        place = (int(written["of_head"] or written["layer"]), written["kind"] or "attn")
        stages.append(1 + 2 * order[place] + label.endswith("ln_add.bias"))
    return torch.tensor(stages)
