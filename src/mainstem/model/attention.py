"""The attention branch: the only one that carries information from position to position."""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.config import ModelConfig
from mainstem.model.init import Initialiser
from mainstem.model.norms import make_norm
from mainstem.model.tap import Tap, touch


class CacheSlot(Protocol):
    """One block's keys and values of earlier positions."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new ones, (B, H, T, D), and return all so far, (B, H, T so far, D)."""
        ...


class View(NamedTuple):
    """What the queries of one forward pass may see; the same for every block."""

    mask: Tensor | None = None
    """(B or 1, 1, T query, T key), true where a query reads a key; None with `causal` or a single query."""
    causal: bool = True
    """Whether the mask is the plain causal one."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the rotary angles, each (B or 1, T, 1, D / 2)."""

    def mask_for(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The mask in full, whichever way it is given."""
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
    """Turn each pair (i, i + D/2) of x, (B, T, H, D), by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention, its product by PyTorch's fused kernel.

    Args:
        config: a resolved one.
        index: the place of its block when it was built, from 0; it sets the scale, which the module keeps.
    """

    def __init__(self, config: ModelConfig, index: int = 0):
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.d_head
        self.scale = config.attn_scale / (index + 1 if config.attn_scale_by_depth else 1)
        width = config.n_head * config.d_head
        self.c_attn = nn.Linear(config.d_model, 3 * width, bias=config.bias)
        self.c_proj = nn.Linear(width, config.d_model, bias=config.bias)
        self.dropout = config.attn_dropout
        self.q_norm, self.k_norm = (
            make_norm(config, f"attn.{name}", width=config.d_head, bias=False) if config.qk_norm else nn.Identity()
            for name in ("q_norm", "k_norm")
        )

    @property
    def value_bias(self) -> Tensor | None:
        """The values' part of the bias of `c_attn`, (H, D); a view, or None without biases.

        Every pattern sums to 1, so each z holds it whole, whatever was attended to.
        """
        bias = self.c_attn.bias
        return None if bias is None else bias.chunk(3)[2].unflatten(0, (self.n_head, self.d_head))

    @property
    def output(self) -> Tensor:
        """W_O by head, (H, D, C): head h returns z[h] @ output[h], and `c_proj` their sum and its bias. A view."""
        return self.c_proj.weight.T.unflatten(0, (self.n_head, self.d_head))

    def initialise(self, init: Initialiser) -> None:
        """Draw q, k, v and the output projection, each with its own fans."""
        for part, gain in zip(self.c_attn.weight.chunk(3), (1.0, 1.0, init.branch), strict=True):
            init.matrix(part, gain)
        init.matrix(self.c_proj.weight, init.out)
        init.zero(self.c_attn.bias)
        init.zero(self.c_proj.bias)

    def forward(self, x: Tensor, view: View = CAUSAL, slot: CacheSlot | None = None, tap: Tap | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C). With a cache slot the queries also see the keys that it holds."""
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.n_head, self.d_head)).unbind(-3)  # (B, T, H, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if view.rotation is not None:
            q, k = rotate(q, *view.rotation), rotate(k, *view.rotation)
        q, k, v = touch(tap, "attn.q", q), touch(tap, "attn.k", k), touch(tap, "attn.v", v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D)
        if slot is not None:
            k, v = slot.append(k, v)
        z = self._mix(q, k, v, view, tap).transpose(1, 2)  # (B, T, H, D)
        return self.c_proj(touch(tap, "attn.z", z).flatten(-2))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, view: View, tap: Tap | None) -> Tensor:
        """softmax(q k^T) v, (B, H, T, D). A read of the pattern is recomputed beside the fused kernel."""
        dropout = self.dropout if self.training else 0.0
        if tap is not None and "attn.pattern" in tap.points:
            pattern = tap("attn.pattern", self._pattern(q, k, view))
            if "attn.pattern" in tap.writes:
                return F.dropout(pattern, dropout) @ v
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=view.mask, is_causal=view.causal, dropout_p=dropout, scale=self.scale
        )

    def _pattern(self, q: Tensor, k: Tensor, view: View) -> Tensor:
        """The attention weights, (B, H, T query, T key)."""
        scores = self.scale * (q @ k.transpose(-1, -2))
        mask = view.mask_for(q.shape[-2], k.shape[-2], q.device)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1)
