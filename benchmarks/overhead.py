"""What watching costs: vitals at their default interval, and a tap that records nothing.

Ratios within one run, medians of interleaved repeats, so that a busy machine disturbs both sides alike.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.model.gpt import GPT
from mainstem.model.tap import Recorder
from mainstem.presets import preset as named
from mainstem.training.device import Device
from mainstem.training.evaluate import loss_sum
from mainstem.training.optim import Optimizer
from mainstem.training.vitals import Vitals


def measure(preset: str, repeats: int) -> dict[str, float | int | str]:
    """Seconds of a plain step, of a look and of two forward passes, and the ratios."""
    model_config, config = named(preset).model, named(preset).train
    model, device = GPT(model_config), Device.choose("cpu")
    optimizer = Optimizer(model, config)
    x = torch.randint(model_config.vocab_size, (config.batch_size, model_config.n_ctx))
    y = torch.randint(model_config.vocab_size, (config.batch_size, model_config.n_ctx))
    nothing = Recorder([])

    def step() -> None:
        (loss_sum(model, x, y) / y.numel()).backward()
        optimizer.step(0.0)
        optimizer.zero_grad()

    def look() -> None:
        Vitals(model, x, y, device).rows(0)

    @torch.no_grad()
    def plain() -> None:
        model(x)

    @torch.no_grad()
    def tapped() -> None:
        model(x, tap=nothing)

    seconds: dict[str, list[float]] = {f.__name__: [] for f in (step, look, plain, tapped)}
    for f in (step, look, plain, tapped):
        f()
    for repeat in range(repeats):
        pair = (plain, tapped) if repeat % 2 else (tapped, plain)  # neither always follows the other work
        for f in (step, look, *pair, *pair):
            start = time.perf_counter()
            f()
            seconds[f.__name__].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    pairs = zip(seconds["tapped"], seconds["plain"], strict=True)
    return {
        "preset": preset,
        "step_seconds": median["step"],
        "look_seconds": median["look"],
        "vitals_every": config.vitals_every,
        "vitals_share": median["look"] / (config.vitals_every * median["step"]),
        "empty_tap_over_plain": statistics.median(a / b for a, b in pairs),
    }


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Time what watching costs: vitals at their default interval, beside the steps between them, and a tap that records
    nothing, beside the plain forward pass."""

    preset: str = "andrea-nano"
    """Whose model and batch are taken."""
    repeats: int = 40
    """Timed calls of each."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print."""
    command = parse(Overhead, "overhead", argv, program="python -m benchmarks")
    screen = Screen(command.json)
    result = measure(command.preset, command.repeats)
    step, look = (1e3 * float(result[key]) for key in ("step_seconds", "look_seconds"))
    screen.say(f"{result['preset']}: a step {step:.1f} ms, a look {look:.1f} ms")
    screen.say(
        f"vitals every {result['vitals_every']} steps cost {100 * float(result['vitals_share']):.2f} % of training"
    )
    screen.say(f"a tap that records nothing: {result['empty_tap_over_plain']:.4f} of the plain forward")
    screen.result(result)
