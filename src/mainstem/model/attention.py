"""Causal multi-head attention, the only branch that moves information between positions."""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.config import ModelConfig
from mainstem.model.init import Initialiser
from mainstem.model.norms import Empty, NormKind
from mainstem.model.tap import Tap, replaced, touch


class KV(Protocol):
    """One block's entry of a KV cache: keys and values of earlier positions."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, (B, H, T, D), and return all of them, (B, H, cached + T, D)."""
        ...


class View(NamedTuple):
    """The mask and rotation of one forward pass, the same for every block."""

    mask: Tensor | None = None
    """(B or 1, 1, T query, T key), true where a query reads a key; None with `causal` or a single query."""
    causal: bool = True
    """Whether the mask is the causal one, without padding or a cache."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the rotary angles, each (B or 1, T, 1, D / 2)."""

    def mask_for(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The mask as a tensor, (B or 1, 1, queries, keys) or (queries, keys), true where a query reads a key."""
        if self.mask is not None:
            return self.mask
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


CAUSAL = View()


def rotation(positions: Tensor, d_head: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotary angles' cosines and sines for positions (B or 1, T), each (B or 1, T, 1, D / 2). Su et al. 2021, 3.2.2."""
    dtype = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, d_head, 2, dtype=dtype, device=positions.device)
    angles = positions[..., None, None].to(dtype) * base ** (-pairs / d_head)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of x, (B, T, H, D), by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with PyTorch's fused kernel.

    H heads of D channels. The weights by head, for row vectors x @ W, are views:

        W_Q, W_K, W_V   (H, C, D)     b_Q, b_K, b_V   (H, D), or None without biases
        W_O             (H, D, C)     c_proj.bias     (C,)

    Only this class knows their layout in `c_attn` (named as in GPT-2: the rows of q, then k, then v).

    Args:
        config: a resolved config.
        index: the index of the block, from 0; with `attn_scale_by_depth` it sets the scale.
    """

    def __init__(self, config: ModelConfig, index: int = 0):
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.d_head
        self.scale = config.attn_scale / (index + 1 if config.attn_scale_by_depth else 1)
        width = config.n_head * config.d_head
        self.rows = (width, width, width)
        """Rows of `c_attn` that belong to q, k and v."""
        self.c_attn = nn.Linear(config.d_model, sum(self.rows), bias=config.bias)
        self.c_proj = nn.Linear(width, config.d_model, bias=config.bias)
        self.dropout = config.attn_dropout
        kind = NormKind(config.norm, config.norm_eps, bias=False)
        self.q_norm, self.k_norm = (
            kind.make(config.d_head, f"attn.{name}") if config.qk_norm else Empty() for name in ("q_norm", "k_norm")
        )

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x, (..., C), each (..., H, D): before QK-norm and rotation."""
        q, k, v = self.c_attn(x).split(self.rows, dim=-1)
        return self._by_head(q, -1), self._by_head(k, -1), self._by_head(v, -1)

    @property
    def W_Q(self) -> Tensor:
        """The query projection by head, (H, C, D)."""
        return self._weight(0)

    @property
    def W_K(self) -> Tensor:
        """The key projection by head, (H, C, D)."""
        return self._weight(1)

    @property
    def W_V(self) -> Tensor:
        """The value projection by head, (H, C, D)."""
        return self._weight(2)

    @property
    def W_O(self) -> Tensor:
        """The output projection by head, (H, D, C): the output is the sum of z[h] @ W_O[h], plus `c_proj.bias`."""
        return self._by_head(self.c_proj.weight.T, 0)

    @property
    def b_Q(self) -> Tensor | None:
        """The queries' bias, (H, D)."""
        return self._bias(0)

    @property
    def b_K(self) -> Tensor | None:
        """The keys' bias, (H, D)."""
        return self._bias(1)

    @property
    def b_V(self) -> Tensor | None:
        """The values' bias, (H, D). Attention weights sum to 1, so it is added to every z as it is."""
        return self._bias(2)

    def _by_head(self, x: Tensor, dim: int) -> Tensor:
        return x.unflatten(dim, (-1, self.d_head))

    def _weight(self, part: int) -> Tensor:
        return self._by_head(self.c_attn.weight.split(self.rows)[part], 0).mT

    def _bias(self, part: int) -> Tensor | None:
        bias = self.c_attn.bias
        return None if bias is None else self._by_head(bias.split(self.rows)[part], 0)

    def init_weights(self, init: Initialiser, name: str) -> None:
        """Draw q, k, v and the output projection, each with its own fan-in and fan-out; `name` is the module's."""
        parts = zip("qkv", self.c_attn.weight.split(self.rows), (1.0, 1.0, init.branch), strict=True)
        for part, weight, gain in parts:
            init.matrix(f"{name}.c_attn.weight.{part}", weight, gain)
        init.matrix(f"{name}.c_proj.weight", self.c_proj.weight, init.out)
        init.zero(self.c_attn.bias)
        init.zero(self.c_proj.bias)

    def forward(self, x: Tensor, view: View = CAUSAL, kv: KV | None = None, tap: Tap | None = None) -> Tensor:
        """The output of attention, (B, T, C) -> (B, T, C). With a KV cache entry, queries also read its keys."""
        q, k, v = self.qkv(x)  # (B, T, H, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if view.rotation is not None:
            q, k = rotate(q, *view.rotation), rotate(k, *view.rotation)
        q, k, v = touch(tap, "attn.q", q), touch(tap, "attn.k", k), touch(tap, "attn.v", v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D)
        if kv is not None:
            k, v = kv.append(k, v)
        z = self._mix(q, k, v, view, tap).transpose(1, 2)  # (B, T, H, D)
        return self.c_proj(touch(tap, "attn.z", z).flatten(-2))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, view: View, tap: Tap | None) -> Tensor:
        """softmax(scale q k^T) v, (B, H, T, D). A pattern that a tap only reads is computed beside the fused kernel."""
        dropout = self.dropout if self.training else 0.0
        pattern = replaced(tap, "attn.pattern", lambda: self._pattern(q, k, view))
        if pattern is not None:
            return F.dropout(pattern, dropout) @ v
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=view.mask, is_causal=view.causal, dropout_p=dropout, scale=self.scale
        )

    def _pattern(self, q: Tensor, k: Tensor, view: View) -> Tensor:
        """The attention weights, (B, H, T query, T key)."""
        scores = self.scale * (q @ k.transpose(-1, -2))
        mask = view.mask_for(q.shape[-2], k.shape[-2], q.device)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1)
