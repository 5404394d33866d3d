"""`mainstem circuits QUESTION RUN`: what the weights say; `heads` and `contexts` watch what they do."""

from collections.abc import Sequence

from mainstem.cli.parts.subcommands import choose

SUBCOMMANDS = {  # each lives in the module of its name
    "composition": "which earlier head each head reads through its queries, keys and values",
    "overlap": "which heads share a subspace of the stream, against chance",
    "virtual": "the weights between any writer and any later reader",
    "ngrams": "bigrams and skip-trigrams that the weights hold",
    "heads": "what each head copies, and what it attends to on text of its own making",
    "contexts": "where in the held-out text one head or neuron does most",
}


def main(argv: Sequence[str]) -> None:
    """Do the one that was typed."""
    about = "Read a model's circuits from its weights; heads and contexts run it on text."
    choose("circuits", about, SUBCOMMANDS, argv)
