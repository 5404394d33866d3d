"""Two ways to the same thing, timed by turns in one process, so that a busy machine disturbs both alike."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mainstem.errors import ConfigError

Work = Callable[[], Any]


class Spread(NamedTuple):
    """The middle of some numbers, and the range of their middle half."""

    median: float
    lower: float
    upper: float


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles (linear between neighbours)."""
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return Spread(median, lower, upper)


@dataclass(frozen=True)
class Alternated:
    """The seconds of two ways, one of each a round."""

    first: tuple[float, ...]
    second: tuple[float, ...]
    difference: float | None
    """By how much the two results differed, as the caller measures it; None if nobody asked."""

    @property
    def ratio(self) -> Spread:
        """First over second, within each round: what slows a whole round cancels."""
        return spread([a / b for a, b in zip(self.first, self.second, strict=True)])


def alternate(
    first: Work,
    second: Work,
    rounds: int,
    *,
    difference: Callable[[Any, Any], float] | None = None,
    tick: Callable[[], None] = lambda: None,
    seconds: Callable[[Work], float] | None = None,
) -> Alternated:
    """Time two ways by turns, after one untimed call of each.

    The one that goes first in a round goes second in the next. The garbage collector runs between the calls and not in
    them, and what a call returns is freed after its time is taken.

    Args:
        first, second: called without arguments.
        rounds: timed calls of each.
        difference: of what the untimed calls returned; ways that differ cannot be compared.
        tick: called after each of the 2 (rounds + 1) calls.
        seconds: of one call, for ways of which a part is timed; the whole call if None.

    Raises ConfigError for less than one round.
    """
    if rounds < 1:
        raise ConfigError(f"rounds: {rounds} is not possible; give at least 1")
    taken: tuple[list[float], list[float]] = ([], [])
    with _collector_held():
        found = _warmed(first, second, difference, tick)
        for turn in range(rounds):
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                gc.collect()
                taken[side].append((seconds or _seconds)((first, second)[side]))
                tick()
    return Alternated(tuple(taken[0]), tuple(taken[1]), found)


def _warmed(
    first: Work, second: Work, difference: Callable[[Any, Any], float] | None, tick: Callable[[], None]
) -> float | None:
    """The first calls, whose results are compared and let go."""
    one = first()
    tick()
    other = second()
    tick()
    return None if difference is None else difference(one, other)


def _seconds(work: Work) -> float:
    """Of one call; `value` lives until the clock was read."""
    start = time.perf_counter()
    value = work()
    end = time.perf_counter()
    del value
    return end - start


@contextlib.contextmanager
def _collector_held() -> Iterator[None]:
    """No automatic garbage collection inside; after it, as it was."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
