"""`mainstem bench QUESTION`: speed as ratios within one run."""

from collections.abc import Sequence

from mainstem.cli.parts.subcommands import choose

SUBCOMMANDS = {  # each lives in the module of its name
    "train": "a training step, over its products alone and over transformers",
    "time-to-loss": "the seconds to a loss, beside those of nanoGPT's recipe",
    "data": "text to a token file, over the library tokenizers; batches",
    "decode": "a generated token, over memory's speed, transformers and llama.cpp",
    "inspect": "looking inside: capture, composition, attribution, patching, memory",
    "results": "all of these, and one page of their figures",
}


def main(argv: Sequence[str]) -> None:
    """Do the one that was typed."""
    choose("bench", "Measure speed as ratios within one run: ours, the plain forward, the peers.", SUBCOMMANDS, argv)
