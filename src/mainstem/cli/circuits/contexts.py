"""`mainstem circuits contexts RUN UNIT`: where in the held-out text one head or neuron does most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from mainstem.cli.parts.arguments import Positional, parse
from mainstem.cli.parts.inspection import Opening, finish, held_out, in_json, open_model, piece
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.columns import clip, tail
from mainstem.errors import UserError
from mainstem.model.names import parse_label
from mainstem.text import units
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from mainstem.circuits.contexts import Context


@dataclass(frozen=True, kw_only=True)
class Contexts(Opening):
    """Where in the held-out text a head writes most and what it reads there, or where a neuron is most active."""

    unit: Annotated[Positional[str], arg(metavar="UNIT")]
    """A head, L1H3, or a neuron, L0N17."""
    data: str | None = None
    """A prepared folder; by default the run's own data."""
    windows: int = 64
    """The most windows of held-out text to read."""
    top: int = 10
    """How many contexts to show."""


def main(argv: Sequence[str]) -> None:
    """Parse, read, print."""
    command = parse(Contexts, "circuits contexts", argv)
    screen = Screen(command.json)
    unit = parse_label(command.unit)
    if unit.block is None or unit.unit is None or unit.part:
        raise UserError(f"unit: {command.unit!r} is neither a head, L1H3, nor a neuron, L0N17")
    model, tokenizer = open_model(command, screen)
    from mainstem.circuits.contexts import head_contexts, neuron_contexts

    read = 0

    def counted(windows: Iterator["Tensor"]) -> Iterator["Tensor"]:
        nonlocal read
        for read, window in enumerate(windows, start=1):  # noqa: B007
            yield window

    strongest, what = (head_contexts, "length of its write") if unit.name == "head" else (neuron_contexts, "activation")
    with stoppable() as check:
        windows = counted(held_out(command.run, command.data, model, tokenizer, command.windows, check))
        places = strongest(model, windows, unit.block, unit.unit, command.top)
    screen.say(f"{command.unit}: its strongest contexts in {read} windows, by {what}")
    for context in places:
        source = context.source
        reads = "" if source is None else f"  reads {piece(tokenizer, source.token)} ({source.attention:.2f})"
        screen.say(f"  {context.value:8.3f}  {_marked(context, tokenizer)}{reads}")
    rows = [_row(context, tokenizer) for context in places]
    arrays = {name: [getattr(context, name) for context in places] for name in ("value", "window", "position")}
    finish(command, screen, {"unit": command.unit, "windows": read, "contexts": rows, "notes": []}, lambda: arrays)


def _row(context: "Context", tokenizer: Tokenizer) -> dict[str, object]:
    """A place as a program reads it."""
    source = context.source
    read = None
    if source is not None:
        (token,) = in_json(tokenizer, [source.token])
        read = {"position": source.position, "token": token, "attention": source.attention}
    return {
        "value": context.value,
        "window": context.window,
        "position": context.position,
        "start": context.start,
        "tokens": in_json(tokenizer, context.ids),
        "source": read,
    }


def _marked(context: "Context", tokenizer: Tokenizer) -> str:
    """The tokens around a place, with the place in brackets, in at most 48 columns around it."""
    shown = [units.shown(text) for text in units.pieces(tokenizer, context.ids)]
    at = context.position - context.start
    before, after = "".join(shown[:at]), "".join(shown[at + 1 :])
    return f"{tail(before, 24)}[{shown[at]}]{clip(after, 20)}".replace("␣", " ")
