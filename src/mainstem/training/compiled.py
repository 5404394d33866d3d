"""Compiling the blocks, with proof on the first batch that nothing changed."""

import torch
from torch import Tensor

from mainstem.model.gpt import GPT

TOLERANCE = 1e-3
"""Largest difference of a logit, over the largest logit, that counts as the same."""


def compile_blocks(model: GPT, ids: Tensor) -> str:
    """Compile every block in place and compare with the plain model; fall back to it if they differ or it fails.

    Names of parameters stay what they are. Returns the sentence that says what happened.
    """
    model.eval()
    with torch.no_grad():
        plain = model(ids)
        try:
            for block in model.blocks:
                block.compile()
            difference = ((model(ids) - plain).abs().max() / plain.abs().max()).item()
        except Exception as error:  # whatever a broken compiler raises, the plain model still trains
            difference, reason = float("nan"), str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        else:
            reason = f"its logits differ by {difference:.1e}"
    if difference <= TOLERANCE:
        return f"blocks compiled; logits within {difference:.1e} of the plain model's"
    for block in model.blocks:
        block._compiled_call_impl = None
    return f"not compiled: {reason}; the plain model trains on"
