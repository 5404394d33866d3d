"""GPT: embed, let every block read the stream and write to it, unembed."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mainstem import residuals
from mainstem.config import ModelConfig
from mainstem.errors import ConfigError
from mainstem.model.attention import CacheSlot, View, rotation
from mainstem.model.block import Block, Site
from mainstem.model.init import Initialiser
from mainstem.model.names import FINAL, point
from mainstem.model.norms import Empty, Norm, make_norm
from mainstem.model.tap import Scope, Tap, check_points, touch


class Cache(Protocol):
    """Keys and values of the positions that the model has read so far."""

    length: int
    """How many positions it holds."""

    def __getitem__(self, block: int) -> CacheSlot:
        """The slot of a block."""
        ...

    def advance(self, count: int) -> None:
        """Note that every slot has been given `count` more positions."""
        ...


class GPT(nn.Module):
    """A decoder-only transformer for any row of the residual table.

    Shapes: B rows, T positions, C d_model, V vocabulary. `model(ids)` is `model.unembed(model.stream(ids))`.

    Args:
        config: what to build; kept as `model.config`, resolved.
        seed: the initial weights follow from it.
    """

    def __init__(self, config: ModelConfig, seed: int = 1):
        super().__init__()
        self.config = config = config.resolved()
        C, V = config.d_model, config.vocab_size
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(config.n_ctx, C) if config.position == "learned" else None
        self.embd_dropout = nn.Dropout(config.embd_dropout) if config.embd_dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.ln_f: Norm | Empty = make_norm(config, "ln_f") if residuals.row(config.residual).ln_f else Empty()
        self.lm_head = nn.Linear(C, V, bias=config.lm_head_bias)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.recompute = False
        """Whether a pass with gradients keeps of each block only what it reads; backward computes the rest again."""
        self._initialise(Initialiser(config, seed))

    def _initialise(self, init: Initialiser) -> None:
        init.embedding(self.wte.weight)
        if self.wpe is not None:
            init.embedding(self.wpe.weight)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.initialise(init)
        if self.lm_head.weight is not self.wte.weight:
            init.matrix(self.lm_head.weight)
        init.zero(self.lm_head.bias)

    def forward(
        self, ids: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None, tap: Tap | None = None
    ) -> Tensor:
        """Token ids (B, T) -> logits (B, T, V). The arguments are those of `stream`."""
        return self.unembed(self.stream(ids, mask=mask, cache=cache, tap=tap), tap)

    def stream(
        self, ids: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None, tap: Tap | None = None
    ) -> Tensor:
        """Token ids (B, T) -> the stream after the last block, `resid_final`, (B, T, C).

        Args:
            ids: at most n_ctx of them, with those in the cache.
            mask: (B, cached + T) bool, false at padding, which nothing reads and which takes no position.
            cache: earlier positions, to be read and added to.
            tap: looks at, or changes, the points that it names (`mainstem.model.names` lists them).

        Raises ConfigError when the positions exceed n_ctx.
        """
        if tap is not None and not tap.points:
            tap = None  # one that asks for nothing costs nothing
        if tap is not None:
            check_points(tap.points, self.points())
        x, view = self.embed(ids, mask=mask, cache=cache, tap=tap)
        x = self.through(x, view, cache=cache, tap=tap)
        if cache is not None:
            cache.advance(ids.shape[1])
        return x

    def points(self) -> list[str]:
        """Every point that a tap may ask for, in the order of the forward pass."""
        embeddings = ["embed"] if self.wpe is None else ["embed", "pos_embed"]
        every: Iterable[Any] = self.blocks
        blocks = [point(name, index) for index, block in enumerate(every) for name in block.points()]
        return [*embeddings, *blocks, FINAL, *self.ln_f.points()]

    def joins(self) -> list[Site]:
        """Every join, in the order of the forward pass; a block without an MLP has one, any other two."""
        every: Iterable[Any] = self.blocks
        return [site for index, block in enumerate(every) for site in block.joins(index)]

    def embed(
        self, ids: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None, tap: Tap | None = None
    ) -> tuple[Tensor, View]:
        """The stream before the first block, (B, T, C), and what the queries of this pass may see.

        The arguments and errors are those of `stream`; the cache is not changed.
        """
        if ids.ndim != 2 or ids.is_floating_point():
            raise ConfigError(f"ids of shape {tuple(ids.shape)} and {ids.dtype}; give whole numbers of shape (B, T)")
        T, before = ids.shape[1], cache.length if cache is not None else 0
        if before + T > self.config.n_ctx:
            raise ConfigError(f"{before + T} positions do not fit n_ctx {self.config.n_ctx}; shorten the input")
        if mask is None:
            positions = torch.arange(before, before + T, device=ids.device)[None]  # (1, T)
        else:
            mask = mask.bool()
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, before:]  # (B, T)
        x = touch(tap, "embed", self.wte(ids))  # (B, T, C)
        if self.wpe is not None:
            x = x + touch(tap, "pos_embed", self.wpe(positions).expand_as(x))
        return self.embd_dropout(x), self._view(positions, mask, before, T, x.dtype)

    def through(
        self, x: Tensor, view: View, *, first: int = 0, cache: Cache | None = None, tap: Tap | None = None
    ) -> Tensor:
        """The stream (B, T, C) as block `first` reads it -> `resid_final`, as every block from there on leaves it.

        With `recompute`, what a tap looks at and what a cache takes are kept all the same. Source: Chen et al. 2016,
        section 3.
        """
        recompute = self.recompute and tap is None and cache is None and torch.is_grad_enabled()
        for index in range(first, len(self.blocks)):
            block = self.blocks[index]
            if recompute:
                x = checkpoint(block, x, view, use_reentrant=False)  # draws the same dropout again
                continue
            slot = cache[index] if cache is not None else None
            x = block(x, view, slot, Scope(tap, point("", index)) if tap is not None else None)
        return touch(tap, FINAL, x)

    def unembed(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """The stream (..., C) -> logits (..., V). Give it only the positions whose logits are needed."""
        return self.lm_head(self.ln_f(x, tap))

    def _view(self, positions: Tensor, mask: Tensor | None, before: int, T: int, dtype: torch.dtype) -> View:
        """Causal, padding hidden; a padding query reads itself, so that no row of the softmax is empty."""
        rotary = None
        if self.config.position == "rotary":
            rotary = rotation(positions, self.config.d_head, self.config.rope_base, dtype)
        if mask is None and (before == 0 or T == 1):
            return View(None, causal=before == 0, rotation=rotary)
        keys = torch.ones(T, before + T, dtype=torch.bool, device=positions.device)
        seen = keys.tril(before)[None, None]  # (1, 1, T, cached + T)
        if mask is not None:
            itself = keys.tril(before).triu(before)[None, None]
            seen = seen & mask[:, None, None, :] | itself
        return View(seen, causal=False, rotation=rotary)
