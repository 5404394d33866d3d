"""`mainstem circuits ngrams RUN`: bigrams and skip-trigrams that the weights hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli.opened import Opening, finish, open_model, piece, typed_token
from mainstem.cli.parse import parse
from mainstem.cli.screen import Screen


@dataclass(frozen=True, kw_only=True)
class Ngrams(Opening):
    """What the direct path says after each token, and what the heads of one block add when they read another."""

    token: str | None = None
    """Only what the direct path says after this token."""
    layer: int = 0
    """The block whose heads are read."""
    offset: int | None = None
    """With rotary positions: how far before the destination the source stands; 1 without it."""
    top: int = 10
    """Rows of each table."""


def main(argv: Sequence[str]) -> None:
    """Parse, read, print."""
    command = parse(Ngrams, "circuits ngrams", argv)
    screen = Screen(command.json)
    model, tokenizer = open_model(command, screen)
    from mainstem.circuits.ngrams import bigrams, skip_trigrams

    table = bigrams(model)
    if command.token is not None:
        token = typed_token(tokenizer, command.token)
        row = table.row(token)
        row = row - row.mean()
        best = row.topk(min(command.top, len(row)))
        pairs = [(token, out, logit) for out, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    else:
        pairs = [(entry.token, entry.out, entry.logit) for entry in table.top(command.top)]
    notes, rows = list(table.notes), []
    screen.say("direct path: the strongest bigrams, logits above the mean of their row")
    screen.table(
        ("token", "next", "logit"), [(piece(tokenizer, t), piece(tokenizer, o), f"{v:+.2f}") for t, o, v in pairs]
    )
    if command.token is None and len(model.blocks):
        found = skip_trigrams(model, command.layer, command.top, offset=command.offset)
        notes += found.notes
        rows = [{**entry._asdict(), "gain": entry.gain} for entry in found.rows]
        screen.say(f"block {command.layer}: source ... destination -> next, and how much more probable it becomes")
        screen.table(
            ("source", "destination", "next", "head", "before", "after"),
            [
                (piece(tokenizer, e.source), piece(tokenizer, e.destination), piece(tokenizer, e.out), e.head,
                 f"{e.before:.3f}", f"{e.after:.3f}")
                for e in found.rows
            ],
        )  # fmt: skip
    for note in dict.fromkeys(notes):
        screen.note(note)
    text = ("source", "destination", "out")
    result = {
        "bigrams": [
            {"token": t, "out": o, "logit": v, "text": [piece(tokenizer, t), piece(tokenizer, o)]} for t, o, v in pairs
        ],
        "skip_trigrams": [{**row, "text": [piece(tokenizer, row[name]) for name in text]} for row in rows],
        "notes": notes,
    }
    arrays = {"bigrams": [pair[:2] for pair in pairs], "logits": [pair[2] for pair in pairs]}
    names = (*text, "qk", "ov", "before", "after")
    finish(command, screen, result, lambda: arrays | {name: [row[name] for row in rows] for name in names})
