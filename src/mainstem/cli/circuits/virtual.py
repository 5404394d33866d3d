"""`mainstem circuits virtual RUN WRITER READER`: the weights between two parts, as if they were wired."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli.opened import Opening, finish, open_model, piece
from mainstem.cli.parse import Positional, parse
from mainstem.cli.screen import Screen
from mainstem.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Virtual(Opening):
    """What a later part reads of what an earlier one writes, by the weights alone."""

    writer: Positional[str]
    """embed, pos_embed, L0H3, 0_mlp_out."""
    reader: Positional[str]
    """L1H2.Q, L1H2.K, L1H2.V, 1_mlp_in (1_mlp.gate, 1_mlp.up), unembed."""
    top: int = 12
    """Entries that are shown."""


def main(argv: Sequence[str]) -> None:
    """Parse, multiply, print."""
    command = parse(Virtual, "circuits virtual", argv)
    screen = Screen(command.json)
    model, tokenizer = open_model(command, screen)
    from mainstem.circuits.virtual import virtual

    found = virtual(model, command.writer, command.reader)
    singular = found.matrix.singular_values()
    screen.say(
        f"{found.writer} -> {found.reader}: score {found.score:.4f}, by chance {found.chance:.4f}\n"
        f"largest singular values {', '.join(f'{value:.3g}' for value in singular[:5].tolist())}"
    )
    entries = [
        (value, _unit(writes, found.writer, tokenizer), _unit(reads, found.reader, tokenizer))
        for value, writes, reads in found.top(command.top)
    ]
    screen.table(("writes", "reads", "weight"), [(writes, reads, f"{value:+.3f}") for value, writes, reads in entries])
    for note in found.notes:
        screen.note(note)
    result = {
        "writer": found.writer,
        "reader": found.reader,
        "score": found.score,
        "chance": found.chance,
        "singular_values": singular.tolist(),
        "entries": [{"weight": value, "writes": writes, "reads": reads} for value, writes, reads in entries],
        "notes": found.notes,
    }
    factors = {"left": found.matrix.left, "right": found.matrix.right, "singular_values": singular}
    finish(command, screen, result, lambda: {name: value.detach().numpy() for name, value in factors.items()})


def _unit(index: int, of: str, tokenizer: Tokenizer) -> str:
    """A unit by what it stands for: a token where the part is a table of them."""
    return piece(tokenizer, index) if of in ("embed", "unembed") and index < tokenizer.vocab_size else str(index)
