"""What GPT-2 is, as one of our configs: the form that Hugging Face's folders and GGUF's `gpt2` share. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError

FORM: dict[str, Any] = {
    "residual": "pre", "norm": "layernorm", "position": "learned", "qk_norm": False, "lm_head_bias": False,
}  # fmt: skip
"""The choices that it leaves nobody. A bias that a model does not have is a bias of zeros there."""


@dataclass(frozen=True)
class Layout:
    """A layout that holds models of GPT-2's form, and what it leaves open."""

    name: str
    """As a message calls it."""
    activations: tuple[str, ...]
    """Ours that it has."""
    unscaled: bool = False
    """Whether q.k may be taken as it is: attn_scale 1."""
    by_depth: bool = False
    """Whether attn_scale may be divided by the block's number."""
    least_blocks: int = 0
    """Blocks, at least."""
    least_head: int = 1
    """The width of a head, at least."""

    def misfits(self, config: ModelConfig) -> Iterator[tuple[str, Any, str]]:
        """Each field that the layout cannot hold, its value, and what the layout has instead."""
        config = config.resolved()
        d_head = config.d_model / config.n_head
        usual = d_head**-0.5
        scales = (usual, 1.0) if self.unscaled else (usual,)
        rules = [
            *((field, (value,)) for field, value in FORM.items()),
            ("activation", self.activations), ("d_head", (d_head,)),
            ("attn_scale", scales), ("attn_scale_by_depth", (False, True) if self.by_depth else (False,)),
        ]  # fmt: skip
        for field, possible in rules:
            value = getattr(config, field)
            if not any(value == each or (type(value) is float and math.isclose(value, each)) for each in possible):
                yield field, value, " or ".join(f"{each:g}" if type(each) is float else repr(each) for each in possible)
        if config.d_mlp == 0:
            yield "d_mlp", 0, "an MLP in every block"
        if config.d_head < self.least_head:
            yield "d_head", config.d_head, f"{self.least_head} or more"
        if config.n_layer < self.least_blocks:
            yield "n_layer", config.n_layer, f"{self.least_blocks} or more"

    def require(self, config: ModelConfig) -> None:
        """Raise ConfigError with every field that the layout cannot hold, and what holds it."""
        found = [f"{field} {value!r} (it has {possible})" for field, value, possible in self.misfits(config)]
        if found:
            raise ConfigError(
                f"{self.name} cannot hold {'; '.join(found)}; mainstem export safetensors holds every model"
            )
