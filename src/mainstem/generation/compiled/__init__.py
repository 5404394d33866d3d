"""The compiled decoder (Numba, extra `fast`). Other packages import only this module.

One compiled step reads every weight once. PyTorch decodes models that the step does not support, and all models until
it has been compiled on this machine.
"""

from collections.abc import Callable

from mainstem.generation.compiled import store
from mainstem.generation.compiled.decoder import CompiledDecoder
from mainstem.generation.compiled.records import ModelRecords, unsupported
from mainstem.model.gpt import GPT
from mainstem.model.quantized import weights_of

__all__ = ["CompiledDecoder", "bytes_a_step", "step_for", "store", "unsupported"]


def step_for(model: GPT) -> Callable[..., bool] | None:
    """The compiled step for a model; None where the model is not supported, or the step not compiled yet."""
    return None if unsupported(model) is not None else store.load(weights_of(model))


def bytes_a_step(model: GPT) -> int:
    """The bytes of weights that the compiled step reads per token."""
    return ModelRecords(model).bytes_read
