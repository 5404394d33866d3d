"""GPT-2's architecture as config values, as Hugging Face folders and GGUF's `gpt2` store it. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError

FORM: dict[str, Any] = {
    "residual": "pre", "norm": "layernorm", "position": "learned", "qk_norm": False, "lm_head_bias": False,
}  # fmt: skip
"""Fields with one supported value. A model without biases is stored with biases of zero."""


@dataclass(frozen=True)
class Layout:
    """A file layout for models of GPT-2's architecture, and the config values that it supports."""

    name: str
    """The name of the layout in messages."""
    activations: tuple[str, ...]
    """The supported activations."""
    unscaled: bool = False
    """Whether attn_scale 1 is supported."""
    by_depth: bool = False
    """Whether attn_scale_by_depth is supported."""
    least_blocks: int = 0
    """The smallest number of blocks."""
    least_head: int = 1
    """The smallest head width."""

    def misfits(self, config: ModelConfig) -> Iterator[tuple[str, Any, str]]:
        """Each field with a value that is not supported: its name, the value, and the supported values."""
        config = config.resolved()
        d_head = config.d_model / config.n_head
        default = d_head**-0.5
        scales = (default, 1.0) if self.unscaled else (default,)
        rules = [
            *((field, (value,)) for field, value in FORM.items()),
            ("activation", self.activations), ("d_head", (d_head,)),
            ("attn_scale", scales), ("attn_scale_by_depth", (False, True) if self.by_depth else (False,)),
        ]  # fmt: skip
        for field, supported in rules:
            value = getattr(config, field)
            if not any(value == each or (type(value) is float and math.isclose(value, each)) for each in supported):
                choices = (f"{each:g}" if type(each) is float else repr(each) for each in supported)
                yield field, value, " or ".join(choices)
        if config.d_mlp == 0:
            yield "d_mlp", 0, "an MLP in every block"
        if config.d_head < self.least_head:
            yield "d_head", config.d_head, f"{self.least_head} or more"
        if config.n_layer < self.least_blocks:
            yield "n_layer", config.n_layer, f"{self.least_blocks} or more"

    def require(self, config: ModelConfig) -> None:
        """Raise ConfigError with every field whose value is not supported."""
        misfits = [f"{field} {value!r} (supported: {supported})" for field, value, supported in self.misfits(config)]
        if misfits:
            raise ConfigError(
                f"{self.name} does not support {'; '.join(misfits)}; mainstem export safetensors supports every model"
            )
