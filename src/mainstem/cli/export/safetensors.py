"""`mainstem export safetensors RUN --out DIR`: the weights alone, in our own layout, which holds every model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mainstem import atomic
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.export import Export, facts_of, finish, open_run, writing
from mainstem.cli.parts.run_summary import generating
from mainstem.cli.parts.screen import Screen
from mainstem.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ExportSafetensors(Export):
    """Write a checkpoint folder without optimizer state: model, tokenizer, model card."""

    weights: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """Precision that the matrices are stored in; auto: as the RUN stores them."""


def main(argv: Sequence[str]) -> None:
    """Parse, open, write, print."""
    command = parse(ExportSafetensors, "export safetensors", argv)
    screen, out = Screen(command.json), atomic.unused(Path(command.out))
    with writing(out) as check:
        folder, model, tokenizer = open_run(command.run, screen)
        from mainstem.formats import card
        from mainstem.model.quantized import quantize, tensors, weights_of
        from mainstem.runs import checkpoint

        facts = facts_of(folder, model, tokenizer, False)
        before = sum(tensor.nbytes for tensor in tensors(model).values())
        if command.weights not in ("auto", have := weights_of(model)):
            if have != "fp32":
                raise UserError(f"--weights {command.weights}: the weights of {command.run} are {have}; leave it out")
            model = quantize(model, command.weights)
        after = sum(tensor.nbytes for tensor in tensors(model).values())
        stored = weights_of(model)
        check()
        opening = ["import mainstem as ms", "", f'model, tokenizer = ms.load("{out.name}")']
        notes = [] if stored == "fp32" else [f"the matrices are stored as {stored}, for reading and generating"]
        checkpoint.save(out, model, tokenizer, card=card.markdown(facts, "mainstem", opening, notes))
    screen.say(f"weights: {before:,} bytes as they were, {after:,} as {stored}")
    sizes = {"before": before, "after": after}
    finish(command, screen, notes, generating(command.out, tokenizer), weights=stored, weights_bytes=sizes)
