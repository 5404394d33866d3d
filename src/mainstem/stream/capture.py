"""Capture: one forward pass, and a trace of the stream that answers questions about it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mainstem.errors import ConfigError, DataError
from mainstem.generation.decoding import stream as generation
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.tap import Recorder, all_points
from mainstem.stream.metrics import Metric
from mainstem.stream.points import BUDGET, Key, select, size
from mainstem.stream.trace import Trace

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

INSIDE = ("q", "k", "v", "pattern", "pre", "post")
"""What a capture leaves out unless it is asked for: each is computed again, block by block, from what is kept."""

Ids = Tensor | Sequence[Sequence[int]] | str | Sequence[str]


def default_points(model: GPT) -> list[str]:
    """The stream, every write, the statistics of every norm, and `attn.z`."""
    return [point for point in all_points(model.config) if point.split(".")[-1] not in INSIDE]


def estimate(model: GPT, points: Iterable[str], batch: int, length: int) -> int:
    """The bytes that a capture of these points will hold; a tensor with two names counts once."""
    config, same = model.config, {"embed": "blocks.0.resid_pre"} if model.wpe is None else {}
    for index in range(config.n_layer):
        same[f"blocks.{index}.resid_post"] = f"blocks.{index + 1}.resid_pre"
    last = f"blocks.{config.n_layer}.resid_pre"  # which the model calls resid_final
    kept = {{**same, "resid_final": last}.get(point, point): point for point in points}
    numbers = sum(size(point, config, batch, length) for point in kept.values())
    return numbers * model.wte.weight.element_size()


def _within(budget: int, model: GPT, points: Sequence[str], shape: Sequence[int], copies: int = 1) -> None:
    """Raise ConfigError if the capture would take more than the budget."""
    needed = copies * estimate(model, points, *shape)
    if needed > budget:
        raise ConfigError(
            f"this capture takes {needed / 1e6:,.1f} MB and the budget is {budget / 1e6:,.1f} MB; "
            "name fewer points, shorten the text, or raise the budget"
        )


def capture(
    model: GPT,
    ids: Ids,
    points: str | Iterable[Key] | None = None,
    *,
    mask: Tensor | None = None,
    tokenizer: "Tokenizer | None" = None,
    metric: Metric | None = None,
    budget: int = BUDGET,
) -> Trace:
    """Run the model once, in evaluation mode, and keep what it leaves at the points.

    Args:
        model: any GPT; in training or after it.
        ids: (B, T); or rows of ids of any lengths, or texts if there is a tokenizer; shorter ones are padded on the
            left.
        points: names and patterns as `points.select` takes them; None keeps the stream, the writes, the norms'
            statistics and `attn.z`. Points inside a block that were not kept are computed again when asked for.
        mask: (B, T) bool, false at padding.
        tokenizer: for results that show text, and for questions in text.
        metric: of the logits; its gradient is kept at the points, summed over rows.
        budget: bytes. Raises ConfigError, before anything is run, if the points take more.
    """
    ids, mask = padded(model, ids, mask, tokenizer)
    kept = default_points(model) if points is None else select(points, model.config)
    _within(budget, model, kept, ids.shape, copies=1 if metric is None else 2)
    tap: Recorder = Recorder(kept) if metric is None else _Differentiable(kept)
    with evaluating(model), torch.set_grad_enabled(metric is not None):
        final = model.stream(ids, mask=mask, tap=tap)
        if any(point.startswith("ln_f.") for point in kept):
            model.ln_f(final, tap)
        gradients = {} if metric is None else _gradients(metric(model.unembed(final)), tap.values, kept)
    values = {point: _alone(tap.values[point].detach()) for point in kept}
    return Trace(model, ids, mask, values, tokenizer, gradients)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without the larger one that it is a part of (q, k and v are one product)."""
    larger = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if larger else tensor


class _Differentiable(Recorder):
    """Records with the graph from the embeddings on, whether or not the parameters want gradients."""

    def __init__(self, points: Iterable[str]):
        super().__init__({*points, "embed"})
        self.writes = [point for point in self.points if point.endswith(".pattern")]  # so that it is in the graph

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if point in ("embed", "pos_embed"):
            tensor = tensor.detach().requires_grad_()
        return super().__call__(point, tensor)


def _gradients(metric: Tensor, values: dict[str, Tensor], points: Sequence[str]) -> dict[str, Tensor]:
    wanted = [point for point in points if not point.endswith((".mean", ".scale"))]
    found = torch.autograd.grad(metric.sum(), [values[point] for point in wanted], allow_unused=True)
    return {
        point: torch.zeros_like(values[point]) if gradient is None else gradient
        for point, gradient in zip(wanted, found, strict=True)
    }


def padded(
    model: GPT, ids: Ids, mask: Tensor | None = None, tokenizer: "Tokenizer | None" = None
) -> tuple[Tensor, Tensor | None]:
    """Ids (B, T) on the model's device, and a mask (B, T) if rows were padded, on the left.

    Raises DataError for a text without a tokenizer, an id outside the vocabulary and a row without tokens.
    """
    device, V = model.wte.weight.device, model.config.vocab_size
    if not isinstance(ids, Tensor):
        rows = [_row(row, tokenizer) for row in ([ids] if isinstance(ids, str) else ids)]
        T = max(map(len, rows), default=0)
        if min(map(len, rows), default=0) == 0:
            raise DataError("a prompt has no tokens; give each at least one")
        if any(len(row) < T for row in rows):
            mask = torch.tensor([[i >= T - len(row) for i in range(T)] for row in rows], device=device)
        ids = torch.tensor([[0] * (T - len(row)) + row for row in rows], device=device)
    if ids.ndim == 2 and ids.numel() and not ids.is_floating_point() and not 0 <= int(ids.min()) <= int(ids.max()) < V:
        raise DataError(f"token id {int(ids.max())} is outside 0..{V - 1}; is it another tokenizer's?")
    if ids.numel() == 0:
        raise DataError(f"ids of shape {tuple(ids.shape)} hold no token; give at least one")
    return ids.to(device), None if mask is None else mask.to(device)


def _row(row: str | Sequence[int], tokenizer: "Tokenizer | None") -> list[int]:
    if not isinstance(row, str):
        return [int(i) for i in row]
    if tokenizer is None:
        raise DataError(f"{row!r} is a text, and there is no tokenizer for it; give ids, or tokenizer=")
    return tokenizer.encode(row)


class _Growing(Recorder):
    """Records every step of a cached generation, to be put together along the positions."""

    def __init__(self, points: Iterable[str]):
        super().__init__(points)
        self.steps: dict[str, list[Tensor]] = {}

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        self.steps.setdefault(point, []).append(tensor)
        return tensor

    def whole(self, point: str) -> Tensor:
        """As one forward pass would have given it."""
        steps = self.steps[point]
        if not point.endswith(".pattern"):
            return torch.cat(steps, dim=1)
        T = steps[-1].shape[-1]
        return torch.cat([torch.nn.functional.pad(step, (0, T - step.shape[-1])) for step in steps], dim=2)


def capture_generation(
    model: GPT,
    tokenizer: "Tokenizer | None",
    prompt: str | Sequence[int],
    points: str | Iterable[Key] | None = None,
    *,
    max_new_tokens: int,
    budget: int = BUDGET,
    **options: Any,
) -> Trace:
    """Let the model continue one prompt, with its cache, and keep what it leaves while it does.

    The trace's ids are those that were read: the prompt and all that was generated but the last token. `options` are
    those of `generate`. Raises ConfigError if prompt and text may not fit the context: a window that slides would be
    read again, and its positions would be others.
    """
    kept = default_points(model) if points is None else select(points, model.config)
    first, _ = padded(model, prompt if isinstance(prompt, str) else [prompt], tokenizer=tokenizer)
    length = first.shape[1] + max_new_tokens - 1
    if length > model.config.n_ctx:
        raise ConfigError(f"{length} positions do not fit n_ctx {model.config.n_ctx}; lower max_new_tokens")
    kept = [point for point in kept if not point.startswith("ln_f.")]  # it reads the last position alone
    _within(budget, model, kept, (1, length))
    tap = _Growing(kept)
    chunks = generation(
        model, tokenizer, first.tolist(), max_new_tokens=max_new_tokens, context="stop", tap=tap, **options
    )
    new = [i for chunk in chunks for i in chunk.ids]
    ids = torch.tensor([first[0].tolist() + new[:-1]], device=first.device)
    return Trace(model, ids, None, {point: tap.whole(point) for point in kept}, tokenizer)
