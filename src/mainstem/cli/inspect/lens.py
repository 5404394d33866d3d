"""`mainstem inspect lens RUN "prompt"`: the prediction at every depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Captured, ending, finish, open_trace, piece, typed_token
from mainstem.cli.parts.screen import Screen
from mainstem.text.units import shown

LENS = "tuned-lens.safetensors"
"""Where `inspect tune` leaves a run's lens, in its folder."""


@dataclass(frozen=True, kw_only=True)
class Lens(Captured):
    """The logit lens: the stream at every depth, normalised and unembedded as if it were the last."""

    token: str | None = None
    """The token to follow; by default the model's most probable next token."""
    pos: int = -1
    """The position; -1 is the last."""
    norm: Literal["own", "frozen"] = "own"
    """Normalise each depth by its own scale (recomputed), or by the recorded scale of the final norm."""
    lens: Annotated[str, arg(metavar="logit|tuned|FILE")] = "logit"
    """The logit lens, the tuned lens that `inspect tune` left in the run's folder, or a tuned lens in a file."""
    top: int = 3
    """How many tokens to show at each depth."""


def main(argv: Sequence[str]) -> None:
    """Parse, look, print."""
    command = parse(Lens, "inspect lens", argv)
    screen = Screen(command.json)
    trace = open_trace(command, screen)
    tokenizer = trace.tokenizer
    assert tokenizer is not None
    from mainstem.stream.analysis.tuned import TunedLens

    tuned = None
    if command.lens != "logit":
        file = Path(command.run) / LENS if command.lens == "tuned" else Path(command.lens)
        tuned = TunedLens.load(file, trace.model, screen.note)
    token = None if command.token is None else typed_token(tokenizer, command.token)
    lens = trace.lens(token, norm=command.norm, top=command.top, tuned=tuned)
    rows = lens.to_dicts(pos=command.pos)
    followed, position = rows[-1]["token"]["id"], range(trace.ids.shape[1])[command.pos]
    read = tokenizer.decode(trace.ids[0, : position + 1].tolist())
    screen.say(ending(f"'{piece(tokenizer, followed)}' at every depth, after", read))
    best = [" ".join(f"{shown(t['text'])} {t['probability']:.2f}" for t in row["top"]) for row in rows]
    columns = ("depth", "rank", "prob", "KL to end", "entropy", "it would say")
    numbers = ("label", "rank", "probability", "kl", "entropy")
    screen.table(columns, [[*(row[name] for name in numbers), tokens] for row, tokens in zip(rows, best, strict=True)])
    won = int(lens.won[0, position])
    screen.say(f"first choice from {lens.labels[won]} on" if won < len(rows) else "never the first choice to the end")
    result = {"token": rows[-1]["token"], "pos": position, "won": lens.labels[won] if won < len(rows) else None}
    names = ("token", "top_ids", "top_probability", "entropy", "kl", "rank", "probability", "logit", "won")
    finish(
        command,
        screen,
        result | {"norm": command.norm, "tuned": tuned is not None, "rows": rows},
        lambda: {"points": lens.points} | {name: getattr(lens, name) for name in names},
    )
