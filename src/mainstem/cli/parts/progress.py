"""The progress of training: its events as lines and a bar."""

from collections.abc import Callable, Iterable
from typing import Any

from mainstem.cli.parts.screen import Screen
from mainstem.training.events import Evaluated, Evaluating, Event, Notice, Observed, Sampled, Step


def watch(events: Iterable[Event], steps: int, screen: Screen, note: Callable[[str], None]) -> None:
    """Show the events of training as they come, and the last recording of the stream at the end."""
    vitals: list[dict[str, Any]] = []
    with screen.bar("training", steps) as bar:
        for event in events:
            if isinstance(event, Step):
                rate = event.tokens / event.seconds / 1000
                bar.at(event.step, f"loss {event.loss:.2f}  {event.bits_per_byte:.2f} bits/byte  {rate:.1f}k tok/s")
            elif isinstance(event, Evaluating):
                bar.at(event.step, f"evaluating {event.tokens:,} held-out tokens")
            elif isinstance(event, Evaluated):
                best = ", the best so far" if event.best else ""
                bar.say(
                    f"step {event.step:,}: held-out {event.result.bits_per_byte:.4f} bits per byte, "
                    f"{event.result.loss:.4f} nats per token{best}"
                )
            elif isinstance(event, Observed):
                vitals = event.rows
            elif isinstance(event, Sampled):
                bar.say(f"step {event.step:,}: {event.text!r}")
            elif isinstance(event, Notice):
                note(event.text)
    if vitals:
        show_vitals(vitals, screen)


def show_vitals(rows: list[dict[str, Any]], screen: Screen) -> None:
    """The residual stream by depth, as recorded last."""
    columns = {
        "block": "depth", "stream": "stream", "attn_write": "attn write", "mlp_write": "mlp write",
        "attn_cos": "cos(attn)", "mlp_cos": "cos(mlp)", "gradient": "gradient", "update": "update",
    }  # fmt: skip
    screen.say(f"the stream at step {rows[0]['step']:,}")
    screen.table(list(columns.values()), [[row.get(key) for key in columns] for row in rows])
