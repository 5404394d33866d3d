"""`mainstem export gguf RUN --out FILE`: a file that llama.cpp runs."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mainstem import atomic
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.export import Export, facts_of, finish, open_run, writing
from mainstem.cli.parts.screen import Screen


@dataclass(frozen=True, kw_only=True)
class ExportGGUF(Export):
    """Write model and tokenizer as one GGUF file of architecture gpt2."""

    out: str
    """The file to write; an existing GGUF file is replaced."""
    weights: Literal["f32", "f16", "q8_0"] = "f32"
    """GGUF type that the matrices and the embedding are stored in."""


def main(argv: Sequence[str]) -> None:
    """Parse, open, write, print."""
    command = parse(ExportGGUF, "export gguf", argv)
    screen, out = Screen(command.json), atomic.replaceable(Path(command.out))
    from mainstem.formats import gguf

    gguf.replaceable(out)
    with writing(out) as check:
        folder, model, tokenizer = open_run(command.run, screen)
        check()
        facts = facts_of(folder, model, tokenizer, True)
        gguf.write(out, model, tokenizer, command.weights, {"name": facts.name, "description": facts.description})
    line = f'llama-completion -m {shlex.quote(str(Path(command.out)))} -p "your prompt" --temp 0 -no-cnv    # llama.cpp'
    nexts = [] if tokenizer is None else [line]
    finish(command, screen, gguf.left_out(tokenizer), nexts, weights=command.weights)
