"""Another program's names for our tensors: one table a format, read in both directions."""

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.names import split
from mainstem.runs import checkpoint


def weights(model: GPT) -> dict[str, Tensor]:
    """Every weight and bias by our names as a model of GPT-2's form computes with it, float32.

    Quantized matrices are widened, a tied one is there once, and a bias that the model does not have is zeros. Raises
    ConfigError for one that is not finite.
    """
    found = {name: tensor.detach().float() for name, tensor in _weights(model)}
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{name} is not finite, so nothing was written; take an earlier checkpoint")
    return found


def _weights(model: GPT) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.Linear, nn.LayerNorm)):
            if name == "lm_head" and model.config.tie_embeddings:
                continue
            yield f"{name}.weight", module.weight
            if not isinstance(module, nn.Embedding) and name != "lm_head":
                yield f"{name}.bias", torch.zeros(len(module.weight)) if module.bias is None else module.bias


class KeyMap:
    """Our modules' names to theirs.

    Args:
        modules: outside the blocks: our name to their name.
        blocks: inside a block: our name there to their whole name, in which `*` is the block's number.
        transposed: names of `blocks` whose matrices they keep as (inputs, outputs).
    """

    def __init__(self, modules: Mapping[str, str], blocks: Mapping[str, str], transposed: Collection[str] = ()):
        self.modules, self.blocks, self.transposed = dict(modules), dict(blocks), frozenset(transposed)

    def theirs(self, name: str) -> str:
        """Their name of a tensor of ours."""
        module, _, kind = name.rpartition(".")
        block, inside = split(module)
        return f"{self.modules[module] if block is None else self.blocks[inside].replace('*', str(block))}.{kind}"

    def oriented(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of ours, by our name, as they keep it; and one of theirs as we do."""
        block, inside = split(name.rpartition(".")[0])
        return tensor.T if tensor.ndim == 2 and block is not None and inside in self.transposed else tensor

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by our names, by theirs."""
        return {self.theirs(name): self.oriented(name, tensor).contiguous() for name, tensor in tensors.items()}

    def fill(self, model: GPT, found: Mapping[str, Tensor], place: Callable[[str], object]) -> None:
        """Fill a model with tensors by their names. Raises RunError as `checkpoint.fill` does."""
        checkpoint.fill(model, found, place, self.theirs, self.oriented)
