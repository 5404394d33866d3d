"""GPT: embedding, blocks that read and write the residual stream, unembedding."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mainstem import residuals
from mainstem.config import ModelConfig
from mainstem.errors import ConfigError
from mainstem.model.attention import KV, View, rotation
from mainstem.model.block import Block, Site
from mainstem.model.init import Initialiser
from mainstem.model.names import FINAL, point
from mainstem.model.norms import Empty, LayerNorm, Norm, NormKind, RMSNorm
from mainstem.model.sublayer import Gain
from mainstem.model.tap import Scope, Tap, check_points, for_pass, touch


class Cache(Protocol):
    """The KV cache of a model, as a forward pass uses it."""

    length: int
    """The number of cached positions."""

    def __getitem__(self, block: int) -> KV:
        """The KV cache entry of a block."""
        ...

    def advance(self, count: int) -> None:
        """Add `count` to the length, after every entry has stored as many positions."""
        ...


class GPT(nn.Module):
    """A decoder-only transformer for any row of the residual table.

    Shapes: B rows, T positions, C d_model, V vocabulary. `model(ids)` is `model.unembed(model.stream(ids))`.

    Args:
        config: what to build; kept as `model.config`, resolved.
        seed: the seed of the initial weights (`init_weights`); None leaves zeros, for weights to be loaded.

    PyTorch's random state does not change. Under `torch.device("meta")` only shapes are created; after `to_empty`, call
    `init_weights`.
    """

    def __init__(self, config: ModelConfig, seed: int | None = 1):
        super().__init__()
        self.config = config = config.resolved()
        self.recompute = False
        """Whether passes with gradients use activation checkpointing: backward recomputes each block from its input."""
        device = torch.get_default_device()
        with torch.device("meta"):  # PyTorch's layers would draw weights from the caller's random state
            self._build(config)
        if device.type != "meta":
            self.to_empty(device=device)
            if seed is not None:
                self.init_weights(seed)
            else:
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter.zero_()

    def _build(self, config: ModelConfig) -> None:
        C, V = config.d_model, config.vocab_size
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(config.n_ctx, C) if config.position == "learned" else None
        self.embd_dropout = nn.Dropout(config.embd_dropout) if config.embd_dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        has_ln_f = residuals.row(config.residual).ln_f
        self.ln_f: Norm | Empty = NormKind.of(config).make(C, "ln_f") if has_ln_f else Empty()
        self.lm_head = nn.Linear(C, V, bias=config.lm_head_bias)
        self._tie()

    def _tie(self) -> None:
        if self.config.tie_embeddings and "weight" in self.lm_head._parameters:  # quantized layers share a matrix
            self.lm_head.weight = self.wte.weight

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        """Convert parameters, as all of PyTorch's conversions do, and tie the weights again."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _reset(self) -> None:
        """Set norms and gains to their initial values."""
        for module in self.modules():
            if isinstance(module, LayerNorm | RMSNorm | Gain):
                module.reset_parameters()

    def init_weights(self, seed: int = 1) -> None:
        """Set every parameter to its initial value, bit-identical for a config and seed on any device.

        Each weight is drawn from a generator of its own, seeded by (seed, name), so two configs that differ in one part
        start with equal weights in all others. `docs/residuals.md` has the standard deviations.
        """
        init = Initialiser(self.config, seed)
        self._reset()
        init.embedding("wte.weight", self.wte.weight)
        if self.wpe is not None:
            init.embedding("wpe.weight", self.wpe.weight)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            block.init_weights(init, point("", index).rstrip("."))
        if self.lm_head.weight is not self.wte.weight:
            init.matrix("lm_head.weight", self.lm_head.weight)
        init.zero(self.lm_head.bias)

    def forward(
        self, ids: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None, tap: Tap | None = None
    ) -> Tensor:
        """Token ids (B, T) -> logits (B, T, V). The arguments are those of `stream`."""
        tap = for_pass(tap, cache.length if cache is not None else 0, ids.shape[-1], cache is not None)
        return self.unembed(self.stream(ids, mask=mask, cache=cache, tap=tap), tap)

    def stream(
        self, ids: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None, tap: Tap | None = None
    ) -> Tensor:
        """Token ids (B, T) -> the stream after the last block, `resid_final`, (B, T, C).

        Args:
            ids: at most n_ctx of them, with those in the cache.
            mask: (B, cached + T) bool, false at padding, which is not attended to and has no position.
            cache: the KV cache, which is read and extended.
            tap: reads or replaces the tensors at its points (`mainstem.model.names` lists all points).

        Raises ConfigError when the positions exceed n_ctx.
        """
        tap = for_pass(tap, cache.length if cache is not None else 0, ids.shape[-1], cache is not None)
        if tap is not None:
            check_points(tap.points, self.points())
        x, view = self.embed(ids, mask=mask, cache=cache, tap=tap)
        x = self.through(x, view, cache=cache, tap=tap)
        if cache is not None:
            cache.advance(ids.shape[1])
        return x

    def points(self) -> list[str]:
        """Every point of the model, in the order of the forward pass."""
        embeddings = ["embed"] if self.wpe is None else ["embed", "pos_embed"]
        every: Iterable[Any] = self.blocks
        blocks = [point(name, index) for index, block in enumerate(every) for name in block.points()]
        return [*embeddings, *blocks, FINAL, *self.ln_f.points()]

    def joins(self) -> list[Site]:
        """Every join in the order of the forward pass: one in a block without an MLP, else two."""
        every: Iterable[Any] = self.blocks
        return [site for index, block in enumerate(every) for site in block.joins(index)]

    def embed(
        self, ids: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None, tap: Tap | None = None
    ) -> tuple[Tensor, View]:
        """The stream before the first block, (B, T, C), and the mask and rotation of this pass.

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
        """The stream (B, T, C) before block `first` -> `resid_final`, after the last block.

        With a tap or a cache, `recompute` is ignored. Activation checkpointing: Chen et al. 2016, section 3.
        """
        recompute = self.recompute and tap is None and cache is None and torch.is_grad_enabled()
        for index in range(first, len(self.blocks)):
            block = self.blocks[index]
            if recompute:
                x = checkpoint(block, x, view, use_reentrant=False)  # draws the same dropout again
                continue
            kv = cache[index] if cache is not None else None
            x = block(x, view, kv, Scope(tap, point("", index)) if tap is not None else None)
        return touch(tap, FINAL, x)

    def unembed(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """The stream (..., C) -> logits (..., V). Pass only the positions whose logits are needed."""
        return self.lm_head(self.ln_f(x, tap))

    def _view(self, positions: Tensor, mask: Tensor | None, before: int, T: int, dtype: torch.dtype) -> View:
        """The causal mask without padding keys; a padding query reads itself, so no row of the softmax is empty."""
        rotary = None
        if self.config.position == "rotary":
            rotary = rotation(positions, self.config.d_head, self.config.rope_base, dtype)
        if mask is None and (before == 0 or T == 1):
            return View(None, causal=before == 0, rotation=rotary)
        keys = torch.ones(T, before + T, dtype=torch.bool, device=positions.device)
        visible = keys.tril(before)[None, None]  # (1, 1, T, cached + T)
        if mask is not None:
            itself = keys.tril(before).triu(before)[None, None]
            visible = visible & mask[:, None, None, :] | itself
        return View(visible, causal=False, rotation=rotary)
