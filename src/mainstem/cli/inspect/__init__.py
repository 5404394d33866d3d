"""`mainstem inspect QUESTION RUN "prompt"`: one forward pass, and what the stream was."""

from collections.abc import Sequence

from mainstem.cli.parts.subcommands import choose

SUBCOMMANDS = {  # each lives in the module of its name
    "stream": "the stream by depth, what each branch writes, what is erased",
    "token": "one token through one block, in numbers",
    "lens": "what the model would say at every depth",
    "tune": "train a tuned lens for a run",
    "attribution": "why it said that: rows that sum to the logit",
    "flow": "what attention moves from word to word",
    "ablate": "what becomes of the answer without each branch or head",
    "patch": "where two prompts differ: activations of one, put into the other",
}


def main(argv: Sequence[str]) -> None:
    """Do the one that was typed."""
    choose("inspect", "Open the residual stream of one forward pass.", SUBCOMMANDS, argv)
