"""One token through one block, in numbers: norm, attention reads earlier tokens, add, norm, feed-forward, add.

Everything is a plain value, and adds up: each addition is done again and compared with what the model had, the heads
and the biases sum to attention's write, and each pattern sums to 1. `word_trace` has what is read by word.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model.attention import Attention
from mainstem.model.block import Site
from mainstem.model.mlp import MLP, NEAR_ZERO
from mainstem.model.names import neuron as neuron_label
from mainstem.model.names import point
from mainstem.model.norms import Empty
from mainstem.model.precision import over, wide
from mainstem.results import SHOWN, Item, Rows, summary
from mainstem.stream.analysis.flow import block_joins
from mainstem.stream.decompose import closing_error, written
from mainstem.stream.passage import Passage, RecordedNorm
from mainstem.stream.record import Record
from mainstem.text.units import pieces, shown

STRONGEST = 8
"""How many sources of a head and neurons of an MLP a trace names."""


@dataclass(frozen=True)
class Vector:
    """A vector of the stream's width, in three numbers."""

    mean: float
    std: float
    """Over the width, dividing by C, as a LayerNorm does."""
    norm: float


@dataclass(frozen=True)
class NormStep:
    """What one norm read, and what it returned, gain and bias included."""

    slot: str
    before: Vector
    after: Vector


@dataclass(frozen=True)
class Joined:
    """A branch's write, and its addition to the stream."""

    label: str
    norms: list[NormStep]
    """The norms that the row of the residual table has at this join, of `ln_in`, `ln_out`, `ln_add`."""
    damp: float
    """What the branch's input was multiplied by, after `ln_in`."""
    skip: float
    """What the stream was multiplied by before the addition."""
    length: float
    """Norm of the write, as it is added: after `ln_out` and gain."""
    ratio: float
    """The write's norm over that of the stream which the branch read; 0 where that is 0."""
    cosine: float
    """The write's cosine to that stream; 0 where one of the two is 0."""
    checksum: float
    """max |ln_add(skip * x + write) - x'| / max |x'|, done again from x, write and x' in the model's own precision."""


@dataclass(frozen=True)
class SourceToken:
    """A position that a head reads."""

    pos: int
    token: str | None
    """What it says; None without a tokenizer."""
    weight: float


@dataclass(frozen=True)
class Part:
    """One of the rows that sum to attention's write: a head without its values' bias, or a bias."""

    label: str
    length: float
    """Norm of what it adds, through `ln_out` at its scale, and gain."""
    share: float
    """<part, write> / <write, write>; the shares of all parts sum to 1, unless the write is 0."""
    cosine: float


@dataclass(frozen=True)
class Head:
    """What one head read, and what it wrote."""

    pattern: list[float]
    """The weight of each position up to the token's own; they sum to 1."""
    top: list[SourceToken]
    """The largest of them."""
    entropy: float
    """The attention pattern's entropy in nats: 0 for one position, log(pos + 1) for all positions alike."""
    write: Part


@dataclass(frozen=True)
class AttentionTrace:
    """The attention branch."""

    join: Joined
    heads: list[Head]
    biases: list[Part]
    closing_error: float
    """max |sum of all parts - write| / max |write|."""


@dataclass(frozen=True)
class Neuron:
    """One neuron of the MLP."""

    index: int
    pre: float
    """Before the activation; gated: the gate's."""
    post: float
    """After it; gated: times `up`."""
    length: float
    """Norm of what it adds, through `ln_out` at its scale, and gain."""


@dataclass(frozen=True)
class MLPTrace:
    """The feed-forward branch."""

    join: Joined
    neurons: int
    above_zero: int
    """Neurons whose `pre` is above 0."""
    near_zero: int
    """Neurons whose `post` is below NEAR_ZERO in magnitude."""
    top: list[Neuron]
    """The neurons of the longest writes."""


@dataclass(frozen=True, repr=False)
class TokenTrace:
    """One token through one block."""

    layer: int
    row: int
    pos: int
    """From 0, in the row's own tokens, without its padding."""
    ids: list[int]
    """The row's own tokens."""
    tokens: list[str] | None
    """What they say; None without a tokenizer."""
    resid_pre: Vector
    attention: AttentionTrace
    resid_mid: Vector | None
    """The stream between attention and MLP; None, as is `mlp`, where d_mlp is 0."""
    mlp: MLPTrace | None
    resid_post: Vector

    def __repr__(self) -> str:
        token = f"token {self.ids[self.pos]}" if self.tokens is None else repr(shown(self.tokens[self.pos]))
        check = f"heads and biases sum to attention's write: closing error {self.attention.closing_error:.1e}"
        title = f"TokenTrace: {token}, position {self.pos} of {len(self.ids)}, in block {self.layer}; {check}"
        return summary(f"{title}; lengths of writes", self.top(SHOWN), len(self._rows))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Each head, bias and named neuron: `label` and `value`, the length of what it adds to the stream."""
        return self._rows.to_dicts()

    def top(self, n: int = 10) -> Rows[Item]:
        """The n longest writes of heads, biases and named neurons."""
        return self._rows.top(n)

    @property
    def _rows(self) -> Rows[Item]:
        parts = [*(head.write for head in self.attention.heads), *self.attention.biases]
        rows = [Item(part.label, part.length) for part in parts]
        neurons = [] if self.mlp is None else self.mlp.top
        rows += [Item(neuron_label(self.layer, neuron.index), neuron.length) for neuron in neurons]
        return Rows(rows, "writes: the length of each")


def token_trace(record: Record, pos: int, layer: int, row: int = 0, top: int = STRONGEST) -> TokenTrace:
    """Everything that happens to one token in one block.

    Args:
        record: of one forward pass.
        pos: of the token, counted in the row's own tokens: padding before them is no position. From -1, backwards.
        layer: of the block.
        row: of the batch.
        top: how many sources a head, and how many neurons, to name.

    Raises ConfigError for a token, a block or a row that is not there.
    """
    attn, *rest = block_joins(record, layer)
    row, start = record.row_start(row)
    ids = record.ids[row, start:].tolist()
    if not -len(ids) <= pos < len(ids):
        raise ConfigError(f"pos: {pos} is out of range; the text has {len(ids)} positions, from 0 (or -1, backwards)")
    texts = None if record.tokenizer is None else pieces(record.tokenizer, ids)
    token = _Token(record, attn.block, row, start, start + pos % len(ids))
    with torch.no_grad():
        return TokenTrace(
            layer=attn.block,
            row=row,
            pos=token.at - start,
            ids=ids,
            tokens=texts,
            resid_pre=_vector(token["resid_pre"]),
            attention=_attention(token, attn, texts, top),
            resid_mid=_vector(token["resid_mid"]) if rest else None,
            mlp=_mlp(token, rest[0], top) if rest else None,
            resid_post=_vector(token["resid_post"]),
        )


@dataclass(frozen=True)
class _Token:
    """One token of one row, in one block."""

    record: Record
    block: int
    row: int
    start: int
    """Where the row's own tokens begin."""
    at: int

    def __getitem__(self, name: str) -> Tensor:
        """A point of the block at the token."""
        return self.record[point(name, self.block)][self.row, self.at]

    @property
    def only(self) -> slice:
        """The token's position as a range."""
        return slice(self.at, self.at + 1)


def _vector(x: Tensor) -> Vector:
    std, mean = torch.std_mean(wide(x), correction=0)
    return Vector(mean.item(), std.item(), wide(x).norm().item())


def _joined(token: _Token, site: Site, returned: Tensor) -> Joined:
    """The write and its addition; `returned` is what the branch returned, (C,)."""
    join = site.join
    x, write, after = (token.record[name][token.row, token.at] for name in (site.reads, site.write, site.after))
    total = join.skip(x) + write
    slots = (("ln_in", join.ln_in, x), ("ln_out", join.ln_out, returned), ("ln_add", join.ln_add, total))
    length, read = wide(write).norm(), wide(x).norm()
    return Joined(
        label=site.label,
        norms=[
            NormStep(slot, _vector(before), _vector(norm(before)))
            for slot, norm, before in slots
            if not isinstance(norm, Empty)
        ],
        damp=getattr(join.damp, "value", 1.0),
        skip=getattr(join.skip, "value", 1.0),
        length=length.item(),
        ratio=over(length, read).item(),
        cosine=over(wide(write) @ wide(x), length * read).item(),
        checksum=closing_error(join.ln_add(total), after),
    )


def _attention(token: _Token, site: Site, texts: list[str] | None, top: int) -> AttentionTrace:
    attn, passage = site.branch, Passage(token.record, site, token.only)
    assert isinstance(attn, Attention)
    write = wide(token["attn_out"])
    rows = [row for piece in written(token.record, passage, "head", token.only) for row in piece.carried()]
    added = [(label, wide(row[token.row, 0])) for label, row in rows]
    parts = [_part(label, row, write) for label, row in added]  # heads, then biases
    patterns = token.record[site.point("attn.pattern")]
    pattern = patterns[token.row, :, token.at, token.start : token.at + 1]  # (H, pos + 1)
    by_head = zip(wide(pattern), parts[: attn.n_head], strict=True)
    return AttentionTrace(
        join=_joined(token, site, attn.c_proj(token["attn.z"].flatten())),
        heads=[_head(weights, part, texts, top) for weights, part in by_head],
        biases=parts[attn.n_head :],
        closing_error=closing_error(torch.stack([row for _, row in added]).sum(0), write),
    )


def _part(label: str, part: Tensor, write: Tensor) -> Part:
    length, whole, product = part.norm(), write.norm(), part @ write
    return Part(label, length.item(), over(product, whole.square()).item(), over(product, length * whole).item())


def _head(pattern: Tensor, write: Part, texts: list[str] | None, top: int) -> Head:
    weights = pattern.tolist()
    order = pattern.argsort(descending=True, stable=True)[:top].tolist()
    sources = [SourceToken(pos, None if texts is None else texts[pos], weights[pos]) for pos in order]
    return Head(weights, sources, -torch.special.xlogy(pattern, pattern).sum().item(), write)


def _mlp(token: _Token, site: Site, top: int) -> MLPTrace:
    mlp, passage = site.branch, Passage(token.record, site, token.only)
    assert isinstance(mlp, MLP)
    pre, post = token["mlp.pre"], token["mlp.post"]  # (M,)
    norm, directions = passage.out, wide(mlp.c_proj.weight.T)  # (M, C)
    if isinstance(norm, RecordedNorm) and norm.scale is not None:
        norm = norm._replace(scale=norm.scale[token.row])
    lengths = wide(post).abs() * passage.gain.carry(norm.carry(directions)).norm(dim=-1)
    order = lengths.argsort(descending=True, stable=True)[:top].tolist()
    return MLPTrace(
        join=_joined(token, site, mlp.c_proj(post)),
        neurons=len(pre),
        above_zero=int((pre > 0).sum()),
        near_zero=int((post.abs() < NEAR_ZERO).sum()),
        top=[Neuron(index, pre[index].item(), post[index].item(), lengths[index].item()) for index in order],
    )
