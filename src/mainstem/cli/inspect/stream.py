"""`mainstem inspect stream RUN "prompt"`: the stream by depth, the writes, and what is erased."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Captured, ending, finish, in_json, open_trace
from mainstem.cli.parts.screen import Screen
from mainstem.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Stream(Captured):
    """The residual stream at every depth, what each branch writes to it, and which later writes erase earlier ones."""

    points: Annotated[tuple[str, ...], arg(metavar="POINT ...")] = ()
    """Also these points, as names or patterns: `*.attn_out`, `resid_mid`, `pattern0`."""
    by: Literal["branch", "head"] = "branch"
    """Erasure by branch or by head."""
    top: int = 5
    """How many pairs of writes to show."""


def main(argv: Sequence[str]) -> None:
    """Parse, capture, print."""
    command = parse(Stream, "inspect stream", argv)
    screen = Screen(command.json)
    if command.points and command.npz is None and not command.json:
        raise UserError("points: arrays are not for a terminal; add --npz FILE or --json")
    trace = open_trace(command, screen, command.points)
    tokenizer = trace.tokenizer
    assert tokenizer is not None
    from mainstem.stream.analysis.erasure import erasure
    from mainstem.stream.analysis.writes import levels, writes
    from mainstem.stream.points import select

    chosen = select(command.points, trace.model)
    written, terms = writes(trace), trace.decompose()
    rows: list[dict[str, Any]] = []
    for level, write in zip(levels(trace), [*written, None], strict=True):
        rows.append({"point": level.point, **level.means})
        if write is not None:
            rows[-1] |= {"write": write.label} | {f"write_{name}": value for name, value in write.means.items()}
    erased = erasure(trace, by=command.by).top(command.top)
    screen.say(ending(f"the stream, means over the {trace.ids.shape[1]} tokens of", command.prompt))
    names = ("point", "norm", "mean", "std", "write", "write_length", "write_ratio", "write_cosine")
    columns = ("point", "norm", "mean", "std", "write", "length", "ratio", "cosine")
    screen.table(columns, [[row.get(name) for name in names] for row in rows])
    screen.say(f"the writes sum to resid_final: closing error {terms.closing_error:.1e}")
    if erased:
        pairs = [(pair.later, pair.earlier, pair.taken, pair.share, pair.cosine) for pair in erased]
        screen.table(("later", "takes back", "length", "share", "cosine"), pairs)
    else:
        screen.say("no write takes back an earlier one beyond chance")
    result = {
        "tokens": in_json(tokenizer, trace.ids[0].tolist()),
        "levels": rows,
        "erasure": [pair._asdict() for pair in erased],
        "closing_error": terms.closing_error,
        "points": {point: trace[point][0].tolist() for point in chosen} if command.json else {},
    }
    finish(command, screen, result, lambda: {point: trace[point] for point in chosen or trace.values})
