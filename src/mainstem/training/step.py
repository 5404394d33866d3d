"""One optimizer step, in the two halves between which the loop looks whether all is finite."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.config import TrainConfig
from mainstem.model.gpt import GPT
from mainstem.training import schedule
from mainstem.training.device import Device
from mainstem.training.evaluate import loss_sum
from mainstem.training.optim import Optimizer


class Slope(NamedTuple):
    """What a batch says."""

    loss: float
    """Cross-entropy in nats: the sum over the windows given, over the targets of the step's whole batch."""
    norm: float
    """Of the gradient of all parameters, before clipping."""


class TrainStep:
    """Loss, gradient, clipping, optimizer: what the loop does to every batch, and what the benchmarks time.

    Args:
        model: in training mode.
        optimizer: of the model's parameters.
        config: micro-batch, clipping and schedule are read.
        device: where the model is.
    """

    def __init__(self, model: GPT, optimizer: Optimizer, config: TrainConfig, device: Device):
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, device

    def gradient(
        self, x: Tensor, y: Tensor, should_stop: Callable[[], None] = lambda: None, targets: int | None = None
    ) -> Slope:
        """Leave the gradient of the batch's mean loss in the parameters.

        Args:
            x, y: what this process computes of the step's batch, (B, T) both.
            should_stop: called before each micro-batch; it may raise.
            targets: of the whole batch, wherever it is computed; None: those of y. Losses and gradients of a batch's
                shares add up to the batch's.
        """
        total, micro = torch.zeros((), dtype=torch.float64), self.config.windows_at_once
        targets = targets or y.numel()
        for first in range(0, len(x), micro):
            should_stop()
            with self.device.autocast():
                part = loss_sum(self.model, x[first : first + micro], y[first : first + micro])
            (part / targets).backward()  # the one division: by the count of the whole batch
            total += part.detach().cpu()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return Slope(total.item() / targets, norm.item())

    def move(self, done: int, norm: float) -> float:
        """Clip a gradient of this norm and step, after `done` steps. Returns the rate, as a share of the peak."""
        if self.config.clip:
            parameters = self.model.parameters()
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip, torch.tensor(norm))
        rate = schedule.rate(done, self.config)
        self.optimizer.step(rate)
        self.optimizer.zero_grad()
        return rate
