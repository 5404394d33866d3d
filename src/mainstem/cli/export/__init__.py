"""`mainstem export FORMAT`: a model for other programs."""

from collections.abc import Sequence

from mainstem.cli.parts.subcommands import choose

SUBCOMMANDS = {  # each lives in the module of its name
    "hf": "a folder in Hugging Face's GPT-2 layout, which transformers opens",
    "gguf": "a GGUF file, which llama.cpp runs",
    "safetensors": "a folder of ours with the weights alone: fp32, bf16 or int8",
}


def main(argv: Sequence[str]) -> None:
    """Do the one that was typed."""
    choose("export", "Write a model, its tokenizer and its card for other programs.", SUBCOMMANDS, argv, "format")
