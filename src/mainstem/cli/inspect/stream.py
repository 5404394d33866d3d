"""`mainstem inspect stream RUN "prompt"`: the stream by depth, the writes, and what is erased."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mainstem.cli.opened import Prompt, finish, open_trace, tail
from mainstem.cli.parse import parse
from mainstem.cli.screen import Screen
from mainstem.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Stream(Prompt):
    """What the stream is at every depth, how much each branch writes to it, which later writes undo earlier ones."""

    points: tuple[str, ...] = ()
    """Also these points, as names or patterns: `*.attn_out`, `blocks.0.attn.pattern`, `blocks.3.hook_resid_pre`."""
    by: Literal["branch", "head"] = "branch"
    """Erasure by branch or by head."""
    top: int = 5
    """Pairs of writes that are shown."""


def main(argv: Sequence[str]) -> None:
    """Parse, capture, print."""
    command = parse(Stream, "inspect stream", argv)
    screen = Screen(command.json)
    trace = open_trace(command, screen)
    from mainstem.stream.points import select
    from mainstem.stream.reading import erasure, levels, writes

    chosen = select(command.points, trace.model.config)
    if chosen and command.npz is None and not command.json:
        raise UserError("points: arrays are not for a terminal; add --npz FILE or --json")
    written, terms = writes(trace), trace.decompose()
    rows: list[dict[str, Any]] = []
    for level, write in zip(levels(trace), [*written, None], strict=True):
        rows.append({"point": level.point, **level.means})
        if write is not None:
            rows[-1] |= {"write": write.label} | {f"write_{name}": value for name, value in write.means.items()}
    erased = erasure(trace, by=command.by).top(command.top)
    screen.say(f"the stream of {tail(command.prompt)!r}, means over {trace.ids.shape[1]} tokens")
    names = ("point", "norm", "mean", "std", "write", "write_length", "write_ratio", "write_cosine")
    columns = ("point", "norm", "mean", "std", "write", "length", "ratio", "cosine")
    screen.table(columns, [[row.get(name) for name in names] for row in rows])
    screen.say(f"the writes sum to resid_final: closing error {terms.closing_error:.1e}")
    screen.table(("later", "erases of", "share", "cosine"), erased)
    result = {
        "ids": trace.ids[0].tolist(),
        "levels": rows,
        "erasure": [pair._asdict() for pair in erased],
        "closing_error": terms.closing_error,
        "points": {point: trace[point][0].tolist() for point in chosen} if command.json else {},
    }
    finish(command, screen, result, lambda: {point: trace[point].numpy() for point in chosen or trace.values})
