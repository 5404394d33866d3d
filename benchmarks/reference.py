"""The reference recipe for `time-to-loss`: a GPT-2 on characters as nanoGPT publishes it for a CPU, by plain PyTorch.

It stands alone, for it is what we are measured beside: nothing of it is ours but the writing. The facts are those of
nanoGPT's `model.py`, `train.py`, `config/train_shakespeare_char.py` and the line for a CPU in its README: no biases,
erf-GELU, tied embeddings, learned positions; windows drawn at random; AdamW in PyTorch's default form, which is what
nanoGPT takes on a CPU.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """The shape, and how it is trained."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    batch: int = 12
    """Windows a step."""
    iterations: int = 2000
    lr: float = 1e-3
    min_lr: float = 1e-4
    """Where the cosine ends."""
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    """Of matrices and embeddings; norms have none."""
    clip: float = 1.0

    def rate(self, iteration: int) -> float:
        """The learning rate of an iteration counted from 0: a linear warm-up, then a cosine."""
        if iteration < self.warmup:
            return self.lr * (iteration + 1) / (self.warmup + 1)
        done = min(1.0, (iteration - self.warmup) / max(1, self.iterations - self.warmup))
        return self.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (self.lr - self.min_lr)


class Attention(nn.Module):
    """Causal attention through PyTorch's fused product."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.heads = recipe.heads
        self.c_attn = nn.Linear(recipe.width, 3 * recipe.width, bias=False)
        self.c_proj = nn.Linear(recipe.width, recipe.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.c_proj(z.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Attention and an MLP, each after a norm, each added."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(recipe.width, bias=False) for _ in range(2))
        self.attn = Attention(recipe)
        self.c_fc = nn.Linear(recipe.width, 4 * recipe.width, bias=False)
        self.c_proj = nn.Linear(4 * recipe.width, recipe.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class Model(nn.Module):
    """GPT-2. Weights are normal, 0.02; those that write to the stream 0.02 / sqrt(2 layers)."""

    def __init__(self, recipe: Recipe, vocabulary: int, seed: int):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, recipe.width)
        self.wpe = nn.Embedding(recipe.context, recipe.width)
        self.blocks = nn.ModuleList(Block(recipe) for _ in range(recipe.layers))
        self.ln_f = nn.LayerNorm(recipe.width, bias=False)
        self.lm_head = nn.Linear(recipe.width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                smaller = math.sqrt(2 * recipe.layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(weight, std=0.02 / smaller, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (B, T) -> logits (B, T, V)."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Reference:
    """The recipe at work: `step(i)` for i from 0 to `steps` - 1 trains `model`.

    Args:
        recipe: what is trained, and how.
        tokens: the training text as ids, (N,).
        vocabulary: how many ids there are.
        seed: of the weights, and of the windows.
    """

    def __init__(self, recipe: Recipe, tokens: np.ndarray, vocabulary: int, seed: int):
        self.recipe, self.steps, self.tokens = recipe, recipe.iterations, tokens
        self.model = Model(recipe, vocabulary, seed)
        self._generator = torch.Generator().manual_seed(seed)
        matrices = [weight for weight in self.model.parameters() if weight.ndim == 2]
        vectors = [weight for weight in self.model.parameters() if weight.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=recipe.lr,
            betas=recipe.betas,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Windows at random, x and what follows each token of it, (B, T) both."""
        T = self.recipe.context
        starts = torch.randint(len(self.tokens) - T, (self.recipe.batch,), generator=self._generator).tolist()
        x = torch.stack([torch.from_numpy(self.tokens[i : i + T].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(self.tokens[i + 1 : i + 1 + T].astype(np.int64)) for i in starts])
        return x, y

    def step(self, iteration: int) -> None:
        """One iteration: batch, loss, gradient, clipping, AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(iteration)
        x, y = self.batch()
        logits = self.model(x)
        F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
