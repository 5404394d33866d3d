"""`mainstem bench decode`: what a generated token costs, over memory's speed and beside the peers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Time greedy generation, by turns with reading the weights' bytes alone, with the `generate` of transformers, and
    with llama.cpp; all with the same random weights, on the CPU.

    The peers are optional: pip install transformers mainstem[llama].
    """

    shape: Literal["small", "mid", "andrea"] = "andrea"
    """4 blocks of 128, 6 of 384 (characters), or ANDREA's 12 of 768."""
    rounds: int = 5
    """Timed texts of each side of a pair."""
    run: str | None = None
    """A trained RUN, whose held-out loss with int8 weights is compared with that of its own."""
    data: str | None = None
    """Its prepared folder; without it the run's own."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print."""
    command = parse(Decode, "bench decode", argv)
    screen = Screen(command.json)
    from mainstem.bench.decode import measure

    with screen.bar("bench decode", 1) as bar:
        found = measure(
            command.shape, command.rounds, run=command.run, data=command.data,
            progress=lambda done, total: bar.at(done, total=total),
        )  # fmt: skip
    for note in found["notes"]:
        screen.note(note)
    screen.say(
        f"{found['shape']}: {found['prompt']} tokens, then {found['new']} more; torch {found['torch']}, "
        f"{found['threads']} threads, {found['bytes_read'] / 1e6:,.0f} MB of float32 weights a token"
    )
    rows = []
    for name, timing in found["timings"].items():
        if timing is None:
            rows.append((name, "-", "-", "-"))
            continue
        lower, upper = timing["ratio_quartiles"]
        seconds = ", ".join(f"{side} {1000 * value:,.2f}" for side, value in timing["seconds"].items())
        rows.append((name, f"{timing['ratio']:.3f}", f"{lower:.3f} to {upper:.3f}", seconds))
    screen.table(("figure", "ratio", "middle half", "ms a step"), rows)
    first = ", ".join(f"{side} {1000 * value:,.0f}" for side, value in found["first_token_seconds"].items())
    screen.say(f"first token after, ms: {first}")
    if found["losses"] is not None:
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in found["losses"].items())
        screen.say(f"held-out loss: {losses}; int8 - fp32 {found['int8_loss_minus_fp32']:+.5f} nats")
    screen.result(found)
