"""`mainstem export gguf RUN --out FILE`: a file that llama.cpp runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mainstem import durable
from mainstem.cli.exported import Export, finish, open_run
from mainstem.cli.parse import parse
from mainstem.cli.screen import Screen


@dataclass(frozen=True, kw_only=True)
class ExportGGUF(Export):
    """Write model and tokenizer as one GGUF file of architecture gpt2."""

    out: str
    """The file to write; one that is there is replaced."""
    dtype: Literal["f32", "f16", "q8_0"] = "f32"
    """Of the matrices and the embedding."""


def main(argv: Sequence[str]) -> None:
    """Parse, open, write, print."""
    command = parse(ExportGGUF, "export gguf", argv)
    screen, out = Screen(command.json), durable.replaceable(Path(command.out))
    model, tokenizer, facts = open_run(command.run, screen)
    from mainstem.formats import gguf

    known = {"name": facts.name, "description": facts.description, "license": facts.licence}
    gguf.write(out, model, tokenizer, command.dtype, {name: value for name, value in known.items() if value})
    line = f'llama-completion -m {command.out} -p "your prompt" --temp 0 -no-cnv'
    finish(command, screen, gguf.left_out(tokenizer), [f"{line}    # llama.cpp"], dtype=command.dtype)
