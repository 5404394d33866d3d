"""Floors: the plain way to what mainstem does, as one would write it first."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mainstem.model.gpt import GPT
from mainstem.model.names import point
from mainstem.model.tap import Recorder
from mainstem.stream.metrics import Metric

Cell = tuple[int, int]
"""A block and a position."""


class Patches:
    """A tap over a batch of copies of one text: each copy has the clean stream before one block at one position.

    Args:
        source: the clean pass's `blocks.{l}.resid_pre`, (1, T, C) each.
        cells: one for each copy.
    """

    def __init__(self, source: Mapping[str, Tensor], cells: list[Cell]):
        self._source, self._at = source, dict[str, list[Cell]]()
        for row, (layer, position) in enumerate(cells):
            self._at.setdefault(point("resid_pre", layer), []).append((row, position))
        self.points = self._at

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        """Patch the rows whose block this is."""
        rows, positions = map(list, zip(*self._at[point], strict=True))
        tensor = tensor.clone()
        tensor[rows, positions] = self._source[point][0, positions]
        return tensor


def patch_grid(model: GPT, clean: Tensor, corrupt: Tensor, metric: Metric, room: int) -> Tensor:
    """The effect of the clean stream at every block and position, (L, T), by a whole pass for each.

    Args:
        model: in evaluation mode.
        clean, corrupt: ids, (1, T) both.
        metric: logits (B, T, V) -> (B,).
        room: positions that are run at once; the cells go in equal chunks.
    """
    L, T = len(model.blocks), corrupt.shape[1]
    with torch.no_grad():
        tap = Recorder([point("resid_pre", layer) for layer in range(L)])
        model(clean, tap=tap)
        baseline = metric(model(corrupt))
        found = []
        for chunk in torch.cartesian_prod(torch.arange(L), torch.arange(T)).split(max(1, room // T)):
            cells = [(int(layer), int(position)) for layer, position in chunk]
            found.append(metric(model(corrupt.repeat(len(cells), 1), tap=Patches(tap.values, cells))))
    return (torch.cat(found) - baseline).unflatten(0, (L, T))
