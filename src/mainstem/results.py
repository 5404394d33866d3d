"""What every result offers: a short repr, `to_dicts()` and `top(n)`.

    >>> why = trace.attribution(" thou")
    >>> why                   # at most eight lines: what it is, how it closes, its strongest rows
    >>> why.top(5)            # the five strongest rows: small records with a `label` and a `value`
    >>> why.to_dicts()        # all rows as plain values, for JSON or a data frame

A row is of something, its `label`, and has a number by which rows are ranked, its `value`; a result's docstrings say
what both are. `top` ranks by magnitude, and by the value itself where that is a score. This file loads no torch.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from mainstem.columns import clip, pad, width
from mainstem.errors import ConfigError

SHOWN = 5
"""Rows of a result that its repr shows."""
COLUMNS = 80
"""The most columns of a line of a repr."""


class Row(Protocol):
    """One row of a result."""

    @property
    def label(self) -> str:
        """What the row is of."""

    @property
    def value(self) -> float:
        """The number by which rows are ranked."""


class Item(NamedTuple):
    """A row that is one number."""

    label: str
    value: float


R = TypeVar("R", bound=Row)


class Rows(list[R]):
    """Rows in a list, which prints as a short table.

    Args:
        rows: in their order.
        title: what they are.
    """

    def __init__(self, rows: Iterable[R] = (), title: str = "rows"):
        super().__init__(rows)
        self.title = title

    def __repr__(self) -> str:
        return summary(f"{len(self)} {self.title}", self[:SHOWN], len(self))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Each row as plain values: its `label`, and its fields by their names."""
        return [{"label": row.label} | plain(row) for row in self]

    def top(self, n: int = 10) -> "Rows[R]":
        """The n rows of largest magnitude, largest first; NaN is left out. Raises ConfigError for n below 1."""
        finite = [row for row in self if row.value == row.value]
        return Rows(sorted(finite, key=lambda row: -abs(row.value))[: at_least_one(n)], self.title)


def strongest(labels: Sequence[str], values: Sequence[float], n: int, title: str = "rows") -> Rows[Item]:
    """The n numbers of largest magnitude by their labels; of equal ones the first comes first."""
    return Rows(map(Item, labels, values), title).top(n)


def ranked(labels: Sequence[str], scores: Sequence[float], n: int, title: str = "rows") -> Rows[Item]:
    """The n highest scores by their labels, highest first; NaN is left out."""
    rows = sorted(
        (Item(*row) for row in zip(labels, scores, strict=True) if row[1] == row[1]), key=lambda row: -row.value
    )
    return Rows(rows[: at_least_one(n)], title)


def at_least_one(n: int) -> int:
    """n, the number of rows to return. Raises ConfigError for less than 1."""
    if n < 1:
        raise ConfigError(f"n: {n} rows cannot be the strongest; ask for at least 1")
    return n


def summary(title: str, rows: Sequence[Row] = (), count: int = 0) -> str:
    """A repr: a title, on two lines at most, some of `count` rows, and how many more there are."""
    lines = textwrap.wrap(title, COLUMNS, subsequent_indent="  ", max_lines=2, placeholder=" ...")
    labels = [clip(row.label, COLUMNS - 16) for row in rows]
    widest = max(map(width, labels), default=0)
    lines += [f"  {pad(label, widest)}  {number(row.value):>10}" for label, row in zip(labels, rows, strict=True)]
    if len(rows) < count:
        lines.append(f"  ... {count - len(rows):,} more: top(n), to_dicts()")
    return "\n".join(clip(line, COLUMNS) for line in lines)


def number(value: float) -> str:
    """A number in three decimals, or in powers of ten where those would say little."""
    return f"{value:+.3f}" if value == 0 or 0.001 <= abs(value) < 1e5 else f"{value:+.2e}"


def plain(value: Any) -> Any:
    """The value as lists, dicts, numbers and texts: tensors and arrays as lists, records as dicts of their fields."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
