"""Times by turns, with a clock that the work itself moves: what is known beforehand is what is found."""

import gc
import weakref

import pytest

from benchmarks import timing
from benchmarks.timing import alternate, spread
from mainstem.errors import ConfigError


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until work moves it: `clock[0]` is the time."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def lasting(clock, *seconds):
    """Work that takes these seconds, call by call."""
    left = list(seconds)

    def work():
        clock[0] += left.pop(0)

    return work


def test_the_seconds_are_those_of_the_timed_calls(clock):
    found = alternate(lasting(clock, 99, 2, 4, 9), lasting(clock, 77, 1, 2, 3), 3)
    assert found.first == (2, 4, 9)
    assert found.second == (1, 2, 3)
    assert found.ratio == (2, 2, 2.5)
    assert found.difference is None


def test_what_slows_a_whole_round_does_not_move_the_ratio(clock):
    found = alternate(lasting(clock, 1, 3, 300, 30), lasting(clock, 1, 2, 200, 20), 3)
    assert found.ratio == (1.5, 1.5, 1.5)


def test_median_and_quartiles():
    assert spread([5, 1, 3, 2, 4]) == (3, 2, 4)
    assert spread([7]) == (7, 7, 7)


def test_each_goes_first_in_every_other_round():
    calls = []
    alternate(lambda: calls.append("a"), lambda: calls.append("b"), 4, tick=lambda: calls.append("."))
    assert "".join(calls) == "a.b." + "a.b.b.a." * 2


def test_the_untimed_results_are_compared():
    left, right = iter([10, 0]), iter([4, 0])
    assert alternate(lambda: next(left), lambda: next(right), 1, difference=lambda a, b: a - b).difference == 6


@pytest.mark.parametrize("on", [True, False])
def test_no_collection_while_it_is_timed(on):
    """And afterwards it is as it was, whatever happened."""
    seen, was = [], gc.isenabled()

    def fail():
        raise ZeroDivisionError

    try:
        (gc.enable if on else gc.disable)()
        alternate(lambda: seen.append(gc.isenabled()), lambda: seen.append(gc.isenabled()), 2)
        assert seen == [False] * 6
        assert gc.isenabled() == on
        with pytest.raises(ZeroDivisionError):
            alternate(fail, fail, 1)
        assert gc.isenabled() == on
    finally:
        (gc.enable if was else gc.disable)()


def test_a_result_is_gone_before_the_next_call_and_after_its_time_was_taken(clock):
    class Result:
        pass

    alive = []

    def work():
        assert not [result for result in alive[2:] if result() is not None]
        result = Result()
        result.itself = result  # only the collector can free it
        weakref.finalize(result, freed)
        alive.append(weakref.ref(result))
        return result

    def freed():
        clock[0] += 1

    found = alternate(work, work, 2)
    assert found.first == found.second == (0, 0)


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_round_is_an_error(rounds):
    with pytest.raises(ConfigError, match=f"rounds: {rounds} is not possible; give at least 1"):
        alternate(int, int, rounds)
