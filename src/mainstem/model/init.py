"""Initial weights: three rules for a matrix's standard deviation, and the residual table's factors on top."""

import hashlib
import math

import torch
from torch import Tensor

from mainstem import residuals
from mainstem.config import ModelConfig


class Initialiser:
    """Draws every weight of a model from a generator of its own, seeded by (seed, name).

    So the same config and seed give the same bytes on every device, and two configs that differ in one part start
    equal in all others: their weights of one name and shape are the same draws, times their standard deviations.

    `branch` and `out` are the residual row's factors for this depth: on v, the MLP and the output projections
    (DeepNorm's beta), and on the output projections in all (with GPT-2's 1 / sqrt(2 L) under `gpt2`).
    """

    def __init__(self, config: ModelConfig, seed: int):
        row, depth = residuals.row(config.residual), max(1, config.n_layer)
        self.init, self.d_model, self.seed = config.init, config.d_model, seed
        self.branch = row.branch_gain(depth)
        self.out = self.branch * (row.out_scale(depth) if config.init == "gpt2" else 1.0)

    def matrix_std(self, fan_in: int, fan_out: int) -> float:
        """gpt2: 0.02 (Radford et al. 2018, section 4.1); xavier: sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio 2010,
        equation 12, as a normal); width: 1 / sqrt(d_model) for every matrix.
        """
        return {"gpt2": 0.02, "xavier": math.sqrt(2 / (fan_in + fan_out)), "width": self.d_model**-0.5}[self.init]

    def embedding_std(self) -> float:
        """0.02 for gpt2; else 1 / sqrt(d_model), with which tied logits start near 1."""
        return 0.02 if self.init == "gpt2" else self.d_model**-0.5

    def matrix(self, name: str, weight: Tensor, gain: float = 1.0) -> None:
        """Fill a weight of shape (fan_out, fan_in), or one projection's rows of it, under its name."""
        self._fill(name, weight, gain * self.matrix_std(weight.shape[1], weight.shape[0]))

    def embedding(self, name: str, weight: Tensor) -> None:
        """Fill an embedding, (V or T, C), under its name."""
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
        """Zero a bias, if there is one."""
        if bias is not None:
            bias.zero_()
