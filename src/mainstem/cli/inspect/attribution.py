"""`mainstem inspect attribution RUN "prompt"`: why it said that, in rows that sum to the logit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mainstem.cli.opened import Prompt, finish, open_trace, piece, pieces_of, tail, typed_token
from mainstem.cli.parse import parse
from mainstem.cli.screen import Screen, length
from mainstem.text.units import pad, width

if TYPE_CHECKING:
    from mainstem.stream.trace import Trace

READ = 0.1
"""The least attention on a position that is worth a word."""


@dataclass(frozen=True, kw_only=True)
class Attribution(Prompt):
    """What every head, neuron or branch adds to the logit of a token, or to its lead over a foil."""

    token: str | None = None
    """Whose logit; without it, the model's first choice."""
    foil: str | None = None
    """Explain the difference to this token's logit."""
    by: Literal["head", "branch", "neuron"] = "head"
    """Rows by head, by branch, or by neuron."""
    pos: int = -1
    """The position after which the token would come; -1 is the last."""
    top: int = 12
    """Rows that are shown; the others are shown as one."""


def main(argv: Sequence[str]) -> None:
    """Parse, ask, print."""
    command = parse(Attribution, "inspect attribution", argv)
    screen = Screen(command.json)
    trace = open_trace(command, screen)
    tokenizer = trace.tokenizer
    assert tokenizer is not None
    from mainstem.stream.decompose import positions

    here = positions(trace, command.pos).start
    logits = trace.logits[0, here]
    token = int(logits.argmax()) if command.token is None else typed_token(tokenizer, command.token)
    foil = None if command.foil is None else typed_token(tokenizer, command.foil)
    why = trace.attribution(token, foil, by=command.by, pos=command.pos)
    logit, rank = why.total.item(), 1 + int((logits > logits[token]).sum())
    over = "" if foil is None else f" over {piece(tokenizer, foil)!r}"
    read = tokenizer.decode(trace.ids[0, : here + 1].tolist())
    screen.say(f"why {piece(tokenizer, token)!r}{over} ({_what(foil)} {logit:.3f}, rank {rank}) after {tail(read)!r}")
    shown = why.strongest(command.top)
    largest = max((abs(value) for _, value in shown), default=1.0)
    rest = logit - sum(value for _, value in shown)
    widest = max(width(label) for label, _ in [*shown, ("the other 000 rows", 0)])
    tokens = pieces_of(trace)
    for label, value in shown:
        line = f"  {pad(label, widest)}  {value:+8.3f}  {pad(length(value, largest, 14), 14)}"
        screen.say(f"{line}  {_reads(trace, tokens, label, here)}".rstrip())
    if others := len(why.labels) - len(shown):
        screen.say(f"  {pad(f'the other {others} rows', widest)}  {rest:+8.3f}")
    screen.say(f"  {pad('sum', widest)}  {why.values.sum().item():+8.3f}  closing error {why.closing_error:.1e}")
    result = {
        "token": {"id": token, "text": piece(tokenizer, token)},
        "foil": None if foil is None else {"id": foil, "text": piece(tokenizer, foil)},
        "pos": here,
        "rank": rank,
        "logit": logit,
        "closing_error": why.closing_error,
        "rows": why.rows(),
    }
    finish(command, screen, result, lambda: {"labels": why.labels, "values": why.values.flatten().numpy()})


def _what(foil: int | None) -> str:
    return "logit" if foil is None else "difference"


def _reads(trace: "Trace", tokens: list[str], label: str, here: int) -> str:
    """What a head read at this position: its two strongest sources."""
    if not label.startswith("L") or "H" not in label:
        return ""
    layer, head = map(int, label[1:].split("H"))
    pattern = trace["pattern", layer][0, head, here]
    found = pattern.topk(min(2, len(pattern)))
    sources = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    words = [f"{tokens[i]} ({weight:.2f})" for i, weight in sources if weight >= READ]
    return f"reads {', '.join(words)}" if words else ""
