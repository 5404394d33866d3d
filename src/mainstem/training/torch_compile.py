"""Compiling the blocks, with proof on the first batch that nothing changed."""

import contextlib
import math

import torch
from torch import Tensor

from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.training.device import Device
from mainstem.training.evaluate import loss_sum

TOLERANCE = 1e-3
"""Largest difference of the loss or of a gradient, over the largest value, that counts as the same."""
TOLERANCE_BFLOAT16 = 2e-2
"""The same where products are rounded to eight bits."""


def _probe(model: GPT, x: Tensor, y: Tensor, device: Device) -> list[Tensor]:
    """The loss and every gradient, without dropout; the gradients are dropped from the model again."""
    with device.autocast():
        loss = loss_sum(model, x, y)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def recompile_limit(model: GPT) -> contextlib.AbstractContextManager[None]:
    """While it is entered, PyTorch may compile a graph for each block in each mode; its own limit is a few graphs.

    A block with constants of its own has a graph of its own. The limit is restored at the end.
    """
    limit = max(torch._dynamo.config.recompile_limit, 4 * len(model.blocks))
    context: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=limit)
    return context


def compile_blocks(model: GPT, x: Tensor, y: Tensor, device: Device) -> str:
    """Compile every block in place and compare with the plain model; fall back to it if they differ or it fails.

    Names of parameters stay what they are. x and y are (B, T), as many windows as a step has at once, so that what is
    compared is what will train. Returns the sentence that says what happened.
    """
    with evaluating(model), recompile_limit(model):
        plain = _probe(model, x, y, device)
        try:
            for block in model.blocks:
                block.compile()
            pairs = zip(_probe(model, x, y, device), plain, strict=True)
            differences = [((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item() for a, b in pairs]
            difference = float("nan") if any(map(math.isnan, differences)) else max(differences)
            reason = f"loss and gradients differ by {difference:.1e}"
        except Exception as error:  # whatever a broken compiler raises, the plain model still trains
            difference, reason = float("nan"), (str(error).strip() or repr(error)).splitlines()[0]
    if difference <= (TOLERANCE if device.autocast_dtype is None else TOLERANCE_BFLOAT16):
        return f"blocks compiled; loss and gradients within {difference:.1e} of the plain model's"
    for block in model.blocks:
        block._compiled_call_impl = None
    return f"not compiled: {reason}; the plain model trains on"
