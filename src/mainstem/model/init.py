"""Initial weights: three rules for the standard deviation of a matrix, times the factors of the residual table."""

import hashlib
import math

import torch
from torch import Tensor

from mainstem import residuals
from mainstem.config import ModelConfig


class Initialiser:
    """Draws every weight of a model from a generator of its own, seeded by (seed, name).

    The same config and seed give bit-identical weights on every device. Two configs that differ in one part start with
    equal weights in all others: weights of one name and shape are the same draws, times their standard deviations.

    `branch` and `out` are the residual row's factors for this depth: on v, the MLP and the output projections
    (DeepNorm's beta), and on the output projections, there including GPT-2's 1 / sqrt(2 L) with `gpt2`.
    """

    def __init__(self, config: ModelConfig, seed: int):
        row, depth = residuals.row(config.residual), max(1, config.n_layer)
        self.init, self.d_model, self.seed = config.init, config.d_model, seed
        self.branch = row.branch_gain(depth)
        self.out = self.branch * (row.out_scale(depth) if config.init == "gpt2" else 1.0)

    def matrix_std(self, fan_in: int, fan_out: int) -> float:
        """The standard deviation of a matrix. gpt2: 0.02 (Radford et al. 2018, section 4.1); xavier: sqrt(2 / (fan_in +
        fan_out)) (Glorot and Bengio 2010, equation 12, as a normal); width: 1 / sqrt(d_model) for every matrix.
        """
        return {"gpt2": 0.02, "xavier": math.sqrt(2 / (fan_in + fan_out)), "width": self.d_model**-0.5}[self.init]

    def embedding_std(self) -> float:
        """The standard deviation of embeddings: 0.02 for gpt2, else 1 / sqrt(d_model): tied logits start near 1."""
        return 0.02 if self.init == "gpt2" else self.d_model**-0.5

    def matrix(self, name: str, weight: Tensor, gain: float = 1.0) -> None:
        """Draw a weight (fan_out, fan_in), or the rows of one projection, by its name."""
        self._fill(name, weight, gain * self.matrix_std(weight.shape[1], weight.shape[0]))

    def embedding(self, name: str, weight: Tensor) -> None:
        """Draw an embedding, (V or T, C), by its name."""
        self._fill(name, weight, self.embedding_std())

    @torch.no_grad()
    def _fill(self, name: str, weight: Tensor, std: float) -> None:
        if weight.is_meta:
            return
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
        weight.copy_(drawn.normal_(0.0, std, generator=generator))

    @staticmethod
    @torch.no_grad()
    def zero(bias: Tensor | None) -> None:
        """Set a bias to 0; None is ignored."""
        if bias is not None:
            bias.zero_()
