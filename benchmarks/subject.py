"""What is measured: a model of a preset's shape with random weights, and random tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.presets import preset


@dataclass(frozen=True)
class Subject:
    """A preset's model without dropout, in float32 and evaluation mode, and the texts that it reads.

    Raises ConfigError for an unknown preset, and for texts that do not fit its context.
    """

    preset: str = "gpt2"
    tokens: int = 256
    """Of the text that is looked into."""
    grid_tokens: int = 24
    """Of the shorter ones between which is patched: the plain way runs a whole pass for each block and position."""
    seed: int = 1
    """Of weights and tokens."""

    def __post_init__(self) -> None:
        for name in ("tokens", "grid_tokens"):
            if not 2 <= getattr(self, name) <= self.config.n_ctx:
                raise ConfigError(
                    f"{name}: {getattr(self, name)} is not possible; "
                    f"give 2 to {self.config.n_ctx}, the context of {self.preset}"
                )

    @property
    def config(self) -> ModelConfig:
        """The shape."""
        return preset(self.preset).model.replace(dropout=0.0).resolved()

    def model(self) -> GPT:
        """The model; the same at every call."""
        return GPT(self.config, self.seed).eval()

    def text(self) -> tuple[Tensor, Tensor]:
        """The ids that are read, and at each position the one that comes next: (1, T) both."""
        ids = self._drawn(self.tokens + 1)
        return ids[:, :-1], ids[:, 1:]

    def pair(self) -> tuple[Tensor, Tensor]:
        """A clean text and a corrupted one, (1, T) both."""
        ids = self._drawn(2 * self.grid_tokens)
        return ids[:, : self.grid_tokens], ids[:, self.grid_tokens :]

    def _drawn(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.config.vocab_size, (1, count), generator=generator)
