"""`mainstem inspect attribution RUN "prompt"`: direct logit attribution, in rows that sum to the logit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import LINE, Captured, ending, finish, in_json, open_trace, piece, typed_token
from mainstem.cli.parts.screen import Screen, bar_text
from mainstem.columns import clip, pad, width
from mainstem.model.names import parse_label
from mainstem.text.units import pieces, shown

if TYPE_CHECKING:
    from mainstem.stream.trace import Trace

READ = 0.1
"""The least attention on a position that is worth a word."""


@dataclass(frozen=True, kw_only=True)
class Attribution(Captured):
    """Direct logit attribution: what each head, neuron or branch adds to a token's logit or to its lead over a foil."""

    token: str | None = None
    """Whose logit; by default the model's most probable next token."""
    foil: str | None = None
    """Explain the difference to this token's logit."""
    by: Literal["head", "branch", "neuron"] = "head"
    """Rows by head, by branch, or by neuron."""
    pos: int = -1
    """The position before the predicted token; -1 is the last of the prompt."""
    top: int = 12
    """How many rows to show; the others are shown as one."""


def main(argv: Sequence[str]) -> None:
    """Parse, ask, print."""
    command = parse(Attribution, "inspect attribution", argv)
    screen = Screen(command.json)
    trace = open_trace(command, screen)
    tokenizer = trace.tokenizer
    assert tokenizer is not None
    from mainstem.stream.decompose import positions

    position = positions(trace, command.pos).start
    logits = trace.logits[0, position]
    token = int(logits.argmax()) if command.token is None else typed_token(tokenizer, command.token)
    foil = None if command.foil is None else typed_token(tokenizer, command.foil)
    why = trace.attribution(token, foil, by=command.by, pos=command.pos)
    logit, rank = why.total.item(), 1 + int((logits > logits[token]).sum())
    over = "" if foil is None else f" over '{piece(tokenizer, foil)}'"
    read = tokenizer.decode(trace.ids[0, : position + 1].tolist())
    what = "logit" if foil is None else "difference"
    screen.say(ending(f"why '{piece(tokenizer, token)}'{over} ({what} {logit:.3f}, rank {rank}) after", read))
    strongest = why.top(command.top)
    largest = max((abs(value) for _, value in strongest), default=1.0)
    rest = logit - sum(value for _, value in strongest)
    others = f"the other {len(why.labels) - len(strongest)} rows"
    widest = max(map(width, [*(label for label, _ in strongest), others]))
    tokens = [shown(text) for text in pieces(tokenizer, trace.ids[0].tolist())]
    for label, value in strongest:
        line = f"  {pad(label, widest)}  {value:+8.3f}  {pad(bar_text(value, largest, 14), 14)}"
        screen.say(f"{line}  {clip(_reads(trace, tokens, label, position), LINE - width(line) - 2)}".rstrip())
    if len(why.labels) > len(strongest):
        screen.say(f"  {pad(others, widest)}  {rest:+8.3f}")
    screen.say(f"  {pad('sum', widest)}  {why.values.sum().item():+8.3f}  closing error {why.closing_error:.1e}")
    result = {
        "token": in_json(tokenizer, [token])[0],
        "foil": None if foil is None else in_json(tokenizer, [foil])[0],
        "pos": position,
        "rank": rank,
        "logit": logit,
        "closing_error": why.closing_error,
        "rows": why.to_dicts(),
    }
    finish(command, screen, result, lambda: {"labels": why.labels, "values": why.values.flatten()})


def _reads(trace: "Trace", tokens: list[str], label: str, position: int) -> str:
    """What a head read at this position: its two strongest sources."""
    unit = parse_label(label)
    if unit.name != "head" or unit.block is None:
        return ""
    pattern = trace["pattern", unit.block][0, unit.unit, position]
    top = pattern.topk(min(2, len(pattern)))
    sources = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    words = [f"{tokens[i]} ({weight:.2f})" for i, weight in sources if weight >= READ]
    return f"reads {', '.join(words)}" if words else ""
