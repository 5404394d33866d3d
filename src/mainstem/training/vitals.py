"""Vitals: what every branch writes to the stream, and what comes back through it, while a model trains.

They are taken in a pass of their own over a few windows of the step's batch, without dropout and without touching any
random state, so a run that is watched and one that is not end in the same bytes.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mainstem.model.gpt import GPT
from mainstem.model.mlp import NEAR_ZERO
from mainstem.model.mode import evaluating
from mainstem.model.names import FINAL, point, split
from mainstem.model.tap import Recorder
from mainstem.training.device import Device
from mainstem.training.evaluate import loss_sum

WINDOWS = 2
"""Windows of the batch that are looked at."""

COLUMNS = {
    "stream": "RMS of the block's input",
    "attn_write": "length of attention's write over that of the stream it is added to, mean over tokens",
    "mlp_write": "the same for the MLP",
    "attn_cos": "cosine of attention's write to the stream, mean over tokens: above 0 it amplifies, below it erases",
    "mlp_cos": "the same for the MLP",
    "gradient": "RMS of the gradient of the summed loss at the block's input",
    "gradient_mid": "the same between attention and MLP",
    "entropy": "entropy of the attention pattern in nats, mean over heads and queries",
    "first_token": "attention on the first position, mean over heads and later queries",
    "near_zero": f"share of MLP activations below {NEAR_ZERO} in magnitude",
    "update": "length of the step's update over that of the block's weights",
    "mean": "mean of the block's input",
    "spread": "standard deviation of the block's input",
}
"""What each number of a row is."""


def _points(model: GPT) -> Iterator[str]:
    for site in model.joins():
        inside = {"attn": "attn.pattern", "mlp": "mlp.post"}[site.kind]
        yield from (site.reads, site.point(inside), site.write)
    yield FINAL


def _rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


def _write(stream: Tensor, write: Tensor, name: str) -> dict[str, float]:
    """Ratio of lengths and cosine, over (B, T, C), mean over tokens."""
    stream, write = stream.float(), write.float()
    ratio = write.norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-30)
    cosine = torch.cosine_similarity(write, stream, dim=-1, eps=1e-30)
    return {f"{name}_write": ratio.mean().item(), f"{name}_cos": cosine.mean().item()}


class _Recorder(Recorder):
    """Keeps of an attention pattern its two numbers alone: its T x T weights a head are too many to hold."""

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if not point.endswith("attn.pattern"):
            return super().__call__(point, tensor)
        pattern = tensor.detach().float()  # (B, H, T query, T key)
        entropy = -torch.special.xlogy(pattern, pattern).sum(-1).mean()
        later = pattern[:, :, 1:, 0]  # the first query has nothing else to attend to
        self.values[point] = torch.stack((entropy, later.mean() if later.numel() else torch.ones_like(entropy)))
        return tensor


class Vitals:
    """One look: `Vitals(model, ...)` before the step, `rows(step)` after it."""

    def __init__(self, model: GPT, x: Tensor, y: Tensor, device: Device):
        self._model, recorder = model, _Recorder(_points(model))
        with evaluating(model), torch.compiler.set_stance("force_eager"), device.autocast():
            loss = loss_sum(model, x[:WINDOWS], y[:WINDOWS], recorder)
        inputs = [p for p in recorder.values if p.endswith(("resid_pre", "resid_mid", "resid_final"))]
        gradients = torch.autograd.grad(loss, [recorder.values[point] for point in inputs])
        self._values = {point: value.detach() for point, value in recorder.values.items()}
        self._in_block = {split(point): value for point, value in self._values.items()}
        self._gradients = dict(zip(inputs, gradients, strict=True))
        self._rows = [self._block(index) for index in range(len(model.blocks))]
        self._rows.append(self._stream(FINAL))
        del self._values, self._in_block, self._gradients
        self._before = [[p.detach().clone() for p in block.parameters()] for block in model.blocks]

    @torch.no_grad()
    def rows(self, step: int) -> list[dict[str, Any]]:
        """A row a block, and one for the stream that the last block leaves; COLUMNS says what the numbers are.

        `step` counts the steps done when the look was taken; the update is that of the step since.
        """
        updates = [{"update": self._update(index)} for index in range(len(self._model.blocks))] + [{}]
        rows = zip(self._rows, updates, strict=True)
        return [{"step": step, "block": index, **row, **update} for index, (row, update) in enumerate(rows)]

    def _stream(self, point: str) -> dict[str, float]:
        value = self._values[point]
        mean, spread = value.mean().item(), value.std(correction=0).item()
        return {"stream": _rms(value), "gradient": _rms(self._gradients[point]), "mean": mean, "spread": spread}

    def _block(self, index: int) -> dict[str, float]:
        values = {name: value for (block, name), value in self._in_block.items() if block == index}
        row = self._stream(point("resid_pre", index)) | _write(values["resid_pre"], values["attn_out"], "attn")
        row["entropy"], row["first_token"] = values["attn.pattern"].tolist()
        if "mlp_out" in values:
            row |= _write(values["resid_mid"], values["mlp_out"], "mlp")
            row["gradient_mid"] = _rms(self._gradients[point("resid_mid", index)])
            row["near_zero"] = (values["mlp.post"].abs() < NEAR_ZERO).float().mean().item()
        return row

    def _update(self, index: int) -> float:
        moved = size = 0.0
        for before, after in zip(self._before[index], self._model.blocks[index].parameters(), strict=True):
            moved += (after - before).square().sum().item()
            size += before.square().sum().item()
        return (moved / size) ** 0.5 if size else 0.0


class _FirstBad:
    """A tap that keeps the name of the first point with a NaN or an infinity."""

    def __init__(self, points: Iterable[str]):
        self.points = frozenset(points)
        self.name: str | None = None

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if self.name is None and not torch.isfinite(tensor).all():
            self.name = point
        return tensor


@torch.no_grad()
def first_non_finite(model: GPT, x: Tensor, device: Device, windows: int) -> str | None:
    """The first point of the stream that goes bad on this batch, (B, T), so many windows at once, without dropout."""
    tap = _FirstBad(point for point in _points(model) if "pattern" not in point)
    with evaluating(model), torch.compiler.set_stance("force_eager"), device.autocast():
        for part in x.split(windows):
            model(part, tap=tap)
            if tap.name is not None:
                break
    return tap.name
