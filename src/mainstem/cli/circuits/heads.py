"""`mainstem circuits heads RUN`: what each head copies by its weights, and what it attends to."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Opening, finish, open_model
from mainstem.cli.parts.screen import Screen


@dataclass(frozen=True, kw_only=True)
class Heads(Opening):
    """Whether each head copies, by its OV circuit, and what it attends to on repeated random tokens."""

    period: int | None = None
    """Tokens before the repetition; by default as many as fit the context, up to 64."""
    sequences: int = 32
    """How many repeated sequences."""
    seed: int = 1
    """Random seed of the tokens."""
    offset: int | None = None
    """With rotary positions, the distance from a key to its query; by default 1."""


def main(argv: Sequence[str]) -> None:
    """Parse, look, print."""
    command = parse(Heads, "circuits heads", argv)
    screen = Screen(command.json)
    model, _ = open_model(command, screen)
    from mainstem.circuits.heads import KINDS, head_scores
    from mainstem.circuits.spectra import spectra

    behaviour = head_scores(model, command.period, command.sequences, command.seed)
    weights = spectra(model, command.offset)
    by_kind = {kind: behaviour[kind].flatten() for kind in KINDS}
    by_head = zip(weights.to_dicts(), behaviour.to_dicts(), strict=True)
    rows = [of_weights | of_attention for of_weights, of_attention in by_head]
    screen.say(f"copying by the weights; attention on {behaviour.period} random tokens and the same again")
    titles = ("head", "copying", "OV s1", "QK s1", "induct", "dupl", "prev", "self", "first")
    cells = [[row.pop("label"), *(f"{v:.2f}" if v == v else "-" for v in row.values())] for row in map(dict, rows)]
    evenly = ["evenly", *"---", *(f"{behaviour.even[kind]:.2f}" for kind in KINDS)]  # to compare with
    screen.table(titles, [*cells, evenly])
    screen.say(f"loss {behaviour.first_loss:.3f} at first, {behaviour.second_loss:.3f} on the repetition, nats a token")
    for note in weights.notes:
        screen.note(note)
    result = {
        "period": behaviour.period,
        "offset": weights.offset,
        "first_loss": behaviour.first_loss,
        "second_loss": behaviour.second_loss,
        "even": behaviour.even,
        "heads": rows,
        "notes": weights.notes,
    }
    arrays = {
        "labels": weights.labels,
        "ov_singular_values": weights.ov_singular_values,
        "qk_singular_values": weights.qk_singular_values,
        "ov_eigenvalues": weights.ov_eigenvalues,
        "copying": weights.copying,
        **by_kind,
    }
    finish(command, screen, result, lambda: arrays)
