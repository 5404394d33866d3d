"""Capture: one forward pass, and a trace of the stream that answers questions about it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.generation.decoding import SamplingOptions, stream_text
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.stack import levels
from mainstem.model.tap import Recorder
from mainstem.stream.ids import Ids, padded
from mainstem.stream.metrics import Metric, checked, with_ids
from mainstem.stream.points import BUDGET, Key, select, size
from mainstem.stream.trace import Trace

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

INSIDE = ("q", "k", "v", "pattern", "pre", "post")
"""What a capture leaves out unless it is asked for: each is computed again, block by block, from what is kept."""


def default_points(model: GPT) -> list[str]:
    """The stream, every write, the statistics of every norm, and `attn.z`."""
    return [point for point in model.points() if point.split(".")[-1] not in INSIDE]


def estimate(model: GPT, points: Iterable[str], batch: int, length: int, gradients: bool = False) -> int:
    """The bytes that a capture of these points takes; a tensor with two names counts once.

    With gradients there is one tensor more for each point, and all that the backward pass needs: what is inside every
    block, and the logits with their gradient.
    """
    stream = levels(model)
    same = {name: first for first, *others in stream for name in others}
    if model.wpe is None:
        same["embed"] = stream[0][0]

    def numbers(names: Iterable[str]) -> int:
        once = {same.get(name, name): name for name in names}
        return sum(size(name, model, batch, length) for name in once.values())

    total = numbers(points)
    if gradients:
        total += total + numbers(point for point in model.points() if not point.endswith(".pattern"))
        total += 2 * batch * length * model.config.vocab_size
    return total * model.wte.weight.element_size()


def _within(budget: float, needed: int) -> None:
    """Raise ConfigError if a capture would take more than the budget."""
    if not needed <= budget:
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
    budget: float = BUDGET,
) -> Trace:
    """Run the model once, in evaluation mode, and keep what it leaves at the points.

        trace = ms.capture(model, "O Romeo, Romeo! wherefore art", tokenizer=tokenizer)
        trace["resid_post", 1], trace.attribution(" thou"), trace.lens()

    Args:
        model: any GPT; in training or after it.
        ids: (B, T); or rows of ids of any lengths, or texts if there is a tokenizer; shorter ones are padded on the
            left.
        points: names and patterns as `points.select` takes them; None keeps the stream, the writes, the norms'
            statistics and `attn.z`. Points inside a block that were not kept are computed again when asked for.
        mask: (B, T) bool, false at padding, which stands on the left.
        tokenizer: for results that show text, and for questions in text.
        metric: of the logits; its gradient is kept at the points, summed over rows.
        budget: bytes. Raises ConfigError, before anything is run, if the points take more.
    """
    ids, mask = padded(model, ids, mask, tokenizer)
    metric = None if metric is None else with_ids(metric, tokenizer)
    kept = default_points(model) if points is None else select(points, model)
    B, T = ids.shape
    _within(budget, estimate(model, kept, B, T, gradients=metric is not None))
    tap: Recorder = Recorder(kept) if metric is None else _Differentiable(kept)
    with torch.inference_mode(False), evaluating(model), torch.set_grad_enabled(metric is not None):
        final = model.stream(ids, mask=mask, tap=tap)
        if any(point.startswith("ln_f.") for point in kept):
            model.ln_f(final, tap)
        gradients = {} if metric is None else _gradients(checked(metric(model.unembed(final)), B), tap.values, kept)
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

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if point in ("embed", "pos_embed"):
            tensor = tensor.detach().requires_grad_()
        elif point.endswith((".pattern", ".pre")):  # another tensor, so that it is what the pass goes on with
            tensor = tensor.view_as(tensor)
        return super().__call__(point, tensor)


def _gradients(metric: Tensor, values: dict[str, Tensor], points: Sequence[str]) -> dict[str, Tensor]:
    differentiable = [point for point in points if not point.endswith((".mean", ".scale"))]
    if not metric.requires_grad:
        raise ConfigError("metric: it has no gradient; compute it from the logits, without detaching them")
    gradients = torch.autograd.grad(metric.sum(), [values[point] for point in differentiable], allow_unused=True)
    return {
        point: torch.zeros_like(values[point]) if gradient is None else gradient
        for point, gradient in zip(differentiable, gradients, strict=True)
    }


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
    seed: int = 1,
    stop: str | Sequence[str] = (),
    stop_at_eot: bool = True,
    budget: float = BUDGET,
    **sampling: Unpack[SamplingOptions],
) -> Trace:
    """Let the model continue one prompt, with its KV cache, and keep what it leaves while it does.

    The trace's ids are those that were read: the prompt and all that was generated but the last token. The arguments
    are those of `capture` and `stream_text`.

    Raises ConfigError if prompt and text may not fit the context: a window that slides would be read again, and its
    positions would be others.
    """
    kept = default_points(model) if points is None else select(points, model)
    first, _ = padded(model, prompt if isinstance(prompt, str) else [prompt], tokenizer=tokenizer)
    length = first.shape[1] + max_new_tokens - 1
    if length > model.config.n_ctx:
        raise ConfigError(f"{length} positions do not fit n_ctx {model.config.n_ctx}; lower max_new_tokens")
    if any(point.startswith("ln_f.") for point in kept):  # it reads the last position alone, each time
        kept = [*(point for point in kept if not point.startswith(("ln_f.", "resid_final"))), "resid_final"]
    _within(budget, estimate(model, kept, 1, length))
    tap = _Growing(kept)
    chunks = stream_text(
        model, tokenizer, first.tolist(), max_new_tokens=max_new_tokens, seed=seed, stop=stop, stop_at_eot=stop_at_eot,
        context="stop", tap=tap, **sampling,
    )  # fmt: skip
    new = [i for chunk in chunks for i in chunk.ids]
    ids = torch.tensor([first[0].tolist() + new[:-1]], device=first.device)
    return Trace(model, ids, None, {point: tap.whole(point) for point in kept}, tokenizer)
