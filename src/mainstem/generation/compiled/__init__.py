"""The compiled decoder (Numba, extra `fast`), behind one door: nothing outside imports its other modules.

A model is decoded by one compiled step that reads every weight once. What the step does not support, and what has not
been compiled on this machine yet, PyTorch decodes.
"""

from collections.abc import Callable

from mainstem.generation.compiled import store
from mainstem.generation.compiled.decoder import CompiledDecoder
from mainstem.generation.compiled.records import ModelRecords, unsupported
from mainstem.model.gpt import GPT
from mainstem.model.quantized import weights_of

__all__ = ["CompiledDecoder", "bytes_a_step", "step_for", "store", "unsupported"]


def step_for(model: GPT) -> Callable[..., bool] | None:
    """The compiled step for a model; None where PyTorch decodes it: it is not supported, or not compiled yet."""
    return None if unsupported(model) is not None else store.load(weights_of(model))


def bytes_a_step(model: GPT) -> int:
    """The bytes of weights that the compiled step reads for one token."""
    return ModelRecords(model).bytes_read
