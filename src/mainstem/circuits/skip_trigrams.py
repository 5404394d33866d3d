"""Skip-trigrams in the weights: what a token says about the next one together with an earlier one.

A head adds to the logits at a token, the destination, what it reads at an earlier one, the source. Together they are a
skip-trigram, source ... destination -> out (Elhage et al. 2021, "One-Layer Attention-Only Transformers"). Where a head
attends (QK) and what it does there (OV) are two tables, so a head that knows "keep ... in mind" and "keep ... at bay"
knows "keep ... in bay" as well.

V vocabulary, C d_model, H heads, D d_head. No table of (V, V) is held: rows of it are made, looked at and dropped.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mainstem.circuits.chunks import Largest, row_chunks
from mainstem.circuits.factors import triangle
from mainstem.circuits.head_weights import at_offset, resolve_offset
from mainstem.circuits.weights import after, reader, writer
from mainstem.errors import ConfigError
from mainstem.model import names
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.norms import Norm
from mainstem.model.precision import wide
from mainstem.results import SHOWN, Rows, at_least_one, summary

CANDIDATES = 10
"""Pairs of source and destination that are looked at, in each head, for each skip-trigram that is wanted."""


class SkipTrigram(NamedTuple):
    """source ... destination -> out, in one head."""

    source: int
    destination: int
    out: int
    head: str
    qk: float
    """Log of the attention weight from destination to source, over the average weight of a token."""
    ov: float
    """What reading the source adds to the logit of `out`, less the mean over sources, less the mean over outs."""
    before: float
    """The probability of `out` after the destination in an average context without the source."""
    after: float
    """The probability of `out` after the destination with the source in that context, read by the head."""

    @property
    def label(self) -> str:
        """The head and the three ids."""
        return f"{self.head}: {self.source} ... {self.destination} -> {self.out}"

    @property
    def value(self) -> float:
        """The gain."""
        return self.gain

    @property
    def gain(self) -> float:
        """By how much the source makes `out` more probable after the destination."""
        return self.after - self.before


@dataclass(frozen=True, eq=False, repr=False)
class SkipTrigrams:
    """The strongest skip-trigrams of a block's heads, those of the largest gain first."""

    trigrams: Rows[SkipTrigram]
    offset: int | None
    """The distance from destination to source in QK; None if positions are not rotary."""
    notes: tuple[str, ...]
    """What is left out."""

    def __repr__(self) -> str:
        title = "SkipTrigrams by their ids, source ... destination -> out; what the source adds to out's probability"
        return summary(title, self.top(SHOWN), len(self.trigrams))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Each skip-trigram: `label`, the fields of `SkipTrigram`, and `gain`."""
        return [row | {"gain": entry.gain} for row, entry in zip(self.trigrams.to_dicts(), self.trigrams, strict=True)]

    def top(self, n: int = 10) -> Rows[SkipTrigram]:
        """The n skip-trigrams of the largest gain, largest first."""
        return Rows(self.trigrams[: at_least_one(n)], self.trigrams.title)


def skip_trigrams(
    model: GPT, layer: int = 0, top: int = 200, context: int | None = None, offset: int | None = None
) -> SkipTrigrams:
    """The skip-trigrams that a block's heads make most of, read from the weights.

    A large entry of OV is no prediction yet: it may answer to a large entry of the direct path, or belong to a source
    that no destination looks for. So a triple is judged by what the model would say. The destination stands in a
    context of `context` tokens: itself, and evenly all others but the source. Then one of these becomes the source, and
    the head reads it with the weight that its QK gives it there. The score is `gain`, what this adds to the probability
    of `out`.

    The triples are not gone through one by one. A head's pairs of source and destination are ranked by that weight
    times how far the source moves the logits; each `out` is looked at for the first CANDIDATES * top of them.

    Tokens are read by their content, through the block's own norms, biases and gains. For a model of one attention-only
    block without positions that is all there is; the `notes` say what is left out of another.

    Args:
        model: any GPT with blocks.
        layer: the block. It is taken to read the embeddings, and to be read by the unembedding.
        top: how many skip-trigrams to return.
        context: tokens that the destination sees, itself among them; None is n_ctx.
        offset: with rotary positions, how far before the destination every token stands; None is 1.

    Raises ConfigError for a `top` below 1, a block that the model does not have, a context below 2, a vocabulary of one
    token, and an offset as `head_weights.at_offset` does.
    """
    context = model.config.n_ctx if context is None else context
    if not 0 <= layer < len(model.blocks):
        raise ConfigError(f"layer: {layer} is not a block of this model, which has {len(model.blocks)}, from 0")
    if context < 2:
        raise ConfigError(f"context: {context} tokens leave no room for a source; give at least 2")
    if model.config.vocab_size < 2:
        raise ConfigError("vocab_size: with one token there is no source beside it; skip-trigrams need at least 2")
    with torch.no_grad(), evaluating(model):
        reading = _Reading(model, layer, context, offset)
        pairs = reading.pairs(CANDIDATES * at_least_one(top))
        trigrams = [row for head, some in enumerate(pairs) for row in reading.best(head, some, top)]
    trigrams.sort(key=lambda row: row.gain, reverse=True)
    title = "skip-trigrams by their ids: what the source adds to out's probability"
    return SkipTrigrams(Rows(trigrams[:top], title), reading.offset, reading.notes())


class _Reading:
    """A block that reads the embeddings of single tokens, and an unembedding that reads what it leaves."""

    def __init__(self, model: GPT, layer: int, context: int, offset: int | None):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        self.model, self.layer, self.context = model, layer, context
        self.offset = resolve_offset(model, offset)
        self.attn, self.join, self.stream = block.attn, block.res_1, model.wte.weight  # (V, C)
        q, k, v = self.attn.qkv(self.join.damp(self.join.ln_in(self.stream)))  # (V, H, D) each
        q, k = at_offset(model, self.attn.q_norm(q), offset), self.attn.k_norm(k)
        self.q, self.k, self.v = wide(q), wide(k), wide(v)  # (V, H, D)
        unembed = reader(model, "unembed").matrix  # (C, V)
        self.unembed = unembed - unembed.mean(1, keepdim=True)
        self.level = self.v.new_empty(self.v.shape[:2])  # (V, H): log of the mean of exp(score), by destination

    def pairs(self, count: int) -> list[Tensor]:
        """For each head the (destination, source) pairs that move the logits most, (count, 2). Sets `level`."""
        length, pairs = triangle(self.unembed.T), []  # |x @ unembed| = |x @ length.T|
        for head in range(self.attn.n_head):
            moved = (self._moves(head) @ length.T).norm(dim=-1)  # (V,), by source
            best = Largest(count, moved)
            for start, q in row_chunks(self.q[:, head], len(moved)):
                scores = self.attn.scale * q @ self.k[:, head].T  # (n, V)
                level = scores.logsumexp(1) - math.log(len(moved))
                self.level[start : start + len(q), head] = level
                others = torch.logaddexp(scores.diagonal(start), level + self._log(self.context - 2))
                share = scores.sub_(others[:, None]).sigmoid_()  # of the attention, for the source
                best.add(start, share.mul_(moved))
            pairs.append(best.places)
        return pairs

    def best(self, head: int, pairs: Tensor, count: int) -> list[SkipTrigram]:
        """The skip-trigrams of the largest gain among a head's pairs."""
        best = Largest(count, self.v, others=2)
        for start, some in row_chunks(pairs, len(self.v)):
            before, after = self._predict(head, some)
            best.add(start, after - before, before, after)
        rows, outs = pairs[best.places[:, 0]], best.places[:, 1]
        ov = (self._moves(head)[rows[:, 1]] * self.unembed.T[outs]).sum(-1)
        qk = self._scores(*rows.T)[:, head] - self.level[rows[:, 0], head]
        columns = (rows[:, 1], rows[:, 0], outs, qk, ov, *best.entries[1:])
        label = names.head(self.layer, head)
        return [
            SkipTrigram(source, destination, out, label, *values)
            for source, destination, out, *values in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def notes(self) -> tuple[str, ...]:
        """What is left out of this model."""
        config, blocks = self.model.config, len(self.model.blocks)
        scales = [norm for norm in (self.join.ln_out, self.join.ln_add, self.model.ln_f) if isinstance(norm, Norm)]
        notes = [
            (config.position == "learned", "positions are left out: tokens are read by their content alone"),
            (self.offset is not None, f"QK at offset {self.offset}: so far before its destination each token is read"),
            (config.d_mlp > 0, "MLPs are left out"),
            (blocks > 1, f"block {self.layer} reads the embeddings and is unembedded; other blocks are left out"),
            (bool(scales), f"ov: up to the scales of {', '.join(norm.point for norm in scales)}, positive numbers"),
        ]
        return tuple(sentence for true, sentence in notes if true)

    def _moves(self, head: int) -> Tensor:
        """(V, C): what each source, rather than the mean token, writes when it is read."""
        written = after(self.join.ln_add, writer(self.model, names.head(self.layer, head)).matrix)  # (D, C)
        return (self.v[:, head] - self.v[:, head].mean(0)) @ written

    def _scores(self, destinations: Tensor, sources: Tensor) -> Tensor:
        """(n, H)."""
        return self.attn.scale * (self.q[destinations] * self.k[sources]).sum(-1)

    def _predict(self, head: int, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """(n, V) each: the probabilities after each destination, without the source and where one head reads it."""
        (d, s), (V, H, _) = pairs.T, self.v.shape
        evenly, others = torch.empty_like(self.v[d]), self.v.new_empty(len(pairs), H)  # z, and log of the mean weight
        for h in range(H):
            scores = self.attn.scale * self.q[d, h] @ self.k[:, h].T  # (n, V)
            scores.scatter_(1, s[:, None], -torch.inf)
            evenly[:, h], others[:, h] = scores.softmax(1) @ self.v[:, h], scores.logsumexp(1) - math.log(V - 1)
        itself, source = self._scores(d, d), self._scores(d, s)
        absent = torch.stack((itself, others + self._log(self.context - 1)), dim=-1).softmax(-1)  # (n, H, 2)
        z = absent[..., :1] * self.v[d] + absent[..., 1:] * evenly
        before = self._unembed(d, z)
        present = torch.stack((itself, source, others + self._log(self.context - 2)), dim=-1)[:, head].softmax(-1)
        values = torch.stack((self.v[d, head], self.v[s, head], evenly[:, head]), dim=1)  # (n, 3, D)
        z[:, head] = (present[..., None] * values).sum(1)
        return before, self._unembed(d, z)

    def _unembed(self, destinations: Tensor, z: Tensor) -> Tensor:
        """(n, V), the probabilities where the heads' z, (n, H, D), are written after the destinations."""
        write = self.attn.c_proj(z.flatten(1).to(self.stream.dtype))
        stream = self.join(self.stream[destinations], lambda _: write)
        return self.model.unembed(stream).to(z.dtype).softmax(-1)

    def _log(self, tokens: int) -> Tensor:
        return self.v.new_tensor(float(tokens)).log()
