"""Times by turns, of sides whose seconds are known beforehand."""

import pytest

from benchmarks.processes import Timed
from benchmarks.timing import alternate, spread
from mainstem.errors import ConfigError


def lasting(*seconds, values=None):
    """A side that takes these seconds, call by call."""
    left = list(seconds)
    return lambda keep=False: Timed(left.pop(0), values if keep else None)


def test_the_first_call_is_not_timed():
    timed = alternate(lasting(99, 2, 4, 9), lasting(77, 1, 2, 3), 3)
    assert timed.first == (2, 4, 9)
    assert timed.second == (1, 2, 3)
    assert timed.ratio == (2, 2, 2.5)
    assert timed.difference is None


def test_what_slows_a_whole_round_does_not_move_the_ratio():
    timed = alternate(lasting(1, 3, 300, 30), lasting(1, 2, 200, 20), 3)
    assert timed.ratio == (1.5, 1.5, 1.5)


def test_median_and_quartiles():
    assert spread([5, 1, 3, 2, 4]) == (3, 2, 4)
    assert spread([7]) == (7, 7, 7)


def test_each_goes_first_in_every_other_round():
    calls = []

    def side(name):
        return lambda keep=False: calls.append(name) or Timed(1.0)

    alternate(side("a"), side("b"), 4, tick=lambda: calls.append("."))
    assert "".join(calls) == "a.b." + "a.b.b.a." * 2


def test_the_untimed_results_are_compared():
    sides = lasting(1, 1, values=10), lasting(1, 1, values=4)
    assert alternate(*sides, 1, difference=lambda a, b: a - b).difference == 6


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_round_is_an_error(rounds):
    with pytest.raises(ConfigError, match=f"rounds: {rounds} is not possible; give at least 1"):
        alternate(lasting(), lasting(), rounds)
