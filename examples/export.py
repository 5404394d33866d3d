"""Export a run as a folder that `transformers` opens, and read it back: the logits are the same.

python examples/export.py bard bard-hf
"""

import sys
import tempfile
from pathlib import Path

import torch

import mainstem as ms
from mainstem.formats.hf import folder as hf


def main(run: str = "bard", out: str | None = None) -> None:
    """Write the folder, list its files, compare."""
    model, tokenizer = ms.load(run)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(out or Path(temporary) / "exported")
        hf.write(folder, model, tokenizer)
        for file in sorted(folder.iterdir()):
            print(f"{file.stat().st_size:>10,}  {file.name}")
        again, words = ms.load(folder)
        ids = torch.tensor([tokenizer.encode("ROMEO:")])
        with torch.no_grad():
            print("the same logits:", torch.equal(model(ids), again(ids)))
        print("the same ids:", words.encode("Good night!") == tokenizer.encode("Good night!"))


if __name__ == "__main__":
    main(*sys.argv[1:3])
