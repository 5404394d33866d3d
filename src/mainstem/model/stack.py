"""Levels of the residual stream: before the first join, between two joins, and after the last (`GPT.joins`).

Each level is one tensor and may have two names: `resid_post` of block 0 is `resid_pre` of block 1.
"""

from mainstem.model.gpt import GPT
from mainstem.model.names import FINAL


def levels(model: GPT) -> list[tuple[str, ...]]:
    """The names of each level of the stream, after 0, 1, ... all joins; results use the first.

    The first name is the point that the next branch reads, and `resid_final` after the last join.
    """
    joins = model.joins()
    first = [*(site.reads for site in joins), FINAL]
    other = [None, *(site.after for site in joins)]
    return [(one,) if two in (one, None) else (one, two) for one, two in zip(first, other, strict=True)]


def level(model: GPT, point: str) -> int | None:
    """The number of joins before a point of the stream, by any of its names; None for other points."""
    return next((passed for passed, names in enumerate(levels(model)) if point in names), None)


def join_index(model: GPT, point: str) -> int:
    """The index of the join that a point belongs to: -1 before the first, the number of joins after the last.

    The points of a join begin at the stream that its branch reads and end before the stream that the next one reads.
    """
    joins, order = model.joins(), {name: at for at, name in enumerate(model.points())}
    if order[point] >= order[FINAL]:
        return len(joins)
    return sum(order[site.reads] <= order[point] for site in joins) - 1
