"""The stream between the joins: each place of it once, under all the names that it has.

A model gives its joins in order (`GPT.joins`). The stream before the first, between two, and after the last is one
tensor each, a level; what block 0 leaves is what block 1 reads, so the one's `resid_post` is the other's `resid_pre`.
"""

from mainstem.model.gpt import GPT
from mainstem.model.names import FINAL


def levels(model: GPT) -> list[tuple[str, ...]]:
    """The names of the stream after 0, 1, ... all joins; the first is the one that results use.

    That is the point which the next branch reads, and `resid_final` after the last.
    """
    joins = model.joins()
    first = [*(site.reads for site in joins), FINAL]
    other = [None, *(site.after for site in joins)]
    return [(one,) if two in (one, None) else (one, two) for one, two in zip(first, other, strict=True)]


def level(model: GPT, point: str) -> int | None:
    """How many joins the stream has passed at a point, by any of its names; None for what is not the stream."""
    return next((passed for passed, names in enumerate(levels(model)) if point in names), None)


def join_index(model: GPT, point: str) -> int:
    """The index of the join that a point belongs to: -1 before the first, the number of joins after the last.

    A branch begins at the stream that it reads and ends before the stream that the next one reads.
    """
    joins, order = model.joins(), {name: at for at, name in enumerate(model.points())}
    if order[point] >= order[FINAL]:
        return len(joins)
    return sum(order[site.reads] <= order[point] for site in joins) - 1
