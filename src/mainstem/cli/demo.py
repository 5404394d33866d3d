"""`mainstem demo`: the whole trip on the bundled Shakespeare."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli import train
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.runs.folder import RunFolder

PRESET, PROMPT = "andrea-nano", "ROMEO:"


@dataclass(frozen=True)
class Demo:
    """Train a small GPT on Shakespeare's plays, evaluate it on the held-out tenth, and generate a sample."""

    out: str = "runs/demo"
    """The run folder; the same line again resumes it, or shows what it holds."""
    json: bool = False
    """One object on stdout: run, train_seconds, val_bits_per_byte, sample, ..."""


def main(argv: Sequence[str]) -> None:
    """Parse, train, evaluate, generate, print."""
    command = parse(Demo, "demo", argv)
    screen = Screen(command.json)
    with stoppable() as check:
        result = train.run(*train.resumable([command.out, "--preset", PRESET]), screen, check)
    from mainstem.formats.load import load
    from mainstem.generation.decoding import generate
    from mainstem.text import tokens
    from mainstem.training.evaluate import bigram_bits_per_byte

    bigram = bigram_bits_per_byte(tokens.load(RunFolder(command.out).data))
    screen.say(f"held-out {result['val_bits_per_byte']:.4f} bits per byte (a table of bigrams {bigram:.2f})")
    model, tokenizer = load(command.out)
    assert tokenizer is not None
    sample = PROMPT + generate(model, tokenizer, PROMPT, max_new_tokens=120, seed=1)
    screen.say(f"\n{sample}\n")
    screen.say(f"run folder  {command.out}")
    screen.say(f'next        mainstem generate {command.out} "JULIET:"')
    screen.say(f'            mainstem inspect attribution {command.out} "O Romeo, Romeo! wherefore art"')
    screen.result({**result, "bigram_bits_per_byte": bigram, "sample": sample})
