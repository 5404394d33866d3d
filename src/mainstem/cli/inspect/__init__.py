"""`mainstem inspect QUESTION RUN "prompt"`: questions about one forward pass."""

from collections.abc import Sequence

from mainstem.cli.parts.subcommands import choose

SUBCOMMANDS = {  # each lives in the module of its name
    "stream": "the stream by depth, what each branch writes, what is erased",
    "token": "one token through one block, in numbers",
    "lens": "the prediction at every depth, by the logit lens or a tuned lens",
    "tune": "train a tuned lens for a run",
    "attribution": "direct logit attribution: rows that sum to the logit",
    "flow": "attention flow from word to word, and its rollout",
    "ablate": "the answer without each branch, head or neuron",
    "patch": "activation, attribution and path patching between two prompts",
}


def main(argv: Sequence[str]) -> None:
    """Do the one that was typed."""
    choose("inspect", "Open the residual stream of one forward pass.", SUBCOMMANDS, argv)
