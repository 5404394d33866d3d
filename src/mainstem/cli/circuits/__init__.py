"""`mainstem circuits QUESTION RUN`: what the weights alone say."""

from collections.abc import Sequence

from mainstem.cli.subverbs import choose

QUESTIONS = {  # each lives in the module of its name
    "composition": "which earlier head each head reads through its queries, keys and values",
    "overlap": "which heads share a subspace of the stream, against chance",
    "heads": "what each head does: copies, looks back, finds repetitions",
    "virtual": "the weights between any writer and any later reader",
    "ngrams": "bigrams and skip-trigrams that the weights hold",
}


def main(argv: Sequence[str]) -> None:
    """Do the one that was typed."""
    choose("circuits", "Read the circuits of a model from its weights.", QUESTIONS, argv)
