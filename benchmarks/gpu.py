"""Checks that need a CUDA device, in one short run: losses beside those of the CPU, generation, tokens a second.

    python benchmarks/gpu.py          prints one JSON object; exits 1 if a check fails, 2 without a CUDA device
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from mainstem.config import PRESETS, TrainConfig
from mainstem.generation.decoding import generate
from mainstem.text.corpus import Source
from mainstem.text.tokens import Prepared, prepare
from mainstem.training.checkpoint import load
from mainstem.training.events import Step
from mainstem.training.folder import RunFolder
from mainstem.training.loop import Training

STEPS = 20


def losses(folder: Path, data: Prepared, device: str, steps: int = STEPS) -> list[Step]:
    """The steps of a short run on a device."""
    config = TrainConfig(steps=steps, batch_size=8, warmup=5, optimizer="muon", device=device, save_every=10)
    model = PRESETS["andrea-nano"].model.replace(vocab_size=data.tokenizer.vocab_size).resolved()
    events = Training(RunFolder(folder), model, config, data).events()
    return [event for event in events if isinstance(event, Step)]


def main() -> int:
    """Run every check."""
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        data = prepare(Source(("constitution-ko",)), place / "data", vocab_size=1024)
        cpu, cuda = (losses(place / device, data, device) for device in ("cpu", "cuda"))
        model, tokenizer = load(place / "cuda")
        text = generate(model.to("cuda"), tokenizer, "대한민국은", max_new_tokens=20, seed=1)
        difference = max(abs(a.loss - b.loss) / a.loss for a, b in zip(cpu, cuda, strict=True))
        result = {
            "device": torch.cuda.get_device_name(),
            "largest_relative_loss_difference": difference,
            "tokens_per_second": cuda[-1].tokens / cuda[-1].seconds,
            "text": text,
            "ok": difference < 0.02,
        }
    print(json.dumps(result, ensure_ascii=False))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
