"""A training loop of your own: `ms.GPT` is an ordinary `torch.nn.Module`.

python examples/own_loop.py FILE
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import mainstem as ms


def main(path: str = "shakespeare", steps: int = 20) -> None:
    """Prepare a text, build a model, and take a few steps of AdamW."""
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        data = ms.prepare(ms.Source(path), Path(folder) / "data", tokenizer=ms.Bytes())
        config = ms.ModelConfig(vocab_size=data.tokenizer.vocab_size, n_ctx=64, n_layer=2, n_head=2, d_model=64)
        model = ms.GPT(config)
        windows = ms.Windows(data.train, config.n_ctx, 1, config.vocab_size)  # seed 1: which windows come at which step
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(int(steps)):
            x, y = map(torch.from_numpy, windows.batch(step, 8))  # (B, T) each, y one token later
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0 or step == int(steps) - 1:
                print(f"step {step:3}  loss {loss.item():.3f} nats per token")
    trace = ms.capture(model, "ROMEO:", tokenizer=data.tokenizer)  # the same object that was trained
    print(trace.writes())


if __name__ == "__main__":
    main(*sys.argv[1:3])
