"""Virtual weights: the matrix by which one part of a model reads what an earlier part wrote, as if they were wired.

Between two parts stands only the stream, and the stream adds. What a writer puts there reaches every later reader
through `writer matrix @ reader matrix`, whatever lies between (Elhage et al. 2021, "virtual weights"). From `embed` to
`unembed` it is the direct path, (V, V): the bigrams that a model knows without a block.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import linalg

from mainstem.circuits.factors import Factored
from mainstem.circuits.weights import centred, check_path, reader, writer
from mainstem.model.gpt import GPT


class Entry(NamedTuple):
    """One entry of a virtual matrix: how much the writer's unit adds to the reader's."""

    value: float
    writes: int
    """The writer's unit: a token of `embed`, a position of `pos_embed`, a channel of a head's z, a neuron."""
    reads: int
    """The reader's unit: a channel of a head's q, k or v, a neuron, a token of `unembed`."""


@dataclass(frozen=True, eq=False)
class VirtualWeights:
    """What reaches `reader` of what `writer` writes."""

    writer: str
    reader: str
    matrix: Factored
    """(k, m): the writer's units to the reader's, with norms' gains and the skips between folded."""
    width: int
    """The dimensions of the stream that the reader reads: C - 1 where it centres, otherwise C."""
    notes: tuple[str, ...]
    """What the matrix leaves open: the norm scales, each a positive number for each token."""

    @cached_property
    def score(self) -> float:
        """|W R| / (|W| |R|), Frobenius norms, of what the reader can see of the writer: from 0 to 1."""
        scale = linalg.matrix_norm(self.matrix.left) * linalg.matrix_norm(self.matrix.right)
        return (self.matrix.norm() / scale).item()

    @property
    def chance(self) -> float:
        """The score to be expected of two matrices whose directions have nothing to do with each other."""
        return self.width**-0.5

    def top(self, count: int = 10) -> list[Entry]:
        """The entries of the largest magnitude, largest first; the whole matrix is never held."""
        found = (tensor.tolist() for tensor in self.matrix.largest(count))
        return [Entry(*entry) for entry in zip(*found, strict=True)]


def virtual(model: GPT, writes: str, reads: str) -> VirtualWeights:
    """The virtual weights from a writer to a later reader, by their labels (`mainstem.circuits.weights` lists them).

    Queries and keys are those before rotation. Raises ConfigError for an unknown label, and with the reason where there
    are no virtual weights (`check_path`).
    """
    source, target = writer(model, writes), reader(model, reads)
    skips = check_path(model, source, target)
    rows = centred(source.matrix) if target.centres else source.matrix
    width = model.config.d_model - target.centres
    return VirtualWeights(writes, reads, Factored(skips * rows, target.matrix), width, source.notes + target.notes)
