"""`mainstem circuits heads RUN`: what each head does; and where in a text one head or neuron does most."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainstem.cli.opened import Opening, data_of, finish, open_model, piece
from mainstem.cli.parse import parse
from mainstem.cli.screen import Screen
from mainstem.cli.signals import stoppable
from mainstem.errors import UserError
from mainstem.text import units
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from mainstem.circuits.contexts import Context
    from mainstem.model.gpt import GPT

UNIT = re.compile(r"L(\d+)([HN])(\d+)")


@dataclass(frozen=True, kw_only=True)
class Heads(Opening):
    """Whether each head copies, by its OV circuit, and what it attends to on repeated random tokens."""

    period: int | None = None
    """Tokens before they repeat; without it as many as the context holds, up to 64."""
    sequences: int = 32
    """Repeated sequences."""
    seed: int = 0
    """Of the random tokens."""
    offset: int | None = None
    """With rotary positions: how far before its query a key stands; 1 without it."""
    contexts: str | None = None
    """Instead: where in a text this head or neuron does most, `L1H3` or `L0N17`."""
    data: str | None = None
    """A prepared folder, for --contexts; without it, the run's own text."""
    windows: int = 64
    """Windows of it that are read."""
    top: int = 10
    """Contexts that are shown."""


def main(argv: Sequence[str]) -> None:
    """Parse, look, print."""
    command = parse(Heads, "circuits heads", argv)
    screen = Screen(command.json)
    if command.contexts is not None and not UNIT.fullmatch(command.contexts):
        raise UserError(f"contexts: {command.contexts!r} is neither a head, L1H3, nor a neuron, L0N17")
    model, tokenizer = open_model(command, screen)
    if command.contexts is not None:
        _contexts(command, model, tokenizer, screen)
        return
    from mainstem.circuits.heads import KINDS, scores
    from mainstem.circuits.spectra import spectra

    behaviour = scores(model, command.period, command.sequences, command.seed)
    weights = spectra(model, command.offset)
    by_kind = {kind: behaviour[kind].flatten() for kind in KINDS}
    names = ("copying", "ov_singular_value", "qk_singular_value", *KINDS)
    columns = [
        weights.copying, weights.ov_singular_values[:, 0], weights.qk_singular_values[:, 0], *by_kind.values()
    ]  # fmt: skip
    rows = [dict(zip(names, values, strict=True)) for values in zip(*(c.tolist() for c in columns), strict=True)]
    screen.say(f"copying by the weights; attention on {behaviour.period} random tokens and the same again")
    titles = ("head", "copying", "OV", "QK", "induct", "dupl", "prev", "self", "first")
    cells = [[f"{value:.2f}" if value == value else "-" for value in row.values()] for row in rows]
    evenly = ["evenly", *"---", *(f"{behaviour.even[kind]:.2f}" for kind in KINDS)]  # to compare with
    screen.table(titles, [*([label, *row] for label, row in zip(weights.labels, cells, strict=True)), evenly])
    screen.say(f"loss {behaviour.first_loss:.3f} at first, {behaviour.second_loss:.3f} on the repetition, nats a token")
    for reason in dict.fromkeys(weights.reasons.values()):
        screen.note(reason)
    result = {
        "period": behaviour.period,
        "first_loss": behaviour.first_loss,
        "second_loss": behaviour.second_loss,
        "even": behaviour.even,
        "heads": [{"label": label, **row} for label, row in zip(weights.labels, rows, strict=True)],
    }
    arrays = {
        "ov_singular_values": weights.ov_singular_values,
        "qk_singular_values": weights.qk_singular_values,
        "ov_eigenvalues": weights.ov_eigenvalues,
        "copying": weights.copying,
        **by_kind,
    }
    finish(command, screen, result, lambda: {name: array.cpu().numpy() for name, array in arrays.items()})


def _contexts(command: Heads, model: "GPT", tokenizer: Tokenizer, screen: Screen) -> None:
    """Where one head writes most, or one neuron is strongest."""
    from mainstem.circuits.contexts import head_contexts, neuron_contexts

    match = UNIT.fullmatch(command.contexts or "")
    assert match is not None
    strongest = head_contexts if match[2] == "H" else neuron_contexts
    with stoppable() as check:
        windows = _windows(command, model, tokenizer, check)
        found = strongest(model, windows, int(match[1]), int(match[3]), command.top)
    what = "length of its write" if match[2] == "H" else "activation"
    screen.say(f"{command.contexts}: its strongest contexts in {command.windows} windows, by {what}")
    for context in found:
        read = context.source
        source = "" if read is None else f"  reads {piece(tokenizer, read.token)} ({read.attention:.2f})"
        screen.say(f"  {context.value:8.3f}  {_marked(context, tokenizer)}{source}")
    rows = [
        {
            "value": context.value,
            "window": context.window,
            "position": context.position,
            "ids": context.ids,
            "text": tokenizer.decode(context.ids),
            "source": None if context.source is None else vars(context.source),
        }
        for context in found
    ]
    arrays = {name: [row[name] for row in rows] for name in ("value", "window", "position")}
    finish(command, screen, {"unit": command.contexts, "contexts": rows}, lambda: arrays)


def _windows(
    command: Heads, model: "GPT", tokenizer: Tokenizer, check: Callable[[], None]
) -> Iterator["Tensor"]:
    """Held-out windows, one at a time."""
    import itertools
    from pathlib import Path

    import torch

    from mainstem.text import tokens

    data = tokens.load(Path(command.data) if command.data else data_of(command.run))
    if data.tokenizer.hash != tokenizer.hash:
        raise UserError(f"{data.path}: its tokenizer is not the run's; prepare it with --tokenizer {command.run}")
    n_ctx = min(model.config.n_ctx, len(data.val) - 1)
    every = tokens.evaluation_windows(data.val, n_ctx, 1, vocab_size=model.config.vocab_size)
    for x, _ in itertools.islice(every, command.windows):
        check()
        yield torch.from_numpy(x).to(model.wte.weight.device)


def _marked(context: "Context", tokenizer: Tokenizer) -> str:
    """The tokens around a place, with the place in brackets, in at most 48 columns around it."""
    shown = [units.shown(text) for text in units.pieces(tokenizer, context.ids)]
    at = context.position - context.start
    before, after = "".join(shown[:at]), "".join(shown[at + 1 :])
    while units.width(before) > 24:
        before = before[1:]
    return f"{before}[{shown[at]}]{units.clip(after, 20)}".replace("␣", " ")
