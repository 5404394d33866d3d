"""Virtual weights: the matrix from what one part of a model writes to what a later part reads.

The residual stream is a sum, so a write reaches every later reader through `writer matrix @ reader matrix`, whatever
lies between (Elhage et al. 2021, "virtual weights"). From `embed` to `unembed` this is the direct path, (V, V): the
bigrams of a model without blocks.

A head enters as a whole matrix from the stream to the stream: OV as a writer or through its values, QK through its
queries, QK^T through its keys. Its D channels have no basis of their own: W_V A and A^-1 W_O are the same head. So
between heads the score is that of `composition`, and the result is a list of singular directions, each with its top
tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from torch.linalg import matrix_norm

from mainstem.circuits.factors import Factored
from mainstem.circuits.head_weights import at_offset, offset_notes, resolve_offset
from mainstem.circuits.paths import NoPath, check_path, mean_is_read
from mainstem.circuits.weights import Reader, Writer, centred, writers
from mainstem.circuits.weights import reader as find_reader
from mainstem.circuits.weights import writer as find_writer
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.results import Rows, at_least_one, plain, summary

NEGLIGIBLE = 1e-6
"""Singular values below this share of the largest are ignored."""


class Entry(NamedTuple):
    """One entry of the virtual weights: what one of the writer's units adds to one of the reader's."""

    value: float
    writes: int
    """The writer's unit: a token of `embed`, a position of `pos_embed`, a neuron."""
    reads: int
    """The reader's unit: a neuron, a token of `unembed`."""

    @property
    def label(self) -> str:
        """The units of writer and reader: `17 -> 4`."""
        return f"{self.writes} -> {self.reads}"


class Direction(NamedTuple):
    """One sign of a singular direction, with the top units of writer and reader."""

    value: float
    """The singular value."""
    side: int
    """The sign, 1 or -1; a direction and its negative are the same, with different top units."""
    writes: list[int]
    """The writer's top units, highest first; of a head, the tokens that it reads."""
    reads: list[int]
    """The reader's top units; of a head, tokens: keys for L1H0.Q, queries for L1H0.K, logits for L1H0.V."""


@dataclass(frozen=True, eq=False, repr=False)
class End:
    """One end of the virtual weights, the writer's or the reader's."""

    label: str
    matrix: Tensor | Factored
    """The matrix of a writer, (k, C), of a reader, (C, m), or of a head, (C, C) in two factors."""
    units: str
    """The kind of unit: `token`, `position` or `neuron`."""
    tokens: Tensor | None = None
    """The tokens of a head, (V, C), to be multiplied by a direction of the stream; None where there is no path."""
    notes: tuple[str, ...] = ()

    @property
    def is_head(self) -> bool:
        """Whether this end is a head, whose inner units are dimensions of the stream, not units of their own."""
        return isinstance(self.matrix, Factored)

    def norm(self) -> Tensor:
        """The Frobenius norm."""
        return self.matrix.norm() if isinstance(self.matrix, Factored) else matrix_norm(self.matrix)

    def highest(self, direction: Tensor, count: int) -> list[int]:
        """The top units of a direction, above 0; of a head, the top tokens, above their mean."""
        if self.is_head:
            if self.tokens is None:
                return []
            direction = self.tokens @ direction
            direction = direction - direction.mean()
        best = direction.topk(min(count, len(direction)))
        return best.indices[best.values > 0].tolist()


@dataclass(frozen=True, eq=False, repr=False)
class VirtualWeights:
    """The virtual weights from a writer to a later reader."""

    writer: End
    reader: End
    width: int
    """Dimensions of the stream that the reader reads: C - 1 where it centres, otherwise C."""
    offset: int | None
    """The distance from query to key in QK; None unless the reader is rotary queries or keys."""
    notes: tuple[str, ...]
    """What the matrix leaves out, such as the norm scales, positive numbers for each token."""

    @cached_property
    def matrix(self) -> Factored:
        """The virtual weights, (k, m), with the norms' gains and the skips between folded in."""
        left, right = self.writer.matrix, self.reader.matrix
        if isinstance(left, Factored):
            return left @ right
        return Factored(left, right) if isinstance(right, Tensor) else Factored(left @ right.left, right.right)

    @cached_property
    def score(self) -> float:
        """The score |W R| / (|W| |R|), in Frobenius norms, of what the reader can see of the writer: from 0 to 1."""
        return (self.matrix.norm() / (self.writer.norm() * self.reader.norm())).item()

    @property
    def chance(self) -> float:
        """The expected score of two unrelated matrices, 1 / sqrt(width)."""
        return self.width**-0.5

    def __repr__(self) -> str:
        k, m = self.matrix.shape
        score = f"score {self.score:.4f}, by chance {self.chance:.4f}"
        return summary(f"VirtualWeights: {self.writer.label} -> {self.reader.label}, {k:,} x {m:,}; {score}")

    def to_dicts(self, n: int = 100) -> list[dict[str, Any]]:
        """The n entries of largest magnitude; where one end is a head, the n largest singular directions."""
        if not (self.writer.is_head or self.reader.is_head):
            return self.top(n).to_dicts()
        sides = {1: "+", -1: "-"}
        directions = enumerate(self.directions(at_least_one(n)))
        return [{"label": f"direction {i // 2 + 1}{sides[each.side]}"} | plain(each) for i, each in directions]

    def top(self, n: int = 10) -> Rows[Entry]:
        """The n entries of largest magnitude, largest first; the whole matrix is never stored.

        Raises ConfigError where one end is a head.
        """
        for end in (self.writer, self.reader):
            if end.is_head:
                raise ConfigError(f"{end.label}: the channels of a head have no basis of their own; use `directions()`")
        columns = (tensor.tolist() for tensor in self.matrix.largest(at_least_one(n)))
        return Rows((Entry(*entry) for entry in zip(*columns, strict=True)), "entries, writer's unit -> reader's unit")

    def directions(self, count: int = 3, units: int = 5) -> list[Direction]:
        """Both signs of the `count` largest singular directions, with at most `units` top units each."""
        U, S, Vh = self.matrix.svd()
        directions = []
        for value, left, right in zip(S[:count], U.T[:count], Vh[:count], strict=True):
            if value > NEGLIGIBLE * S[0]:
                for side in (1, -1):
                    ends = self.writer.highest(side * left, units), self.reader.highest(side * right, units)
                    directions.append(Direction(value.item(), side, *ends))
        return directions


def virtual(model: GPT, writer: str, reader: str, offset: int | None = None) -> VirtualWeights:
    """The virtual weights from a writer to a later reader: `ms.virtual(model, "L0H0", "L1H1.K").score`.

    Args:
        model: any GPT.
        writer, reader: labels, such as `L0H3` and `L1H2.K`; `mainstem.circuits.weights` lists them.
        offset: where the reader is rotary queries or keys, the distance from query to key; default 1.

    Raises ConfigError for an unknown label, for an offset with another reader, and with the reason where there are no
    virtual weights (`check_path`).
    """
    source, target = find_writer(model, writer), find_reader(model, reader)
    skips = check_path(model, source, target)
    rows = skips * (centred(source.matrix) if target.centres else source.matrix)
    if reader.endswith((".Q", ".K")):
        offset = resolve_offset(model, offset)
    elif offset is not None:
        raise ConfigError(f"offset: {offset} is not supported for {reader}; it is for rotary queries and keys")
    left, right = _writer_end(model, source, rows), _reader_end(model, target, offset)
    notes = dict.fromkeys((*source.notes, *left.notes, *target.notes, *right.notes))
    return VirtualWeights(left, right, model.config.d_model - target.centres, offset, tuple(notes))


def _writer_end(model: GPT, source: Writer, rows: Tensor) -> End:
    """The writer's end; `rows` (k, C) are the writes of its units."""
    kinds = {"embed": "token", "pos_embed": "position"}
    if source.label in kinds or source.label.endswith("_mlp_out"):
        return End(source.label, rows, kinds.get(source.label, "neuron"))
    reads = find_reader(model, f"{source.label}.V")
    embed = find_writer(model, "embed")
    tokens, missing = _tokens(model, embed.matrix, embed, reads)
    return End(source.label, Factored(reads.matrix, rows), "token", tokens, reads.notes + missing)


def _reader_end(model: GPT, target: Reader, offset: int | None) -> End:
    """The reader's end."""
    head, _, role = target.label.rpartition(".")
    if head not in writers(model):
        return End(target.label, target.matrix, "token" if target.label == "unembed" else "neuron")
    if role == "V":
        source, unembed = find_writer(model, head), find_reader(model, "unembed")
        rows = source.matrix if mean_is_read(model) else centred(source.matrix)
        tokens, missing = _tokens(model, unembed.matrix.T, source, unembed)
        return End(target.label, Factored(target.matrix, rows), "token", tokens, source.notes + missing)
    queries, keys = find_reader(model, f"{head}.Q"), find_reader(model, f"{head}.K")
    product = Factored(at_offset(model, queries.matrix, offset), keys.matrix.mT)
    product, other = (product, keys) if role == "Q" else (product.T, queries)
    embed = find_writer(model, "embed")
    tokens, missing = _tokens(model, embed.matrix, embed, other)
    return End(target.label, product, "token", tokens, other.notes + offset_notes(model, offset) + missing)


def _tokens(model: GPT, tokens: Tensor, source: Writer, target: Reader) -> tuple[Tensor | None, tuple[str, ...]]:
    """Token directions (V, C) times the skips between source and target; None and the reason where there is no path."""
    try:
        return check_path(model, source, target) * tokens, ()
    except NoPath as reason:
        return None, (str(reason),)
