"""What later writes take back of earlier ones, beyond what two random directions would."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mainstem.errors import ConfigError, nearest
from mainstem.model.names import parse_label
from mainstem.model.precision import over, wide
from mainstem.results import SHOWN, Rows, at_least_one, summary
from mainstem.stream.decompose import decompose, positions
from mainstem.stream.record import Record

CHUNK = 64 << 20
"""Bytes of the largest intermediate tensor; longer texts are worked through in parts."""

ERASERS = ("branch", "head")


class Erased(NamedTuple):
    """How far one later write takes back an earlier one."""

    later: str
    earlier: str
    share: float
    cosine: float
    taken: float
    """Length of the earlier one's direction that is taken back: share * earlier_length = -cosine * later_length."""
    later_length: float
    earlier_length: float

    @property
    def label(self) -> str:
        """Both writes."""
        return f"{self.later} takes back {self.earlier}"

    @property
    def value(self) -> float:
        """The length that is taken back."""
        return self.taken


@dataclass(frozen=True, eq=False, repr=False)
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
    chance: float
    """2 / sqrt(C): two standard deviations of the cosine of two random directions of the stream's width."""

    def __repr__(self) -> str:
        title = f"Erasure: {len(self.labels)} writes, the lengths that later ones take back of earlier ones"
        return summary(
            f"{title}, where the cosine is below -{self.chance:.2f}", self.top(SHOWN), len(self._beyond_chance)
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        """Every later write against every earlier one: `label` and the fields of `Erased`."""
        return self._rows(self.after.nonzero()).to_dicts()

    def top(self, n: int = 10) -> Rows[Erased]:
        """The n pairs in which most is taken back, as a length: a large share of a tiny write is little.

        Left out are pairs whose cosine is not below -chance, for random directions oppose each other as much, and
        biases as the earlier write, for they are written whatever was read.
        """
        pairs = self._beyond_chance
        order = (self.share * self.length)[tuple(pairs.T)].argsort(descending=True)[: at_least_one(n)]
        return self._rows(pairs[order])

    @property
    def _beyond_chance(self) -> Tensor:
        """(pairs, 2)."""
        carries = torch.tensor(["." not in label for label in self.labels], device=self.after.device)  # no bias
        return (self.after & carries & (self.cosine < -self.chance)).nonzero()

    def _rows(self, pairs: Tensor) -> Rows[Erased]:
        i, j = pairs.T
        taken, length = self.share * self.length, self.length
        columns = self.share[i, j], self.cosine[i, j], taken[i, j], length[i], length[j]
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        ends = ((self.labels[later], self.labels[earlier]) for later, earlier in pairs.tolist())
        rows = (Erased(*end, *row) for end, row in zip(ends, numbers, strict=True))
        return Rows(rows, "pairs of writes: the length that the later one takes back")


def erasure(record: Record, by: str = "branch", pos: int | None = None) -> Erasure:
    """What later writes take back of earlier ones.

    Both are looked at in one place, `resid_final`: the rows of `decompose`, each carried there through the skips and
    the norms over the sum. A skip leaves share and cosine as they were where the later one was written. Where a skip is
    0 nothing earlier arrives, and nothing is erased.

    Args:
        record: of one forward pass.
        by: `branch`, or `head` for attention's writes by head.
        pos: one position, or None for all; padding is left out.

    The rows are held for some tokens at a time, and of them only their products are kept.
    """
    if by not in ERASERS:
        raise ConfigError(f"by: unknown value {by!r}; {nearest(by, ERASERS)}")
    with torch.no_grad():
        labels = decompose(record, by, pos=slice(0, 1)).labels
        R = len(labels)
        products, count = wide(record["resid_final"]).new_zeros(R, R), 0
        for rows in _tokens(record, pos, by, R):  # (n, R, C)
            products += (rows @ rows.transpose(1, 2)).sum(0)
            count += len(rows)
        stage = _stages(record, labels).to(products.device)
        after = stage[:, None] > stage
        squares, lengths = products.diagonal(), products.diagonal().sqrt()
        share = over(-products, squares.expand(R, R))
        cosine = over(products, lengths[:, None] * lengths)
        chance = 2 / record.model.config.d_model**0.5
        return Erasure(labels, after, share * after, cosine * after, lengths / max(count, 1) ** 0.5, chance)


def _tokens(record: Record, pos: int | None, by: str, R: int) -> Iterator[Tensor]:
    """The rows at the tokens asked for, (n, R, C), as many of them at a time as CHUNK holds."""
    B, T = record.ids.shape
    C = record.model.config.d_model
    step = max(1, CHUNK // (B * R * max(R, C) * record.model.wte.weight.element_size()))
    chosen = range(T)[positions(record, pos)]
    for start in range(chosen.start, chosen.stop, step):
        span = slice(start, min(start + step, chosen.stop))
        rows = wide(decompose(record, by, pos=span).values).flatten(1, 2).transpose(0, 1)
        yield rows if record.mask is None else rows[record.mask[:, span].bool().flatten()]


def _stages(record: Record, labels: Sequence[str]) -> Tensor:
    """When each row is written, (rows,): first the embeddings, then at each join its write, then its norm's bias."""
    order = {(site.block, site.kind): index for index, site in enumerate(record.model.joins())}
    writers = [(label, parse_label(label)) for label in labels]
    return torch.tensor(
        [
            0 if writer.block is None else 1 + 2 * order[writer.block, str(writer.kind)] + label.endswith("ln_add.bias")
            for label, writer in writers
        ]
    )
