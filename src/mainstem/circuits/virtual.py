"""Virtual weights: the matrix by which one part of a model reads what an earlier part wrote, as if they were wired.

Between two parts stands only the stream, and the stream adds. What a writer puts there reaches every later reader
through `writer matrix @ reader matrix`, whatever lies between (Elhage et al. 2021, "virtual weights"). From `embed` to
`unembed` it is the direct path, (V, V): the bigrams that a model knows without a block.

A head stands in it whole, from the stream to the stream: OV where it writes or is read through its values, QK where it
is read through its queries, QK^T through its keys. Its D channels are no units, for their basis is nobody's choice:
W_V A and A^-1 W_O are the same head. So between heads the score is that of `composition`; and what a head does at its
far side is told by singular directions, as the tokens that stand highest in them.
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
"""A direction is one where its singular value is above this share of the largest."""


class Entry(NamedTuple):
    """One entry of a virtual matrix: how much the writer's unit adds to the reader's."""

    value: float
    writes: int
    """The writer's unit: a token of `embed`, a position of `pos_embed`, a neuron."""
    reads: int
    """The reader's unit: a neuron, a token of `unembed`."""

    @property
    def label(self) -> str:
        """Both units."""
        return f"{self.writes} -> {self.reads}"


class Direction(NamedTuple):
    """One side of a singular direction: what at the writer's end goes with what at the reader's end."""

    value: float
    """The singular value."""
    side: int
    """1 or -1: a direction and its negative are one, and each side of it has its units."""
    writes: list[int]
    """The writer's units that stand highest on this side, highest first; a head's are tokens, by what it reads."""
    reads: list[int]
    """The reader's units, likewise; a head's are tokens: keys, for L1H0.Q; queries, for L1H0.K; logits, for L1H0.V."""


@dataclass(frozen=True, eq=False, repr=False)
class End:
    """One end of the virtual weights, the writer's or the reader's."""

    label: str
    matrix: Tensor | Factored
    """A writer's (k, C) or a reader's (C, m); a head's (C, C), in two factors."""
    units: str
    """What the units are: `token`, `position` or `neuron`."""
    tokens: Tensor | None = None
    """(V, C), of a head: its tokens, to be multiplied by a direction of the stream; None where no path leads there."""
    notes: tuple[str, ...] = ()

    @property
    def is_head(self) -> bool:
        """Whether its inner units are dimensions of the stream, which mean nothing one by one."""
        return isinstance(self.matrix, Factored)

    def norm(self) -> Tensor:
        """The Frobenius norm."""
        return self.matrix.norm() if isinstance(self.matrix, Factored) else matrix_norm(self.matrix)

    def highest(self, direction: Tensor, count: int) -> list[int]:
        """The units that stand highest in a direction, above 0; tokens of a head, above their mean."""
        if self.is_head:
            if self.tokens is None:
                return []
            direction = self.tokens @ direction
            direction = direction - direction.mean()
        best = direction.topk(min(count, len(direction)))
        return best.indices[best.values > 0].tolist()


@dataclass(frozen=True, eq=False, repr=False)
class VirtualWeights:
    """What reaches the reader of what the writer writes."""

    writer: End
    reader: End
    width: int
    """The dimensions of the stream that the reader reads: C - 1 where it centres, otherwise C."""
    offset: int | None
    """The distance from query to key in QK; None unless the reader is rotary queries or keys."""
    notes: tuple[str, ...]
    """What the matrix leaves open, such as the norm scales, each a positive number for each token."""

    @cached_property
    def matrix(self) -> Factored:
        """(k, m): the writer's units to the reader's, with norms' gains and the skips between folded."""
        left, right = self.writer.matrix, self.reader.matrix
        if isinstance(left, Factored):
            return left @ right
        return Factored(left, right) if isinstance(right, Tensor) else Factored(left @ right.left, right.right)

    @cached_property
    def score(self) -> float:
        """|W R| / (|W| |R|), Frobenius norms, of what the reader can see of the writer: from 0 to 1."""
        return (self.matrix.norm() / (self.writer.norm() * self.reader.norm())).item()

    @property
    def chance(self) -> float:
        """The score to be expected of two matrices whose directions have nothing to do with each other."""
        return self.width**-0.5

    def __repr__(self) -> str:
        k, m = self.matrix.shape
        score = f"score {self.score:.4f}, by chance {self.chance:.4f}"
        return summary(f"VirtualWeights: {self.writer.label} -> {self.reader.label}, {k:,} x {m:,}; {score}")

    def to_dicts(self, n: int = 100) -> list[dict[str, Any]]:
        """The n entries of the largest magnitude; where a head is at one end, the n largest singular directions."""
        if not (self.writer.is_head or self.reader.is_head):
            return self.top(n).to_dicts()
        sides = {1: "+", -1: "-"}
        directions = enumerate(self.directions(at_least_one(n)))
        return [{"label": f"direction {i // 2 + 1}{sides[each.side]}"} | plain(each) for i, each in directions]

    def top(self, n: int = 10) -> Rows[Entry]:
        """The n entries of the largest magnitude, largest first; the whole matrix is never held.

        Raises ConfigError where one end is a head.
        """
        for end in (self.writer, self.reader):
            if end.is_head:
                raise ConfigError(f"{end.label}: its entries are in no basis that means anything; ask for directions")
        columns = (tensor.tolist() for tensor in self.matrix.largest(at_least_one(n)))
        return Rows((Entry(*entry) for entry in zip(*columns, strict=True)), "entries, writer's unit -> reader's")

    def directions(self, count: int = 3, units: int = 5) -> list[Direction]:
        """Both sides of the `count` largest singular directions, with at most so many units each."""
        U, S, Vh = self.matrix.svd()
        directions = []
        for value, left, right in zip(S[:count], U.T[:count], Vh[:count], strict=True):
            if value > NEGLIGIBLE * S[0]:
                for side in (1, -1):
                    ends = self.writer.highest(side * left, units), self.reader.highest(side * right, units)
                    directions.append(Direction(value.item(), side, *ends))
        return directions


def virtual(model: GPT, writer: str, reader: str, offset: int | None = None) -> VirtualWeights:
    """The virtual weights from a writer to a later reader, by their labels (`mainstem.circuits.weights` lists them).

    Args:
        model: any GPT.
        writer, reader: labels, `L0H3` and `L1H2.K`.
        offset: where the reader is rotary queries or keys, how far before its query a key stands; None is 1.

    Raises ConfigError for an unknown label, for an offset where it has no meaning, and with the reason where there are
    no virtual weights (`check_path`).
    """
    source, target = find_writer(model, writer), find_reader(model, reader)
    skips = check_path(model, source, target)
    rows = skips * (centred(source.matrix) if target.centres else source.matrix)
    if reader.endswith((".Q", ".K")):
        offset = resolve_offset(model, offset)
    elif offset is not None:
        raise ConfigError(f"offset: {offset} has no meaning for {reader}; it is for rotary queries and keys")
    left, right = _writing(model, source, rows), _reading(model, target, offset)
    notes = dict.fromkeys((*source.notes, *left.notes, *target.notes, *right.notes))
    return VirtualWeights(left, right, model.config.d_model - target.centres, offset, tuple(notes))


def _writing(model: GPT, source: Writer, rows: Tensor) -> End:
    """The writer's end; rows (k, C) are what its units write."""
    kinds = {"embed": "token", "pos_embed": "position"}
    if source.label in kinds or source.label.endswith("_mlp_out"):
        return End(source.label, rows, kinds.get(source.label, "neuron"))
    reads = find_reader(model, f"{source.label}.V")
    embed = find_writer(model, "embed")
    tokens, missing = _seen(model, embed.matrix, embed, reads)
    return End(source.label, Factored(reads.matrix, rows), "token", tokens, reads.notes + missing)


def _reading(model: GPT, target: Reader, offset: int | None) -> End:
    """The reader's end."""
    head, _, role = target.label.rpartition(".")
    if head not in writers(model):
        return End(target.label, target.matrix, "token" if target.label == "unembed" else "neuron")
    if role == "V":
        source, unembed = find_writer(model, head), find_reader(model, "unembed")
        rows = source.matrix if mean_is_read(model) else centred(source.matrix)
        tokens, missing = _seen(model, unembed.matrix.T, source, unembed)
        return End(target.label, Factored(target.matrix, rows), "token", tokens, source.notes + missing)
    queries, keys = find_reader(model, f"{head}.Q"), find_reader(model, f"{head}.K")
    product = Factored(at_offset(model, queries.matrix, offset), keys.matrix.mT)
    product, other = (product, keys) if role == "Q" else (product.T, queries)
    embed = find_writer(model, "embed")
    tokens, missing = _seen(model, embed.matrix, embed, other)
    return End(target.label, product, "token", tokens, other.notes + offset_notes(model, offset) + missing)


def _seen(model: GPT, tokens: Tensor, source: Writer, target: Reader) -> tuple[Tensor | None, tuple[str, ...]]:
    """The tokens (V, C) times the skips between, at a head's far side; None, and why, where no path leads there."""
    try:
        return check_path(model, source, target) * tokens, ()
    except NoPath as reason:
        return None, (str(reason),)
