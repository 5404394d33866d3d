"""What is said of a model that was saved as a RUN; the same for every format."""

import shlex
from typing import TYPE_CHECKING

from mainstem import counts
from mainstem.cli.parts.screen import Screen
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mainstem.model.gpt import GPT


def finish(screen: Screen, source: str, out: str, model: "GPT", tokenizer: Tokenizer | None) -> None:
    """Say what was opened, and what to type next."""
    config, total = model.config, counts.parameters(model.config).total
    screen.say(f"{source}: {total:,} parameters, {config.vocab_size:,} tokens, {config.n_ctx:,} positions")
    screen.say(
        f"{config.n_layer} blocks, {config.d_model} wide, {config.n_head} heads of {config.d_head}, {config.activation}"
    )
    screen.say(f"run folder  {out}")
    if tokenizer is None:
        screen.note(f"{out} has no tokenizer, so it takes ids alone; to generate, put its tokenizer.json inside")
    for line in generating(out, tokenizer):
        screen.say(f"next        {line}")
    facts = {"parameters": total, "tokenizer": tokenizer.kind if tokenizer is not None else None}
    screen.result({"out": out, "config": config.to_dict(), **facts})


def generating(out: str, tokenizer: Tokenizer | None) -> list[str]:
    """The line that lets a saved model speak; none for one that takes ids alone."""
    return [] if tokenizer is None else [f'mainstem generate {shlex.quote(out)} "your prompt"']
