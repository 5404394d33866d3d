"""`mainstem inspect ablate RUN "prompt"`: what becomes of the answer without each branch or head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import (
    Prompt,
    alone,
    ending,
    finish,
    first_choice,
    in_json,
    open_model,
    piece,
    read_prompt,
    typed_token,
)
from mainstem.cli.parts.screen import Screen, bar_text
from mainstem.cli.parts.signals import stoppable


@dataclass(frozen=True, kw_only=True)
class Ablate(Prompt):
    """Ablate each unit alone: the change of the answer's log-probability, or of its logit lead over a foil."""

    token: str | None = None
    """The answer; by default the model's most probable next token."""
    foil: str | None = None
    """Measure the difference of the answer's logit to this token's."""
    by: Literal["branch", "head", "neuron"] = "head"
    """What is ablated."""
    layers: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Blocks whose units are ablated; by default all. Required with --by neuron."""
    how: Literal["zero", "mean", "resample"] = "mean"
    """Replace it by zeros, by its mean over the reference, or by its value in the reference."""
    reference: str | None = None
    """The text of mean and resample ablation; by default the prompt."""
    top: int = 12
    """How many units to show."""


def main(argv: Sequence[str]) -> None:
    """Parse, ablate, print."""
    command = parse(Ablate, "inspect ablate", argv)
    screen = Screen(command.json)
    if command.how == "zero":
        alone(command, "--how zero", "reference")
    model, tokenizer = open_model(command, screen)
    ids = read_prompt(command.prompt, model, tokenizer, screen)
    reference = None if command.reference is None else read_prompt(command.reference, model, tokenizer, screen)
    import torch

    from mainstem.stream.change.ablate import ablation
    from mainstem.stream.metrics import LogitDifference, TokenLogProb

    rows, device = torch.tensor([ids]), model.wte.weight.device
    token = first_choice(model, ids) if command.token is None else typed_token(tokenizer, command.token)
    foil = None if command.foil is None else typed_token(tokenizer, command.foil)
    metric = TokenLogProb(token) if foil is None else LogitDifference(token, foil)
    with stoppable() as check, screen.bar("ablating", 1) as bar:
        effects = ablation(
            model,
            rows.to(device),
            metric,
            command.by,
            command.how,
            None if reference is None else torch.tensor([reference], device=device),
            layers=list(command.layers) or None,
            should_stop=check,
            progress=lambda done, total: bar.at(done, total=total),
        )
    asked = f"'{piece(tokenizer, token)}'"
    measured = f"log-probability of {asked}" if foil is None else f"{asked} over '{piece(tokenizer, foil)}'"
    screen.say(ending(f"{measured} is {effects.baseline.item():.3f} after", command.prompt))
    shown = effects.top(command.top)
    largest = max(abs(value) for _, value in shown)
    screen.table(
        ("without", "change", ""), [(label, f"{value:+.3f}", bar_text(value, largest)) for label, value in shown]
    )
    if effects.note:
        screen.note(effects.note)
    result = {
        "token": in_json(tokenizer, [token])[0],
        "foil": None if foil is None else in_json(tokenizer, [foil])[0],
        "metric": "log_probability" if foil is None else "logit_difference",
        "how": command.how,
        "baseline": effects.baseline.item(),
        "rows": effects.to_dicts(),
        "note": effects.note,
    }
    finish(command, screen, result, lambda: {"labels": effects.labels, "effects": effects.mean})
