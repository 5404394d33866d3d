"""`mainstem circuits QUESTION RUN`: circuits from the weights; `heads` and `contexts` run the model."""

from collections.abc import Sequence

from mainstem.cli.parts.subcommands import choose

SUBCOMMANDS = {  # each lives in the module of its name
    "composition": "which earlier heads each head reads, through Q, K and V",
    "overlap": "which heads share a subspace of the stream, against random ones",
    "virtual": "the weights between any writer and any later reader",
    "ngrams": "bigrams and skip-trigrams that the weights hold",
    "heads": "what each head copies, and attends to on repeated random tokens",
    "contexts": "where in the held-out text one head or neuron is most active",
}


def main(argv: Sequence[str]) -> None:
    """Do the one that was typed."""
    about = "Read a model's circuits from its weights; heads and contexts run it on text."
    choose("circuits", about, SUBCOMMANDS, argv)
