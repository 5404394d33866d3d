"""The rate is a pure function of the step: positive, at most 1, and where it should be at its end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.config import SCHEDULES, TrainConfig
from mainstem.training.schedule import rate

configs = st.builds(
    TrainConfig,
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    schedule=st.sampled_from(SCHEDULES),
    min_lr=st.sampled_from((0.0, 0.1, 1.0)),
    decay_share=st.sampled_from((0.0, 0.01, 0.3, 1.0)),
)


@given(configs)
def test_every_step_moves_and_none_beyond_the_peak(config):
    """Whatever the warm-up and the length, no step divides by zero, stands still or leaps."""
    rates = [rate(step, config) for step in range(config.steps)]
    assert all(0 < r <= 1 for r in rates)
    rising = min(config.warmup, config.steps)
    assert rates[:rising] == sorted(rates[:rising])
    assert rates[rising:] == sorted(rates[rising:], reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("steps", "warmup", "first", "last"),
    [(10, 10, 1 / 11, 10 / 11), (10, 50, 1 / 51, 10 / 51), (1, 0, 1, 1), (1, 1, 1 / 2, 1 / 2), (1, 5, 1 / 6, 1 / 6)],
)
def test_edges_of_the_warm_up(schedule, steps, warmup, first, last):
    config = TrainConfig(steps=steps, warmup=warmup, schedule=schedule)
    assert rate(0, config) == pytest.approx(first)
    assert rate(steps - 1, config) == pytest.approx(last)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_warm_up_the_first_step_has_the_peak_rate(schedule):
    assert rate(0, TrainConfig(steps=10, warmup=0, schedule=schedule)) == 1


@pytest.mark.parametrize("min_lr", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_where_each_kind_ends(schedule, min_lr):
    config = TrainConfig(steps=100, warmup=10, schedule=schedule, min_lr=min_lr)
    assert rate(10, config) == 1
    assert rate(100, config) == pytest.approx(1 if schedule == "constant" else min_lr, abs=1e-15)


def test_the_middle_of_each_fall():
    middle = {"cosine": 0.5, "linear": 0.5, "trapezoid": 1.0, "constant": 1.0}
    for schedule, expected in middle.items():
        assert rate(60, TrainConfig(steps=110, warmup=10, schedule=schedule, min_lr=0.0)) == pytest.approx(expected)
    quarter = TrainConfig(steps=100, warmup=0, schedule="cosine", min_lr=0.2)
    assert rate(25, quarter) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)))


def test_a_trapezoid_is_flat_and_then_a_line():
    config = TrainConfig(steps=100, warmup=0, schedule="trapezoid", min_lr=0.0, decay_share=0.3)
    rates = [rate(step, config) for step in range(101)]
    assert rates[:71] == [1.0] * 71
    assert rates[70:] == pytest.approx([(100 - step) / 30 for step in range(70, 101)])


def test_a_trapezoid_that_never_falls_is_constant():
    config = TrainConfig(steps=10, warmup=0, schedule="trapezoid", decay_share=0.0)
    assert [rate(step, config) for step in range(10)] == [1.0] * 10


def test_a_longer_run_stretches_the_schedule():
    """The length of the schedule is the config's, and nothing else's."""
    short, long = (TrainConfig(steps=steps, warmup=0, schedule="linear", min_lr=0.0) for steps in (100, 200))
    assert [rate(step, short) for step in range(100)] == [rate(2 * step, long) for step in range(100)]
