"""The MLP branch, which reads each position of the stream by itself."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.config import GATED, ModelConfig
from mainstem.model.init import Initialiser
from mainstem.model.tap import Tap, replaced, touch


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # Hendrycks and Gimpel 2016: x Phi(x), by erf
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # its tanh approximation, as in GPT-2 and ANDREA
    "relu": F.relu,
    "relu2": _relu2,  # Primer, So et al. 2021
    "swiglu": F.silu,  # Shazeer 2020: the gate's activation
    "geglu": F.gelu,
}

NEAR_ZERO = 0.01
"""An activation below this in magnitude counts as near zero."""


class MLP(nn.Module):
    """The MLP c_proj(act(c_fc x)), or gated c_proj(act(gate x) * up x), where gate and up are the halves of c_fc."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation in GATED
        self.activation = ACTIVATIONS[config.activation]
        self.c_fc = nn.Linear(config.d_model, config.d_mlp * (2 if self.gated else 1), bias=config.bias)
        self.c_proj = nn.Linear(config.d_mlp, config.d_model, bias=config.bias)
        self.gelu_bias: Callable[[Tensor, Tensor], Tensor] | None = None
        """A fused activation(product + bias), if `gelu_backend.choose_gelu` has set one."""
        self.dropout = nn.Dropout(config.mlp_dropout) if config.mlp_dropout else nn.Identity()

    def init_weights(self, init: Initialiser, name: str) -> None:
        """Draw both matrices; the halves of a gated c_fc have their own fan-in and fan-out. `name` is the module's."""
        halves = ("gate", "up") if self.gated else ("",)
        for half, weight in zip(halves, self.c_fc.weight.chunk(len(halves)), strict=True):
            init.matrix(f"{name}.c_fc.weight.{half}".rstrip("."), weight, init.branch)
        init.matrix(f"{name}.c_proj.weight", self.c_proj.weight, init.out)
        init.zero(self.c_fc.bias)
        init.zero(self.c_proj.bias)

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """The output of the MLP, (B, T, C) -> (B, T, C)."""
        return self.c_proj(touch(tap, "mlp.post", self.dropout(self._hidden(x, tap))))

    def _hidden(self, x: Tensor, tap: Tap | None) -> Tensor:
        """The hidden layer, (B, T, M), before dropout."""
        if self.gated:
            gate, up = self.c_fc(x).chunk(2, dim=-1)  # each (B, T, M)
            return self.activation(touch(tap, "mlp.pre", gate)) * up
        if self.gelu_bias is None or x.dtype != torch.float32:
            return self.activation(touch(tap, "mlp.pre", self.c_fc(x)))
        product, bias = F.linear(x, self.c_fc.weight), self.c_fc.bias
        pre = replaced(tap, "mlp.pre", lambda: (product + bias).to(product.dtype))
        return self.gelu_bias(product, bias) if pre is None else self.activation(pre)
