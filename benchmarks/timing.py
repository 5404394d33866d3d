"""Two ways to the same thing, timed by turns, so that a busy machine disturbs both alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.processes import Timed
from mainstem.errors import ConfigError

Side = Callable[..., Timed]
"""Does its work once, and returns its seconds; with `keep=True`, what it computed too."""


class Spread(NamedTuple):
    """The median of some numbers, and their quartiles."""

    median: float
    lower: float
    upper: float


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles (linear between neighbours)."""
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return Spread(median, lower, upper)


@dataclass(frozen=True)
class Alternated:
    """The seconds of two sides, one of each a round."""

    first: tuple[float, ...]
    second: tuple[float, ...]
    difference: float | None
    """By how much the two results differed, as the caller measures it; None if nobody asked."""

    @property
    def ratio(self) -> Spread:
        """First over second, within each round: what slows a whole round cancels."""
        return spread([a / b for a, b in zip(self.first, self.second, strict=True)])


def alternate(
    first: Side,
    second: Side,
    rounds: int,
    *,
    difference: Callable[[Any, Any], float] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Alternated:
    """Time two sides by turns, after one untimed call of each.

    The one that goes first in a round goes second in the next.

    Args:
        first, second: `Process.side`.
        rounds: timed calls of each.
        difference: of what the untimed calls computed; sides that differ cannot be compared.
        tick: called after each of the 2 (rounds + 1) calls.

    Raises ConfigError for less than one round.
    """
    check(rounds)
    values = []
    for side in (first, second):
        values.append(side(keep=difference is not None).value)
        tick()
    apart = None if difference is None else difference(*values)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for number in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds[number].append((first, second)[number]().seconds)
            tick()
    return Alternated(tuple(seconds[0]), tuple(seconds[1]), apart)


def check(rounds: int) -> None:
    """Raises ConfigError for less than one round."""
    if rounds < 1:
        raise ConfigError(f"rounds: {rounds} is not possible; give at least 1")
