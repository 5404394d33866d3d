"""Open a folder in Hugging Face's GPT-2 layout and look inside: here a tiny one that `transformers` has just made.

python examples/hugging_face.py FOLDER
"""

import sys
import tempfile

import torch

import mainstem as ms


def tiny(folder: str) -> str:
    """A GPT-2 of random weights, as `transformers` saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=48, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def main(path: str | None = None) -> None:
    """Load it, capture a pass, and split the stream into what every branch wrote."""
    with tempfile.TemporaryDirectory() as temporary:
        model, tokenizer = ms.load(path or tiny(temporary))
    print(f"{model.config.n_layer} blocks, {model.config.d_model} wide; tokenizer: {'yes' if tokenizer else 'none'}")
    ids = torch.arange(1, 9)[None]  # (1, 8); with a tokenizer, texts too
    trace = ms.capture(model, ids)
    print(trace["blocks.1.hook_resid_pre"].shape, "by TransformerLens's name")
    print(trace.decompose(pos=-1))
    print(ms.composition(model))


if __name__ == "__main__":
    main(*sys.argv[1:2])
