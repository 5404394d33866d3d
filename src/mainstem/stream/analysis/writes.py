"""What each branch writes to the stream, against the stream that it read; and the stream's size where it is read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.model.precision import over, wide
from mainstem.model.stack import levels as stream_levels
from mainstem.results import Rows, number
from mainstem.stream.record import Record


@dataclass(frozen=True, repr=False)
class Write:
    """What one branch added to the stream, token by token; each tensor is (B, T)."""

    label: str
    length: Tensor
    """Norm of the write."""
    ratio: Tensor
    """The write's norm over that of the stream which the branch read, before any skip; 0 where that stream is 0."""
    cosine: Tensor
    """The write's cosine to that stream: above 0 it amplifies, below it erases; 0 where one of the two is 0."""
    means: dict[str, float]
    """The mean of each of the three over the tokens, without padding."""

    @property
    def value(self) -> float:
        """The mean ratio, by which writes are ranked."""
        return self.means["ratio"]

    def _asdict(self) -> dict[str, float]:
        return self.means

    def __repr__(self) -> str:
        return _short(self.label, self.means)


@dataclass(frozen=True, repr=False)
class Level:
    """The stream at one point, token by token; each tensor is (B, T)."""

    point: str
    norm: Tensor
    mean: Tensor
    """Over the width."""
    std: Tensor
    """Over the width, dividing by C, as a LayerNorm does."""
    means: dict[str, float]
    """The mean of each of the three over the tokens, without padding."""

    @property
    def label(self) -> str:
        """The point."""
        return self.point

    @property
    def value(self) -> float:
        """The mean norm, by which levels are ranked."""
        return self.means["norm"]

    def _asdict(self) -> dict[str, float]:
        return self.means

    def __repr__(self) -> str:
        return _short(self.point, self.means)


def writes(record: Record) -> Rows[Write]:
    """A row for what each branch wrote, in the order of the forward pass."""
    rows = []
    for site in record.model.joins():
        stream, write = wide(record[site.reads]), wide(record[site.write])
        length, read = write.norm(dim=-1), stream.norm(dim=-1)
        values = {
            "length": length,
            "ratio": over(length, read),
            "cosine": over((write * stream).sum(-1), length * read),
        }
        rows.append(Write(site.label, **values, means=_means(record, values)))
    return Rows(rows, "writes: the mean ratio of each to the stream that was read")


def levels(record: Record) -> Rows[Level]:
    """A row for the stream at each point where a branch reads it, and one for `resid_final`."""
    rows = []
    for point, *_ in stream_levels(record.model):
        stream = wide(record[point])
        std, mean = torch.std_mean(stream, dim=-1, correction=0)
        values = {"norm": stream.norm(dim=-1), "mean": mean, "std": std}
        rows.append(Level(point, **values, means=_means(record, values)))
    return Rows(rows, "levels of the stream: the mean norm of each")


def _short(label: str, means: dict[str, float]) -> str:
    return f"{label}: " + ", ".join(f"{name} {number(mean)}" for name, mean in means.items())


def _means(record: Record, values: dict[str, Tensor]) -> dict[str, float]:
    real = torch.ones_like(record.ids, dtype=torch.bool) if record.mask is None else record.mask.bool()
    return {name: value[real].mean().item() for name, value in values.items()}
