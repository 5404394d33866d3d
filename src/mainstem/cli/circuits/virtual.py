"""`mainstem circuits virtual RUN WRITER READER`: virtual weights between two parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from mainstem.cli.parts.arguments import Positional, parse
from mainstem.cli.parts.inspection import Opening, finish, in_json, open_model, piece
from mainstem.cli.parts.screen import Screen
from mainstem.columns import clip
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mainstem.circuits.virtual import End

COLUMNS = 28
"""Of the units at one end of a direction."""


@dataclass(frozen=True, kw_only=True)
class Virtual(Opening):
    """Virtual weights between a writer and a later reader, from the weights alone.

    Singular directions where one of them is a head; entries between embeddings, neurons and the unembedding.
    """

    writer: Annotated[Positional[str], arg(metavar="WRITER")]
    """embed, pos_embed, L0H3, 0_mlp_out."""
    reader: Annotated[Positional[str], arg(metavar="READER")]
    """L1H2.Q, L1H2.K, L1H2.V, 1_mlp_in (1_mlp.gate, 1_mlp.up), unembed."""
    offset: int | None = None
    """With rotary positions, the distance from a key to its query; by default 1."""
    top: int = 12
    """How many entries to show; of singular directions a quarter as many, both signs of each."""


def main(argv: Sequence[str]) -> None:
    """Parse, multiply, print."""
    command = parse(Virtual, "circuits virtual", argv)
    screen = Screen(command.json)
    model, tokenizer = open_model(command, screen)
    from mainstem.circuits.virtual import virtual

    product = virtual(model, command.writer, command.reader, command.offset)
    writes, reads, singular = product.writer, product.reader, product.matrix.singular_values()
    screen.say(
        f"{writes.label} -> {reads.label}: score {product.score:.4f}, by chance {product.chance:.4f}\n"
        f"largest singular values {', '.join(f'{value:.3g}' for value in singular[:5].tolist())}"
    )
    result: dict[str, Any] = {
        "writer": writes.label,
        "reader": reads.label,
        "offset": product.offset,
        "score": product.score,
        "chance": product.chance,
        "singular_values": singular.tolist(),
    }
    if writes.is_head or reads.is_head:
        directions = product.directions(-(-command.top // 4))
        screen.table(
            ("direction", "value", _title(writes), _title(reads)),
            [
                (f"{index // 2 + 1}{'+' if side > 0 else '-'}", f"{value:.3g}", *(
                    clip(" ".join(_shown(unit, end, tokenizer) for unit in units) or "-", COLUMNS)
                    for units, end in ((left, writes), (right, reads))
                ))
                for index, (value, side, left, right) in enumerate(directions)
            ],
        )  # fmt: skip
        result["directions"] = [
            {"value": value, "side": side, "writes": _named(left, writes, tokenizer),
             "reads": _named(right, reads, tokenizer)}
            for value, side, left, right in directions
        ]  # fmt: skip
    else:
        entries = product.top(command.top)
        screen.table(
            ("writes", "reads", "weight"),
            [(_shown(i, writes, tokenizer), _shown(j, reads, tokenizer), f"{value:+.3f}") for value, i, j in entries],
        )
        result["entries"] = [
            {"value": value, "writes": _named([i], writes, tokenizer)[0], "reads": _named([j], reads, tokenizer)[0]}
            for value, i, j in entries
        ]
    for note in product.notes:
        screen.note(note)
    arrays = {"left": product.matrix.left, "right": product.matrix.right, "singular_values": singular}
    finish(command, screen, result | {"notes": product.notes}, lambda: arrays)


def _title(end: "End") -> str:
    """What the units of an end are."""
    if not end.is_head:
        return end.label
    head, _, role = end.label.partition(".")
    return {"": f"{head} reads", "Q": f"keys of {head}", "K": f"queries of {head}", "V": f"{head} raises"}[role]


def _shown(unit: int, end: "End", tokenizer: Tokenizer) -> str:
    """A unit for a person: a token as its text."""
    return piece(tokenizer, unit) if end.units == "token" else str(unit)


def _named(units: list[int], end: "End", tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Units for a program: `id` and `text`, `position`, or `neuron`."""
    if end.units != "token":
        return [{end.units: unit} for unit in units]
    return [in_json(tokenizer, [unit])[0] for unit in units]  # one by one: they are no text
