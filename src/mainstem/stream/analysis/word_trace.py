"""What one word reads from each word in one block: a token trace for people, who read words.

A token reads a word as often as all the word's tokens together, and what it is given by it is the sum of what they
give: a vector, whose norm is taken. A word of several tokens has several streams, so both numbers are means over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mainstem.model import names
from mainstem.model.precision import wide
from mainstem.results import SHOWN, Rows, summary
from mainstem.stream.analysis.flow import block_joins, flow, head_writers, membership
from mainstem.stream.record import Record
from mainstem.text.units import Unit, shown


@dataclass(frozen=True)
class Read:
    """What a word gave to the word that is traced: means over the latter's tokens."""

    text: str
    first: int
    last: int
    weight: float
    """The attention weight, summed over this word's tokens."""
    length: float
    """Norm of what all of this word's tokens together gave, values' bias included, after `ln_out` and gain."""


class HeadRead(NamedTuple):
    """What one head read from one word."""

    head: str
    word: str
    first: int
    last: int
    weight: float
    length: float

    @property
    def label(self) -> str:
        """The head and the word."""
        return f"{self.head} reads {shown(self.word)}"

    @property
    def value(self) -> float:
        """The attention weight."""
        return self.weight


@dataclass(frozen=True)
class WordHead:
    """What one head read, by word."""

    label: str
    reads: list[Read]


@dataclass(frozen=True, repr=False)
class WordTrace:
    """What the tokens of one word read in one block, by word."""

    layer: int
    row: int
    word: Unit
    heads: list[WordHead]
    together: list[Read]
    """All heads: the mean of their weights, and the norm of the sum of what they moved."""

    def __repr__(self) -> str:
        title = f"WordTrace: the attention weights of {shown(self.word.text)!r} in block {self.layer}, by head and word"
        return summary(title, self.top(SHOWN), len(self._rows))

    def to_dicts(self) -> list[dict[str, Any]]:
        """What each head read from each word: `label` and the fields of `HeadRead`."""
        return self._rows.to_dicts()

    def top(self, n: int = 10) -> Rows[HeadRead]:
        """The n largest attention weights."""
        return self._rows.top(n)

    @property
    def _rows(self) -> Rows[HeadRead]:
        reads = ((head.label, read) for head in self.heads for read in head.reads)
        rows = (HeadRead(label, read.text, read.first, read.last, read.weight, read.length) for label, read in reads)
        return Rows(rows, "words by head: the attention weight of each")


def by_word(record: Record, word: Unit, layer: int, units: Sequence[Unit], row: int = 0) -> WordTrace:
    """What one word reads from each word in one block.

    Weights sum to 1 where the units are the whole text; a later word gives nothing. What all units give, and the biases
    of `c_proj` and `ln_out`, sum to attention's write.

    Args:
        record: of one forward pass.
        word: whose reading; one of the units, or whatever `mainstem.text.units.find_word` finds.
        layer: of the block.
        units: the words, of `mainstem.text.units.words`, counted in the row's own tokens, without its padding.
        row: of the batch.

    Raises ConfigError for a unit beyond the text, a block or a row that is not there.
    """
    site = block_joins(record, layer)[0]
    row, start = record.row_start(row)
    with torch.no_grad():
        v = wide(record[site.point("attn.v")][row, start:]).transpose(0, 1)  # (H, T, D)
        held = membership(units, v.shape[1]).to(v)  # (U, T)
        queries = membership([word], v.shape[1])[0].bool().to(v.device)
        pattern = flow(record, layer).values[row, :, start:, start:][:, queries]  # (H, q, T)
        directions, scale = head_writers(record, site)  # (H, D, C)
        moved = v.new_zeros(len(units), pattern.shape[1], directions.shape[2])  # (U, q, C), by all heads
        lengths = []
        for pattern_h, v_h, directions_h in zip(pattern, v, directions, strict=True):
            by_head = pattern_h * held[:, None] @ v_h @ directions_h
            moved += by_head
            lengths.append(by_head.norm(dim=-1))
        norms = torch.stack([*lengths, moved.norm(dim=-1)])  # (H + 1, U, q)
        if scale is not None:
            norms = norms / scale[row, start:][queries, 0]
        weights = (pattern @ held.T).mean(1)  # (H, U)
        numbers = torch.stack([torch.cat([weights, weights.mean(0)[None]]), norms.mean(-1)], dim=-1)  # (H + 1, U, 2)
    reads = [[Read(*unit, *pair) for unit, pair in zip(units, each, strict=True)] for each in numbers.tolist()]
    heads = [WordHead(names.head(site.block, head), of_head) for head, of_head in enumerate(reads[:-1])]
    return WordTrace(site.block, row, word, heads, together=reads[-1])
