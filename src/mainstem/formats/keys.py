"""The tensor names of other programs: one table per format, used for import and export."""

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.names import split
from mainstem.runs import checkpoint


def weights(model: GPT) -> dict[str, Tensor]:
    """Every weight and bias of a model of GPT-2's form by mainstem's names, float32.

    Quantized matrices are dequantized, a tied matrix occurs once, and missing biases are zeros. Raises ConfigError for
    a tensor that is not finite.
    """
    tensors = {name: tensor.detach().float() for name, tensor in _weights(model)}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{name} is not finite, so nothing was written; use an earlier checkpoint")
    return tensors


def _weights(model: GPT) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.Linear, nn.LayerNorm)):
            if name == "lm_head" and model.config.tie_embeddings:
                continue
            yield f"{name}.weight", module.weight
            if not isinstance(module, nn.Embedding) and name != "lm_head":
                yield f"{name}.bias", torch.zeros(len(module.weight)) if module.bias is None else module.bias


class KeyMap:
    """The tensor names of a format by mainstem's names.

    Args:
        modules: outside the blocks: mainstem's module name -> the format's.
        blocks: inside a block: mainstem's module name -> the format's full name, where `*` is the block's number.
        transposed: keys of `blocks` whose matrices the format stores as (inputs, outputs).
    """

    def __init__(self, modules: Mapping[str, str], blocks: Mapping[str, str], transposed: Collection[str] = ()):
        self.modules, self.blocks, self.transposed = dict(modules), dict(blocks), frozenset(transposed)

    def external(self, name: str) -> str:
        """The format's name of a tensor."""
        module, _, kind = name.rpartition(".")
        block, inside = split(module)
        return f"{self.modules[module] if block is None else self.blocks[inside].replace('*', str(block))}.{kind}"

    def oriented(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor, by mainstem's name, transposed where the format stores it so; the same call reverses it."""
        block, inside = split(name.rpartition(".")[0])
        return tensor.T if tensor.ndim == 2 and block is not None and inside in self.transposed else tensor

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename and transpose tensors for the format."""
        return {self.external(name): self.oriented(name, tensor).contiguous() for name, tensor in tensors.items()}

    def fill(self, model: GPT, tensors: Mapping[str, Tensor], source: Callable[[str], object]) -> None:
        """Fill a model with tensors of the format; `source` names the file of each. Raises RunError."""
        checkpoint.fill(model, tensors, source, self.external, self.oriented)
