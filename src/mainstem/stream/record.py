"""A record: what one forward pass left at chosen points, looked up by any name.

Whatever happens inside a block is a function of the stream that the block reads. So a record keeps the stream, and a
point that it does not hold is computed again, by the block itself, when somebody asks for it.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model.attention import Attention, View
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.names import FINAL, point, split
from mainstem.model.stack import level, levels
from mainstem.model.tap import Recorder, Scope
from mainstem.results import Item, Rows
from mainstem.stream.points import Key, resolve

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer


class Record:
    """Points of one forward pass.

    Args:
        model: which made it. It is not copied; once its weights change, the record refuses to answer from them.
        ids: (B, T).
        mask: (B, T) bool, false at padding; None where there is none.
        values: the recorded points.
        tokenizer: for results that show or take text.
    """

    def __init__(
        self, model: GPT, ids: Tensor, mask: Tensor | None, values: Mapping[str, Tensor], tokenizer: "Tokenizer | None"
    ):
        self._model, self._versions = model, _versions(model)
        self.ids, self.mask, self.values, self.tokenizer = ids, mask, dict(values), tokenizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions = _versions(self._model)  # a copy of the model counts anew

    @property
    def model(self) -> GPT:
        """The model, as it was. Raises ConfigError if its weights have changed since."""
        if _versions(self._model) != self._versions:
            raise ConfigError("the model's weights have changed since this capture; capture again")
        return self._model

    def __getitem__(self, key: Key) -> Tensor:
        """The tensor of a point, by any name that `points.resolve` takes; read again from the stream if need be."""
        if isinstance(key, str) and key in self.values:
            return self.values[key]
        name = resolve(key, self._model)
        recorded = self._held(name)
        return recorded if recorded is not None else self._computed(name)

    def __contains__(self, key: Key) -> bool:
        """Whether the point is held, rather than computed when asked for; false for what is no point of the model."""
        try:
            return self._held(resolve(key, self._model)) is not None
        except ConfigError:
            return False

    def __repr__(self) -> str:
        B, T = self.ids.shape
        return f"{type(self).__name__}: {len(self.values)} points of {B} x {T} tokens, {self.bytes / 1e6:.1f} MB"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Each recorded point: `label`, its name; `value`, its megabytes; `shape`."""
        return [
            {"label": name, "value": tensor.numel() * tensor.element_size() / 1e6, "shape": list(tensor.shape)}
            for name, tensor in self.values.items()
        ]

    def top(self, n: int = 10) -> Rows[Item]:
        """The n recorded points that take the most megabytes."""
        return Rows((Item(row["label"], row["value"]) for row in self.to_dicts()), "points: the megabytes of each").top(
            n
        )

    @property
    def bytes(self) -> int:
        """What the recorded tensors take; one that has two names counts once."""
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in self.values.values()}.values())

    @cached_property
    def logits(self) -> Tensor:
        """The model's own, (B, T, V)."""
        with torch.no_grad():
            return self.model.unembed(self[FINAL])

    @cached_property
    def view(self) -> View:
        """What the queries of this pass could see."""
        with torch.no_grad(), evaluating(self.model):
            return self.model.embed(self.ids, mask=self.mask)[1]

    def row_start(self, row: int) -> tuple[int, int]:
        """A row of the batch, from 0, and the position at which its own tokens begin, after the padding.

        Raises ConfigError for a row that is not there.
        """
        B, T = self.ids.shape
        if not -B <= row < B:
            raise ConfigError(f"row: {row} is out of range; the batch has {B} rows, from 0")
        return row % B, 0 if self.mask is None else T - int(self.mask[row].sum())

    def start(self, layer: int) -> Tensor:
        """The stream that block `layer` read, (B, T, C). Raises ConfigError if it was not captured."""
        stream = self._held(point("resid_pre", layer))
        if stream is None:
            raise ConfigError(f"point: what block {layer} read was not captured; add ('resid_pre', {layer}) to points")
        return stream

    def _held(self, name: str) -> Tensor | None:
        return held(self.values, name, self._model)

    def _computed(self, name: str) -> Tensor:
        with torch.no_grad(), evaluating(self.model):
            block, inside = split(name)
            if block is not None:
                return self._in_block(block, inside)
            if name == "ln_f.normalized":
                return (self[FINAL] - self["ln_f.mean"]) / self["ln_f.scale"]
            if name.startswith("ln_f."):
                tap = Recorder(name)
                self.model.ln_f(self[FINAL], tap)
                return tap.values[name]
        raise ConfigError(f"point: {name!r} was not captured, and nothing else gives it; add it to points")

    def _in_block(self, layer: int, name: str) -> Tensor:
        prefix = point("", layer)
        if name == "attn.scores":
            q, k = (self[f"{prefix}attn.{part}"].transpose(1, 2) for part in "qk")  # (B, H, T, D)
            seen = self.view.mask_for(q.shape[2], k.shape[2], q.device)
            scores = self._attention(layer).scale * (q @ k.transpose(-1, -2))
            return scores.masked_fill(~seen, float("-inf"))
        if name == "attn.result":
            z = self[f"{prefix}attn.z"]  # (B, T, H, D)
            return torch.einsum("bthd,hdc->bthc", z, self._attention(layer).W_O)
        if name.endswith(".normalized"):
            norm = name.removesuffix(".normalized")
            read = self.start(layer) if norm.startswith("res_1") else self[f"{prefix}resid_mid"]
            return (read - self[f"{prefix}{norm}.mean"]) / self[f"{prefix}{norm}.scale"]
        tap = Recorder(prefix + name)
        self.model.blocks[layer](self.start(layer), self.view, None, Scope(tap, prefix))
        return tap.values[prefix + name]

    def _attention(self, layer: int) -> Attention:
        block = self.model.blocks[layer]
        assert isinstance(block, Block)
        return block.attn


def held(values: Mapping[str, Tensor], name: str, model: GPT) -> Tensor | None:
    """What is kept of a point: under its own name, or under the other that the stream has there."""
    if name not in values and (passed := level(model, name)) is not None:
        name = next((other for other in levels(model)[passed] if other in values), name)
    return values.get(name)


def _versions(model: GPT) -> list[tuple[int, torch.dtype, bytes]]:
    """What changes when a weight is written to; narrow weights are buffers.

    Torch counts writes, but not the steps of its fused optimizers, so a number of each is kept as well, as bytes: NaN
    equals itself then.
    """
    weights = [*model.parameters(), *model.buffers()]
    firsts = torch.stack([weight.detach().flatten()[0].float() for weight in weights]).cpu().numpy()
    counts = [0 if weight.is_inference() else weight._version for weight in weights]
    return [(count, w.dtype, first.tobytes()) for count, w, first in zip(counts, weights, firsts, strict=True)]
