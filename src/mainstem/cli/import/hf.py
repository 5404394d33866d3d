"""`mainstem import hf DIR --out RUN`: a folder in Hugging Face's GPT-2 layout, as a RUN of ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstem import atomic
from mainstem.cli.parts.arguments import Positional, parse
from mainstem.cli.parts.run_summary import finish
from mainstem.cli.parts.screen import Screen
from mainstem.errors import UserError


@dataclass(frozen=True)
class HF:
    """Save the model and tokenizer of a Hugging Face folder as a RUN. Every verb also opens such a folder directly."""

    folder: Positional[str]
    """A folder with config.json, safetensors and tokenizer files."""
    out: str
    """The folder to write; it must not exist yet."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, read, save, print."""
    command = parse(HF, "import hf", argv)
    screen, out = Screen(command.json), atomic.unused(Path(command.out))
    atomic.remove_leftovers(out.parent)
    from mainstem.formats import card
    from mainstem.formats.load import load
    from mainstem.formats.run import is_foreign, is_run, resolve
    from mainstem.runs import checkpoint

    if not is_foreign(command.folder):
        what = "a RUN already" if is_run(command.folder) else "no model; it needs config.json and safetensors"
        raise UserError(f"{command.folder}: {what}")
    source = resolve(command.folder)
    model, tokenizer = load(source, screen.note)
    facts = card.gather(source, model.config, tokenizer)
    opening = ["import mainstem as ms", "", f'model, tokenizer = ms.load("{out.name}")']
    checkpoint.save(out, model, tokenizer, card=card.markdown(facts, "mainstem", opening))
    finish(screen, command.folder, command.out, model, tokenizer)
