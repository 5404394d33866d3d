"""What watching costs: vitals at their default interval, and a tap that records nothing. `--json` prints one object.

Ratios within one run, medians of interleaved repeats, so that a busy machine disturbs both sides alike.
"""

import argparse
import json
import statistics
import time

import torch

from mainstem.model.gpt import GPT
from mainstem.model.tap import Recorder
from mainstem.presets import PRESETS
from mainstem.training.device import Device
from mainstem.training.evaluate import loss_sum
from mainstem.training.optim import Optimizer
from mainstem.training.vitals import Vitals


def measure(preset: str, repeats: int) -> dict[str, float | int | str]:
    """Seconds of a plain step, of a look and of two forward passes, and the ratios."""
    model_config, config = PRESETS[preset].model, PRESETS[preset].train
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="andrea-nano", choices=sorted(PRESETS))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.preset, arguments.repeats)
    if arguments.json:
        print(json.dumps(result))
    else:
        step, look = (1e3 * float(result[key]) for key in ("step_seconds", "look_seconds"))
        print(f"{result['preset']}: a step {step:.1f} ms, a look {look:.1f} ms")
        print(f"vitals every {result['vitals_every']} steps cost {100 * result['vitals_share']:.2f} % of training")
        print(f"a tap that records nothing: {result['empty_tap_over_plain']:.4f} of the plain forward")
