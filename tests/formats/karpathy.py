"""nanoGPT and both forms of minGPT, plain: their modules by their names, and the logits that they compute."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, T, L, H, C = 13, 6, 2, 3, 12
"""Vocabulary, positions, blocks, heads, width; heads of 4, so that no other split of the width is right by chance."""
ARGS = {"n_layer": L, "n_head": H, "n_embd": C, "block_size": T, "bias": True, "vocab_size": V, "dropout": 0.2}


def tanh_gelu(x: Tensor) -> Tensor:
    """GPT-2's approximation, written out."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mask() -> Tensor:
    return torch.ones(T, T).tril()[None, None]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of H heads over (B, T, C)."""
    q, k, v = (part.unflatten(-1, (H, C // H)).transpose(1, 2) for part in (q, k, v))
    scores = q @ k.mT / math.sqrt(C // H)
    hidden = mask()[0, 0, : q.shape[2], : q.shape[2]] == 0
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """One matrix for queries, keys and values; perhaps a mask beside it."""

    def __init__(self, bias: bool, masked: bool):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C, bias=bias), nn.Linear(C, C, bias=bias)
        if masked:
            self.register_buffer("bias", mask())

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(attend(*self.c_attn(x).chunk(3, dim=-1)))


class Attention2020(nn.Module):
    """A matrix each, in the order in which the file has them."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(C, C) for _ in range(4))
        self.register_buffer("mask", mask())

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(attend(self.query(x), self.key(x), self.value(x)))


class Block(nn.Module):
    """Of nanoGPT and of today's minGPT."""

    def __init__(self, bias: bool, masked: bool, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = (
            nn.LayerNorm(C, bias=bias),
            Attention(bias, masked),
            nn.LayerNorm(C, bias=bias),
        )
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C, bias=bias), "c_proj": nn.Linear(4 * C, C, bias=bias)})
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](self.activation(self.mlp["c_fc"](self.ln_2(x))))


class Block2020(nn.Module):
    """Of minGPT in 2020."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(C), nn.LayerNorm(C), Attention2020()
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Nano(nn.Module):
    """nanoGPT: the head is the embedding's matrix; today's minGPT with `tied` off, masks and the approximation."""

    def __init__(
        self, bias: bool = True, masked: bool = False, tied: bool = True, activation: Callable[..., Tensor] = F.gelu
    ):
        super().__init__()
        parts = {
            "wte": nn.Embedding(V, C), "wpe": nn.Embedding(T, C), "drop": nn.Dropout(0.1),
            "h": nn.ModuleList(Block(bias, masked, activation) for _ in range(L)), "ln_f": nn.LayerNorm(C, bias=bias),
        }  # fmt: skip
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(C, V, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"].weight[: ids.shape[1]]
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


class MinOf2020(nn.Module):
    """minGPT in 2020: positions are a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(V, C), nn.Parameter(torch.zeros(1, T, C))
        self.blocks = nn.Sequential(*(Block2020() for _ in range(L)))
        self.ln_f, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.ln_f(self.blocks(self.tok_emb(ids) + self.pos_emb[:, : ids.shape[1]])))


def stirred(model: nn.Module) -> nn.Module:
    """Every weight away from where it starts, float32, evaluation mode."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def nanogpt(**choices: Any) -> nn.Module:
    """nanoGPT as its file of today has it."""
    return stirred(Nano(**choices))


def early_nanogpt() -> nn.Module:
    """nanoGPT in its first month."""
    return stirred(Nano(masked=True, activation=tanh_gelu))


def mingpt(masked: bool = True) -> nn.Module:
    """minGPT of today."""
    return stirred(Nano(masked=masked, tied=False, activation=tanh_gelu))


def mingpt_of_2020() -> nn.Module:
    """minGPT of 2020."""
    return stirred(MinOf2020())


def checkpoint(model: nn.Module, **args: Any) -> dict[str, Any]:
    """What nanoGPT's trainer saves; an argument that is None is left out."""
    said = {name: value for name, value in {**ARGS, **args}.items() if value is not None}
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": said, "iter_num": 7,
        "best_val_loss": torch.tensor(1.5), "config": {"dataset": "shakespeare_char", "compile": True},
    }  # fmt: skip


def meta(text: str) -> dict[str, Any]:
    """What is in the meta.pkl of its character data."""
    alphabet = sorted(set(text))
    return {
        "vocab_size": len(alphabet),
        "itos": dict(enumerate(alphabet)),
        "stoi": {character: i for i, character in enumerate(alphabet)},
    }
