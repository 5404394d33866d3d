"""What a model says about the next token, and how far two such answers are apart."""

import torch
from torch import Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """The log-softmax over the last axis; float32, or float64 where the logits are."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def divergence(final: Tensor, log_p: Tensor) -> Tensor:
    """KL(final || p) in nats, (...), of log-probabilities (..., V); what rounding takes below 0 is 0."""
    return (final.exp() * (final - log_p)).sum(-1).clamp(min=0)
