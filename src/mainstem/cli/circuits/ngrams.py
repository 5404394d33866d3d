"""`mainstem circuits ngrams RUN`: bigrams and skip-trigrams that the weights hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Opening, alone, finish, in_json, open_model, piece, typed_token
from mainstem.cli.parts.screen import Screen
from mainstem.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Ngrams(Opening):
    """Bigrams of the direct path, and skip-trigrams of one block's heads."""

    token: str | None = None
    """Only the bigrams of this token."""
    layer: int | None = None
    """The block whose heads are read; by default the first."""
    offset: int | None = None
    """With rotary positions, the distance from the source to the destination; by default 1."""
    top: int = 10
    """How many rows of each table to show."""


def main(argv: Sequence[str]) -> None:
    """Parse, read, print."""
    command = parse(Ngrams, "circuits ngrams", argv)
    screen = Screen(command.json)
    if command.token is not None:
        alone(command, "--token", "layer", "offset")  # the direct path has neither
    model, tokenizer = open_model(command, screen)
    from mainstem.circuits.bigrams import bigrams
    from mainstem.circuits.skip_trigrams import skip_trigrams

    table, notes = None, list[str]()
    try:
        table = bigrams(model)
    except ConfigError as reason:
        if command.token is not None or len(model.blocks) == 0:
            raise
        notes.append(f"no bigrams: {reason}")

    def named(token: int) -> dict[str, Any]:
        return in_json(tokenizer, [token])[0]

    layer, skips = command.layer or 0, None
    if command.token is None and len(model.blocks):
        skips = skip_trigrams(model, layer, command.top, offset=command.offset)
    result: dict[str, Any] = {"offset": None, "bigrams": [], "skip_trigrams": []}
    arrays: dict[str, Any] = {}
    if table is not None:
        token = None if command.token is None else typed_token(tokenizer, command.token)
        pairs = table.top(command.top, token)
        notes += table.notes
        screen.say("direct path: the strongest bigrams, logits above the mean of their row")
        screen.table(
            ("token", "next", "logit"), [(piece(tokenizer, t), piece(tokenizer, o), f"{v:+.2f}") for t, o, v in pairs]
        )
        result["bigrams"] = [{"token": named(t), "out": named(o), "logit": v} for t, o, v in pairs]
        arrays |= {"bigrams": [pair[:2] for pair in pairs], "logits": [pair.logit for pair in pairs]}
    if skips is not None:
        notes += skips.notes
        screen.say(f"block {layer}: source ... destination -> next, and how much more probable it becomes")
        screen.table(
            ("source", "destination", "next", "head", "before", "after"),
            [
                (*(piece(tokenizer, token) for token in entry[:3]), entry.head,
                 f"{entry.before:.3f}", f"{entry.after:.3f}")
                for entry in skips.trigrams
            ],
        )  # fmt: skip
        tokens = ("source", "destination", "out")
        result["offset"] = skips.offset
        result["skip_trigrams"] = [
            entry._asdict() | {name: named(getattr(entry, name)) for name in tokens} | {"gain": entry.gain}
            for entry in skips.trigrams
        ]
        names = (*tokens, "head", "qk", "ov", "before", "after")
        arrays |= {name: [getattr(entry, name) for entry in skips.trigrams] for name in names}
    for note in notes:
        screen.note(note)
    finish(command, screen, result | {"notes": notes}, lambda: arrays)
