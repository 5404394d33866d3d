"""`mainstem export hf RUN --out DIR`: a folder that `transformers` opens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstem import atomic
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.export import Export, facts_of, finish, open_run, writing
from mainstem.cli.parts.run_summary import generating
from mainstem.cli.parts.screen import Screen
from mainstem.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ExportHF(Export):
    """Write model, tokenizer and model card in Hugging Face's GPT-2 layout, in float32."""

    max_shard_mb: int = 5000
    """The largest file of weights, in MB; larger models are written in shards."""

    def __post_init__(self) -> None:
        if self.max_shard_mb < 1:
            raise UserError(f"--max-shard-mb {self.max_shard_mb} is not possible; give at least 1")


def main(argv: Sequence[str]) -> None:
    """Parse, open, write, print."""
    command = parse(ExportHF, "export hf", argv)
    screen, out = Screen(command.json), atomic.unused(Path(command.out))
    with writing(out) as check:
        source, model, tokenizer = open_run(command.run, screen)
        from mainstem.formats import card
        from mainstem.formats.hf import config, folder

        check()
        notes = config.left_out(model.config)
        opening = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            f'model = AutoModelForCausalLM.from_pretrained("{out.name}")',
            *([] if tokenizer is None else [f'tokenizer = AutoTokenizer.from_pretrained("{out.name}")']),
        ]  # fmt: skip
        text = card.markdown(facts_of(source, model, tokenizer, True), "transformers", opening, notes)
        folder.write(out, model, tokenizer, text, command.max_shard_mb * 10**6)
    nexts = [f'AutoModelForCausalLM.from_pretrained("{command.out}")    # transformers']
    finish(command, screen, notes, [*nexts, *generating(command.out, tokenizer)])
