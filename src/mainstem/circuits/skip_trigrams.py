"""Skip-trigrams in the weights: how an earlier token changes the prediction after the current one.

A head attends from the current token, the destination, to an earlier one, the source, and changes the logit of a next
token, out. This is the skip-trigram source ... destination -> out (Elhage et al. 2021, "One-Layer Attention-Only
Transformers"). Where a head attends (QK) and what it writes (OV) are separate tables, so a head with "keep ... in mind"
and "keep ... at bay" has "keep ... in bay" as well.

V vocabulary, C d_model, H heads, D d_head. Tables (V, V) are computed some rows at a time and never stored.
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
"""Candidate pairs of source and destination in each head, for each skip-trigram to be returned."""


class SkipTrigram(NamedTuple):
    """One skip-trigram of a head, source ... destination -> out."""

    source: int
    destination: int
    out: int
    head: str
    qk: float
    """Log of the attention weight from destination to source, relative to the mean weight of a token."""
    ov: float
    """What attending to the source adds to the logit of `out`, centred over sources and over outs."""
    before: float
    """The probability of `out` after the destination in a uniform context without the source."""
    after: float
    """The probability of `out` after the destination with the source in that context, read by the head."""

    @property
    def label(self) -> str:
        """The head and the three token ids."""
        return f"{self.head}: {self.source} ... {self.destination} -> {self.out}"

    @property
    def value(self) -> float:
        """The gain in probability, `after` - `before`."""
        return self.gain

    @property
    def gain(self) -> float:
        """The increase of the probability of `out` by the source, `after` - `before`."""
        return self.after - self.before


@dataclass(frozen=True, eq=False, repr=False)
class SkipTrigrams:
    """The strongest skip-trigrams of a block's heads, by descending gain."""

    trigrams: Rows[SkipTrigram]
    offset: int | None
    """The distance from destination to source in QK; None if positions are not rotary."""
    notes: tuple[str, ...]
    """What the skip-trigrams leave out."""

    def __repr__(self) -> str:
        title = "SkipTrigrams by token ids, source ... destination -> out; what the source adds to out's probability"
        return summary(title, self.top(SHOWN), len(self.trigrams))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values, one a skip-trigram: `label`, the fields of `SkipTrigram`, and `gain`."""
        return [row | {"gain": entry.gain} for row, entry in zip(self.trigrams.to_dicts(), self.trigrams, strict=True)]

    def top(self, n: int = 10) -> Rows[SkipTrigram]:
        """The n skip-trigrams with the largest gain, largest first."""
        return Rows(self.trigrams[: at_least_one(n)], self.trigrams.title)


def skip_trigrams(
    model: GPT, layer: int = 0, top: int = 200, context: int | None = None, offset: int | None = None
) -> SkipTrigrams:
    """The strongest skip-trigrams of a block's heads, from the weights: `ms.skip_trigrams(model).top(10)`.

    A large entry of OV alone implies no prediction: the direct path may cancel it, or no destination may attend to the
    source. So triples are scored by the model's probabilities. The destination is in a context of `context` tokens:
    itself, and uniformly all tokens but the source. Then one of these tokens becomes the source, and the head attends
    to it as QK determines. The score is `gain`, the increase of the probability of `out`.

    Not all triples are scored. A head's pairs of source and destination are ranked by attention weight times the norm
    of the change in logits; every `out` is scored for the first CANDIDATES * top pairs.

    Tokens are embedded without positions and read through the block's norms, biases and gains. This describes a model
    of one attention-only block without positions completely; for other models, `notes` lists what is left out.

    Args:
        model: any GPT with blocks.
        layer: the block. It reads the embeddings, and the unembedding reads its output.
        top: how many skip-trigrams to return.
        context: how many tokens the destination sees, itself included; default n_ctx.
        offset: with rotary positions, the distance from the destination to every token; default 1.

    Raises ConfigError for a `top` below 1, a block that the model does not have, a context below 2, a vocabulary of one
    token, and an offset as `head_weights.at_offset` does.
    """
    context = model.config.n_ctx if context is None else context
    if not 0 <= layer < len(model.blocks):
        raise ConfigError(f"layer: {layer} is not a block of this model, which has {len(model.blocks)}, from 0")
    if context < 2:
        raise ConfigError(f"context: {context} is too short for a source; give at least 2")
    if model.config.vocab_size < 2:
        raise ConfigError("vocab_size: skip-trigrams need at least 2 tokens")
    with torch.no_grad(), evaluating(model):
        single = _SingleBlock(model, layer, context, offset)
        pairs = single.pairs(CANDIDATES * at_least_one(top))
        trigrams = [row for head, candidates in enumerate(pairs) for row in single.best(head, candidates, top)]
    trigrams.sort(key=lambda row: row.gain, reverse=True)
    title = "skip-trigrams by token ids: what the source adds to out's probability"
    return SkipTrigrams(Rows(trigrams[:top], title), single.offset, single.notes())


class _SingleBlock:
    """One block between the embeddings of single tokens and the unembedding."""

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
        """The (destination, source) pairs of each head that change the logits most, (count, 2). Sets `level`."""
        length, pairs = triangle(self.unembed.T), []  # |x @ unembed| = |x @ length.T|
        for head in range(self.attn.n_head):
            moved = (self._writes(head) @ length.T).norm(dim=-1)  # (V,), by source
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
        """The skip-trigrams with the largest gain among a head's pairs."""
        best = Largest(count, self.v, others=2)
        for start, chunk in row_chunks(pairs, len(self.v)):
            before, after = self._predict(head, chunk)
            best.add(start, after - before, before, after)
        rows, outs = pairs[best.places[:, 0]], best.places[:, 1]
        ov = (self._writes(head)[rows[:, 1]] * self.unembed.T[outs]).sum(-1)
        qk = self._scores(*rows.T)[:, head] - self.level[rows[:, 0], head]
        columns = (rows[:, 1], rows[:, 0], outs, qk, ov, *best.entries[1:])
        label = names.head(self.layer, head)
        return [
            SkipTrigram(source, destination, out, label, *values)
            for source, destination, out, *values in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def notes(self) -> tuple[str, ...]:
        """What the skip-trigrams leave out of this model."""
        config, blocks = self.model.config, len(self.model.blocks)
        scales = [norm for norm in (self.join.ln_out, self.join.ln_add, self.model.ln_f) if isinstance(norm, Norm)]
        notes = [
            (config.position == "learned", "position embeddings are left out"),
            (self.offset is not None, f"QK at offset {self.offset}: the distance from the destination to every token"),
            (config.d_mlp > 0, "MLPs are left out"),
            (blocks > 1, f"blocks other than block {self.layer} are left out"),
            (bool(scales), f"ov: up to the scales of {', '.join(norm.point for norm in scales)}, positive numbers"),
        ]
        return tuple(sentence for applies, sentence in notes if applies)

    def _writes(self, head: int) -> Tensor:
        """The write, (V, C), for each source token, less the mean over tokens."""
        written = after(self.join.ln_add, writer(self.model, names.head(self.layer, head)).matrix)  # (D, C)
        return (self.v[:, head] - self.v[:, head].mean(0)) @ written

    def _scores(self, destinations: Tensor, sources: Tensor) -> Tensor:
        """The attention scores of pairs of tokens, (n, H)."""
        return self.attn.scale * (self.q[destinations] * self.k[sources]).sum(-1)

    def _predict(self, head: int, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities after each destination, (n, V) each: without the source, and where the head attends to it."""
        (d, s), (V, H, _) = pairs.T, self.v.shape
        uniform, others = torch.empty_like(self.v[d]), self.v.new_empty(len(pairs), H)  # z, and log of the mean weight
        for h in range(H):
            scores = self.attn.scale * self.q[d, h] @ self.k[:, h].T  # (n, V)
            scores.scatter_(1, s[:, None], -torch.inf)
            uniform[:, h], others[:, h] = scores.softmax(1) @ self.v[:, h], scores.logsumexp(1) - math.log(V - 1)
        itself, source = self._scores(d, d), self._scores(d, s)
        absent = torch.stack((itself, others + self._log(self.context - 1)), dim=-1).softmax(-1)  # (n, H, 2)
        z = absent[..., :1] * self.v[d] + absent[..., 1:] * uniform
        before = self._unembed(d, z)
        present = torch.stack((itself, source, others + self._log(self.context - 2)), dim=-1)[:, head].softmax(-1)
        values = torch.stack((self.v[d, head], self.v[s, head], uniform[:, head]), dim=1)  # (n, 3, D)
        z[:, head] = (present[..., None] * values).sum(1)
        return before, self._unembed(d, z)

    def _unembed(self, destinations: Tensor, z: Tensor) -> Tensor:
        """The probabilities, (n, V), after destinations at which the heads' outputs are z, (n, H, D)."""
        write = self.attn.c_proj(z.flatten(1).to(self.stream.dtype))
        stream = self.join(self.stream[destinations], lambda _: write)
        return self.model.unembed(stream).to(z.dtype).softmax(-1)

    def _log(self, tokens: int) -> Tensor:
        return self.v.new_tensor(float(tokens)).log()
