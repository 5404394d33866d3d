"""`mainstem import FORMAT`: another program's model, as a RUN of ours."""

from collections.abc import Sequence

from mainstem.cli.parts.subcommands import choose

SUBCOMMANDS = {  # each lives in the module of its name
    "nanogpt": "a .pt of nanoGPT or minGPT, which is a pickle",
    "hf": "a folder in Hugging Face's GPT-2 layout",
}


def main(argv: Sequence[str]) -> None:
    """Do the one that was typed."""
    choose("import", "Save another program's model as a RUN of ours.", SUBCOMMANDS, argv, "format")
