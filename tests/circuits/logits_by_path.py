"""An oracle: all logits of a model of one attention-only block without norms, by path."""

import torch
from torch import Tensor

from mainstem.circuits.head_weights import ov
from mainstem.circuits.weights import reader
from mainstem.model.gpt import GPT
from models import record


@torch.no_grad()
def contributions(model: GPT, ids: Tensor) -> dict[str, Tensor]:
    """Rows that sum to the logits, each (B, T, V): the direct path, each head's, and biases as one row.

    logits = (embed + pos_embed) W_U + sum over heads of pattern (embed + pos_embed) W_V W_O W_U + biases, with the
    pattern as it was recorded (Elhage et al. 2021, "One-Layer Attention-Only Transformers").
    """
    points, unembed = record(model, ids), reader(model, "unembed").matrix  # (C, V)
    attn, join, read = model.blocks[0].attn, model.blocks[0].res_1, points["blocks.0.resid_pre"]
    rows = {"direct": join.skip(read) @ unembed, "biases": torch.zeros_like(points["logits"])}
    for head in range(attn.n_head):
        path = ov(model, 0, head) @ unembed  # (C, V), through D
        rows[f"L0H{head}"] = points["blocks.0.attn.pattern"][:, head] @ (read @ path.left) @ path.right
    if attn.c_proj.bias is not None:
        rows["biases"] += join.gain(attn.c_proj(attn.b_V.flatten())) @ unembed
    if model.lm_head.bias is not None:
        rows["biases"] += model.lm_head.bias
    return rows
