"""The learning rate as a pure function of the step."""

import math

from mainstem.config import TrainConfig


def rate(step: int, config: TrainConfig) -> float:
    """The share of the peak rate at a step counted from 0: in (0, 1], whatever the warm-up and the length.

    The warm-up rises linearly from 1 / (warmup + 1); the decay reaches `min_lr` where step would equal steps.
    """
    if step < config.warmup:
        return (step + 1) / (config.warmup + 1)
    done = (step - config.warmup) / max(1, config.steps - config.warmup)  # 0 to 1 after the warm-up
    done = min(1.0, done)
    floor = config.min_lr
    if config.schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "linear":
        return floor + (1 - floor) * (1 - done)
    if config.schedule == "trapezoid":
        left = (1 - done) / config.decay_share if config.decay_share else 1.0
        return floor + (1 - floor) * min(1.0, left)
    return 1.0
