"""Output that every import format shares: the model that was saved as a RUN, and the next command."""

import shlex
from typing import TYPE_CHECKING

from mainstem import counts
from mainstem.cli.parts.screen import Screen
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mainstem.model.gpt import GPT


def finish(screen: Screen, source: str, out: str, model: "GPT", tokenizer: Tokenizer | None) -> None:
    """Report the model's shape and tokenizer, and the next command."""
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
    """The command that generates with a saved model; none for one without a tokenizer."""
    return [] if tokenizer is None else [f'mainstem generate {shlex.quote(out)} "your prompt"']
