"""Loss as a sum and a count, and an evaluation that reads the whole split once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.tap import Tap
from mainstem.results import plain
from mainstem.text.tokens import Prepared, bytes_per_token, evaluation_windows
from mainstem.training.device import Device

IGNORED = -1
"""A target of this value is not predicted and not counted."""


def loss_sum(model: GPT, x: Tensor, y: Tensor, tap: Tap | None = None) -> Tensor:
    """Cross-entropy in nats, float32, summed over all targets that are not IGNORED; x and y are (B, T)."""
    logits = model(x, tap=tap)
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum", ignore_index=IGNORED)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result over a whole split."""

    loss: float
    """Nats per token."""
    bits_per_byte: float
    """Bits per byte of the text that the targets stand for; comparable across tokenizers."""
    tokens: int
    bytes: int

    def __repr__(self) -> str:
        size = f"{self.tokens:,} tokens, {self.bytes:,} bytes"
        return f"Evaluation: {self.loss:.4f} nats per token, {self.bits_per_byte:.4f} bits per byte; {size}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict of the four numbers."""
        return [plain(self)]


def evaluate(
    model: GPT,
    tokens: np.ndarray,
    token_bytes: np.ndarray,
    *,
    batch_size: int = 16,
    device: Device | None = None,
    should_stop: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Predict every token of a split but the first exactly once, in windows of n_ctx that do not overlap.

    The result does not depend on `batch_size` but for rounding, nor on dropout. `should_stop` may raise.

    Args:
        model: its mode, training or evaluation, is restored.
        tokens: (N,) ids.
        token_bytes: (V,) bytes of text of each id.
        batch_size: windows at once.
        device: how the model is run; by default where it is.
        should_stop: called between batches.
    """
    device = device or Device.choose(str(model.wte.weight.device))
    total, count, size = 0.0, 0, 0
    with evaluating(model), torch.inference_mode(), device.autocast():
        windows = evaluation_windows(tokens, model.config.n_ctx, batch_size, vocab_size=model.config.vocab_size)
        for x, y in windows:
            should_stop()
            inputs, targets = (torch.from_numpy(part).to(device.device) for part in (x, y))
            total += loss_sum(model, inputs, targets).item()
            count += y.size
            size += int(token_bytes[y].sum())
    return Evaluation(total / count, total / math.log(2) / max(1, size), count, size)


def bigram_bits_per_byte(data: Prepared) -> float:
    """What a table of bigrams reaches on the held-out text: a measure of what context is worth.

    Counts of the training tokens, mixed with the unigram counts as if each context had been seen V more times.
    """
    V = data.tokenizer.vocab_size
    train, val = (np.asarray(part, dtype=np.int64) for part in (data.train, data.val))
    pairs, seen = np.unique(train[:-1] * V + train[1:], return_counts=True)
    context = np.bincount(train[:-1], minlength=V)
    unigram = (np.bincount(train, minlength=V) + 1) / (len(train) + V)
    asked = val[:-1] * V + val[1:]
    place = np.searchsorted(pairs, asked).clip(max=len(pairs) - 1)
    count = np.where(pairs[place] == asked, seen[place], 0)
    probability = (count + V * unigram[val[1:]]) / (context[val[:-1]] + V)
    size = bytes_per_token(data.tokenizer)[val[1:]].sum()
    return float(-np.log2(probability).sum() / max(1, size))
