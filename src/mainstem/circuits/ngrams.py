"""N-grams in the weights: what a token says about the next one, alone and together with an earlier one.

Without blocks a model is a table of bigrams, W_E W_U, the direct path. A head adds to the logits at a token, the
destination, what it reads at an earlier one, the source. Together they are a skip-trigram, source ... destination ->
out (Elhage et al. 2021, "Zero-Layer Transformers" and "One-Layer Attention-Only Transformers"). Where a head attends
(QK) and what it does there (OV) are two tables, so a head that knows "keep ... in mind" and "keep ... at bay" knows
"keep ... in bay" as well.

V vocabulary, C d_model, H heads, D d_head. No table of (V, V) is held: rows of it are made, looked at and dropped.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.circuits.factors import CHUNK, Factored, triangle
from mainstem.circuits.virtual import virtual
from mainstem.circuits.weights import after, at_offset, ov, reader, writer
from mainstem.errors import ConfigError
from mainstem.model.attention import Attention
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.norms import Norm
from mainstem.model.stack import places
from mainstem.model.sublayer import Join
from mainstem.stream.decompose import Positions, Row, Terms, positions
from mainstem.stream.points import BUDGET
from mainstem.stream.record import Record

CANDIDATES = 10
"""Pairs of source and destination that are looked at, in each head, for each skip-trigram that is wanted."""


class Bigram(NamedTuple):
    """One entry of the direct path."""

    token: int
    out: int
    logit: float
    """Less the mean of the token's row, on which no prediction depends."""


@dataclass(frozen=True, eq=False)
class Bigrams:
    """The direct path from `embed` to `unembed`, [token, next token], as logits."""

    matrix: Factored
    """(V, V)."""
    notes: tuple[str, ...]
    """What the table leaves open: the scale of `ln_f`, a positive number for each token, and the biases behind it."""

    def row(self, token: int) -> Tensor:
        """(V,), the logits after a token. Raises ConfigError for an id outside the vocabulary."""
        V = self.matrix.shape[0]
        if not 0 <= token < V:
            raise ConfigError(f"token: id {token} is outside 0..{V - 1}")
        return self.matrix.left[token] @ self.matrix.right

    def top(self, count: int = 10) -> list[Bigram]:
        """The entries that stand highest above the means of their rows, highest first."""
        best, V = _Best(count, self.matrix.left), self.matrix.shape[0]
        right = self.matrix.right - self.matrix.right.mean(1, keepdim=True)
        for start, rows in _chunks(self.matrix.left, V):
            best.add(start, rows @ right)
        found = zip(best.places.tolist(), best.entries[0].tolist(), strict=True)
        return [Bigram(token, out, logit) for (token, out), logit in found]


def bigrams(model: GPT) -> Bigrams:
    """What the direct path says about the next token: all that a model without blocks knows.

    Where no `ln_f` stands before the unembedding, rows are the logits of such a model, `lm_head`'s bias included.
    Raises ConfigError, with the reason, where there is no direct path (`weights.check_path`).
    """
    path, bias = virtual(model, "embed", "unembed"), model.lm_head.bias
    left, right = path.matrix.left, path.matrix.right
    if isinstance(model.ln_f, Norm):
        hidden = bias is not None or getattr(model.ln_f, "bias", None) is not None
        return Bigrams(path.matrix, path.notes + (("without the biases of ln_f and lm_head",) if hidden else ()))
    if bias is None:
        return Bigrams(path.matrix, path.notes)
    one, row = left.new_ones(len(left), 1), bias.detach()[None].to(right.dtype)
    return Bigrams(Factored(torch.cat((left, one), dim=1), torch.cat((right, row))), path.notes)


class SkipTrigram(NamedTuple):
    """source ... destination -> out, in one head."""

    source: int
    destination: int
    out: int
    head: str
    qk: float
    """log of the attention that the destination pays to the source, over what it pays to a token on average."""
    ov: float
    """What reading the source adds to the logit of `out`, less the mean over sources, less the mean over outs."""
    before: float
    """The probability of `out` after the destination in an average context without the source."""
    after: float
    """The same where the source stands in that context, and the head reads it."""

    @property
    def gain(self) -> float:
        """By how much the source makes `out` more probable after the destination."""
        return self.after - self.before


@dataclass(frozen=True, eq=False)
class SkipTrigrams:
    """The strongest skip-trigrams of a block's heads, those of the largest gain first."""

    rows: list[SkipTrigram]
    notes: tuple[str, ...]
    """What is left out."""


def skip_trigrams(
    model: GPT, layer: int = 0, count: int = 200, context: int | None = None, offset: int | None = None
) -> SkipTrigrams:
    """The skip-trigrams that a block's heads make most of, read from the weights.

    A large entry of OV is no prediction yet: it may answer to a large entry of the direct path, or belong to a source
    that no destination looks for. So a triple is judged by what the model would say. The destination stands in a
    context of `context` tokens: itself, and evenly all others but the source. Then one of these becomes the source, and
    the head reads it with the weight that its QK gives it there. The score is `gain`, what this adds to the probability
    of `out`.

    The triples are not gone through one by one. A head's pairs of source and destination are ranked by that weight
    times how far the source moves the logits; each `out` is looked at for the first CANDIDATES * count of them.

    Tokens are read by their content, through the block's own norms, biases and gains. For a model of one attention-only
    block without positions that is all there is; the `notes` say what is left out of another.

    Args:
        model: any GPT with blocks.
        layer: the block. It is taken to read the embeddings, and to be read by the unembedding.
        count: of skip-trigrams.
        context: tokens that the destination sees, itself among them; None is n_ctx.
        offset: with rotary positions, how far before the destination every token stands; None is 1.

    Raises ConfigError for a count below 1, a block that the model does not have, a context below 2, and an offset as
    `weights.at_offset` does.
    """
    context = model.config.n_ctx if context is None else context
    if not 0 <= layer < len(model.blocks):
        raise ConfigError(f"layer: {layer} is not a block of this model, which has {len(model.blocks)}, from 0")
    if context < 2:
        raise ConfigError(f"context: {context} tokens leave no room for a source; give at least 2")
    with torch.no_grad(), evaluating(model):
        reading = _Reading(model, layer, context, offset)
        pairs = reading.pairs(CANDIDATES * count)
        found = [row for head, some in enumerate(pairs) for row in reading.best(head, some, count)]
    found.sort(key=lambda row: row.gain, reverse=True)
    return SkipTrigrams(found[:count], reading.notes())


class _Reading:
    """A block that reads the embeddings of single tokens, and an unembedding that reads what it leaves."""

    def __init__(self, model: GPT, layer: int, context: int, offset: int | None):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        self.model, self.layer, self.context, self.offset = model, layer, context, offset
        self.attn, self.join, self.stream = block.attn, block.res_1, model.wte.weight  # (V, C)
        H, D = self.attn.n_head, self.attn.d_head
        parts = self.attn.c_attn(self.join.damp(self.join.ln_in(self.stream))).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (H, D)) for part in parts)
        q, k = at_offset(model, self.attn.q_norm(q), offset), self.attn.k_norm(k)
        wide = torch.promote_types(v.dtype, torch.float32)
        self.q, self.k, self.v = (part.to(wide) for part in (q, k, v))  # (V, H, D)
        unembed = reader(model, "unembed").matrix  # (C, V)
        self.unembed = unembed - unembed.mean(1, keepdim=True)
        self.level = self.v.new_empty(self.v.shape[:2])  # (V, H): log of the mean of exp(score), by destination

    def pairs(self, count: int) -> list[Tensor]:
        """For each head the (destination, source) pairs that move the logits most, (count, 2). Sets `level`."""
        length, found = triangle(self.unembed.T), []  # |x @ unembed| = |x @ length.T|
        for head in range(self.attn.n_head):
            moved = (self._moves(head) @ length.T).norm(dim=-1)  # (V,), by source
            best = _Best(count, moved)
            for start, q in _chunks(self.q[:, head], len(moved)):
                scores = self.attn.scale * q @ self.k[:, head].T  # (n, V)
                level = scores.logsumexp(1) - math.log(len(moved))
                self.level[start : start + len(q), head] = level
                others = torch.logaddexp(scores.diagonal(start), level + self._log(self.context - 2))
                share = scores.sub_(others[:, None]).sigmoid_()  # of the attention, for the source
                best.add(start, share.mul_(moved))
            found.append(best.places)
        return found

    def best(self, head: int, pairs: Tensor, count: int) -> list[SkipTrigram]:
        """The skip-trigrams of the largest gain among a head's pairs."""
        best = _Best(count, self.v, others=2)
        for start, some in _chunks(pairs, len(self.v)):
            before, after = self._predict(head, some)
            best.add(start, after - before, before, after)
        rows, outs = pairs[best.places[:, 0]], best.places[:, 1]
        ov = (self._moves(head)[rows[:, 1]] * self.unembed.T[outs]).sum(-1)
        qk = self._scores(*rows.T)[:, head] - self.level[rows[:, 0], head]
        columns = (rows[:, 1], rows[:, 0], outs, qk, ov, *best.entries[1:])
        label = f"L{self.layer}H{head}"
        return [
            SkipTrigram(source, destination, out, label, *values)
            for source, destination, out, *values in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def notes(self) -> tuple[str, ...]:
        """What is left out of this model."""
        config, blocks = self.model.config, len(self.model.blocks)
        distance = 1 if self.offset is None else self.offset
        scales = [norm for norm in (self.join.ln_out, self.join.ln_add, self.model.ln_f) if isinstance(norm, Norm)]
        said = [
            (config.position == "learned", "positions are left out: tokens are read by their content alone"),
            (config.position == "rotary", f"every token is read {distance} before its destination"),
            (config.d_mlp > 0, "MLPs are left out"),
            (blocks > 1, f"block {self.layer} reads the embeddings and is unembedded; other blocks are left out"),
            (bool(scales), f"ov: up to the scales of {', '.join(norm.point for norm in scales)}, positive numbers"),
        ]
        return tuple(sentence for true, sentence in said if true)

    def _moves(self, head: int) -> Tensor:
        """(V, C): what each source, rather than the mean token, writes when it is read."""
        written = after(self.join.ln_add, writer(self.model, f"L{self.layer}H{head}").matrix)  # (D, C)
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


def contributions(record: Record, pos: Positions = None) -> Terms:
    """All logits of a model of one attention-only block without norms, by path: the direct one, and each head's.

    logits = (embed + pos_embed) W_U + sum over heads of pattern (embed + pos_embed) W_V W_O W_U + biases, with the
    pattern as it was recorded (Elhage et al. 2021, "One-Layer Attention-Only Transformers").

    Args:
        record: of one forward pass, which keeps the stream that the block read.
        pos: a position, a range of them, or None for all.

    Returns terms whose values are (rows, B, T, V), or (rows, B, V) for one position. Biases have rows of their own:
    `0_attn.b_V` as the heads write it, `0_attn.b_O` and `lm_head.bias`.

    Raises ConfigError for another model, and for rows that exceed `BUDGET`.
    """
    model, here = record.model, positions(record, pos)
    with torch.no_grad():
        join, attn = _only_block(model)
        unembed = reader(model, "unembed").matrix  # (C, V)

        def logits(write: Tensor) -> Tensor:
            return write.to(unembed.dtype) @ unembed

        total = record.logits[:, here]
        needed = (attn.n_head + 5) * total.numel() * unembed.element_size()
        if needed > BUDGET:
            raise ConfigError(f"the logits by path take {needed / 1e9:,.1f} GB; choose a position with pos=")
        names = ("embed", "pos_embed") if model.wpe is not None else ("embed",)
        rows: list[Row] = [(name, logits(join.skip(record[name][:, here]))) for name in names]
        pattern, read = record["blocks.0.attn.pattern"][:, :, here], record["blocks.0.resid_pre"].to(unembed.dtype)
        for head in range(attn.n_head):
            path = ov(model, 0, head) @ unembed  # (C, V), through D
            rows.append((f"L0H{head}", pattern[:, head].to(unembed.dtype) @ (read @ path.left) @ path.right))
        if attn.c_proj.bias is not None:
            b_V = attn.c_attn.bias.chunk(3)[2]
            for label, bias in (("b_V", attn.c_proj.weight @ b_V), ("b_O", attn.c_proj.bias)):
                rows.append((f"0_attn.{label}", logits(join.gain(bias)).expand_as(total)))
        if model.lm_head.bias is not None:
            rows.append(("lm_head.bias", model.lm_head.bias.to(unembed.dtype).expand_as(total)))
        terms = Terms.of(rows, total)
    if not isinstance(pos, int):
        return terms
    return Terms(terms.labels, terms.values.squeeze(2), terms.total.squeeze(1), terms.closing_error)


def _only_block(model: GPT) -> tuple[Join, Attention]:
    """The join and the branch of the only block. Raises ConfigError for a model that is more than that."""
    stack = list(places(model))
    if len(stack) == 1 and isinstance(attn := stack[0].branch, Attention):
        join = stack[0].join
        if not any(isinstance(norm, Norm) for norm in (model.ln_f, join.ln_in, join.ln_out, join.ln_add)):
            return join, attn
    raise ConfigError(
        f"logits by path: this model has {len(model.blocks)} block(s), d_mlp {model.config.d_mlp} and residual "
        f"{model.config.residual}; only one attention-only block without norms has them (none, rezero, no_skip_bare)"
    )


class _Best:
    """The largest entries of a table that is made a few rows at a time, and those of others at the same places."""

    def __init__(self, count: int, like: Tensor, others: int = 0):
        if count < 1:
            raise ConfigError(f"count: {count} entries cannot be the strongest; ask for at least 1")
        self._count = count
        self.entries = like.new_empty(1 + others, 0)
        """(1 + others, n), the first row falling."""
        self.places = torch.empty(0, 2, dtype=torch.long, device=like.device)
        """(n, 2), row and column."""

    def add(self, start: int, *tables: Tensor) -> None:
        """Look at some rows, (n, m), of which the first is number `start`; the first table decides."""
        m, flat = tables[0].shape[1], tables[0].flatten()
        floor = self.entries[0, -1] if len(self.places) == self._count else -torch.inf
        found = (flat > floor).nonzero()[:, 0]  # mostly few, and then much cheaper than a sort of all
        if len(found) > self._count:
            found = found[flat[found].topk(self._count).indices]
        entries = torch.cat((self.entries, torch.stack([table.flatten()[found] for table in tables])), dim=1)
        places = torch.cat((self.places, torch.stack((start + found // m, found % m), dim=1)))
        order = entries[0].argsort(descending=True, stable=True)[: self._count]
        self.entries, self.places = entries[:, order], places[order]


def _chunks(rows: Tensor, columns: int) -> Iterator[tuple[int, Tensor]]:
    """(number of the first row, rows), so many that a table of them with `columns` columns is within CHUNK."""
    step = max(1, CHUNK // columns)
    return ((start, rows[start : start + step]) for start in range(0, len(rows), step))
