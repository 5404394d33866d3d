"""Quantized weights: a model with its matrices in bfloat16 or int8, for inference, not for training.

Quantized are the matrices of linear layers and the token embedding: nearly all of a model's bytes, and the limit of the
speed of decoding. Norms, biases, gains and position embeddings stay float32. A matrix is dequantized where it is used,
so `.weight` is the matrix that the model computes with.
"""

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.errors import ConfigError, nearest
from mainstem.model.gpt import GPT

Weights = Literal["fp32", "bf16", "int8"]
WEIGHTS = ("fp32", "bf16", "int8")
"""The storage formats of matrices; `fp32` is not quantized."""
LEVELS = 127
"""int8 values are -127 to 127, times a scale per row; -128 is not used."""
DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
"""The dtypes of quantized matrices."""


class Matrix(nn.Module):
    """A quantized matrix; one module where two layers share it."""

    stored: Tensor
    """The quantized values, (rows, columns), bfloat16 or int8."""
    scale: Tensor | None
    """The scale of each row of int8, (rows,), float32; None for bfloat16."""

    def __init__(self, stored: Tensor, scale: Tensor | None):
        super().__init__()
        self.register_buffer("stored", stored)
        self.register_buffer("scale", scale)

    @property
    def weights(self) -> Weights:
        """The storage format: `bf16` or `int8`."""
        return "bf16" if self.scale is None else "int8"

    def widened(self, rows: Tensor | None = None) -> Tensor:
        """The dequantized rows, (..., columns), all if None; float32 unless the module was converted to float64."""
        stored = self.stored if rows is None else F.embedding(rows, self.stored)
        if self.scale is None:
            return stored.to(torch.promote_types(stored.dtype, torch.float32))
        return stored.to(self.scale.dtype) * (self.scale if rows is None else self.scale[rows])[..., None]


class Quantized(nn.Module):
    """A layer with a quantized matrix; a mixin before the PyTorch class that it replaces."""

    matrix: Matrix

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix, (rows, columns); a new tensor at every call."""
        return self.matrix.widened()

    def train(self, mode: bool = True) -> "Quantized":
        """Set evaluation mode. Raises ConfigError for training mode."""
        if mode:
            weights = self.matrix.weights
            raise ConfigError(f"{weights} weights cannot be trained; use the model that they were quantized from")
        return super().train(False)


class QuantizedLinear(Quantized, nn.Linear):  # type: ignore[override]
    """A linear layer x W^T + b with a quantized W."""

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None = None):
        nn.Module.__init__(self)
        self.matrix = matrix
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = matrix.stored.shape


class QuantizedEmbedding(Quantized, nn.Embedding):  # type: ignore[override]
    """An embedding with a quantized matrix; only the rows of the ids are dequantized."""

    def __init__(self, matrix: Matrix):
        nn.Module.__init__(self)
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.stored.shape

    def forward(self, ids: Tensor) -> Tensor:
        """The embeddings of ids, (...) -> (..., columns)."""
        return self.matrix.widened(ids)

    def extra_repr(self) -> str:
        """The shape, in the module's printed form."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


def weights_of(model: GPT) -> Weights:
    """The storage format of a model's matrices: `fp32`, `bf16` or `int8`."""
    return model.wte.matrix.weights if isinstance(model.wte, Quantized) else "fp32"


def quantize(model: GPT, weights: str) -> GPT:
    """A quantized copy of a model, in evaluation mode: `ms.quantize(model, "int8")`. The model itself is unchanged.

    Args:
        model: any GPT that is not quantized.
        weights: `bf16` rounds to bfloat16; `int8` rounds each row to a multiple of its largest value / 127, so that
            no weight moves by more than half of that (a row is an output of a layer, or a token).

    Raises ConfigError for another name, a quantized model, and weights that are not finite or too large.
    """
    if weights not in DTYPES:
        raise ConfigError(f"weights: unknown value {weights!r}; {nearest(weights, DTYPES)}")
    if (stored := weights_of(model)) != "fp32":
        raise ConfigError(f"weights: the model is {stored} already; quantize the model that it was made from")
    replacements: dict[int, Any] = {}  # the copy's module, by the id of the original (deepcopy's memo)
    shared = _rounded(model.wte.weight, weights, "wte")
    replacements[id(model.wte)] = QuantizedEmbedding(shared)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            matrix = shared if layer.weight is model.wte.weight else _rounded(layer.weight, weights, name)
            bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
            replacements[id(layer)] = QuantizedLinear(matrix, bias)
    return copy.deepcopy(model, replacements).requires_grad_(False).eval()


@torch.no_grad()
def _rounded(weight: Tensor, weights: str, name: str) -> Matrix:
    """The quantized matrix of a layer, by the layer's name for errors."""
    weight = weight.detach()
    scale = None
    if weights == "bf16":
        stored = weight.to(torch.bfloat16)
        finite = torch.isfinite(stored).all()
    else:
        scale = weight.abs().amax(1).float() / LEVELS  # (rows,)
        steps = weight / torch.where(scale > 0, scale, torch.inf)[:, None]  # a row of zeros stays one
        finite = torch.isfinite(scale).all()
        stored = steps.round().clamp(-LEVELS, LEVELS).to(torch.int8)
    if not finite:
        raise ConfigError(f"weights: {name} has weights that {weights} cannot represent; open an earlier checkpoint")
    return Matrix(stored, scale)


def tensors(model: GPT) -> dict[str, Tensor]:
    """Every tensor of a model by its name in a checkpoint, each once.

    The tensors of a float32 model are not copied. A quantized matrix has the name of the parameter that it replaces;
    its scales are `{layer}.scale`. A tied matrix has the embedding's name.
    """
    by_name: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, Matrix):
            layer = name.removesuffix(".matrix")
            by_name[f"{layer}.weight"] = module.stored.to(DTYPES[module.weights])
            if module.scale is not None:
                by_name[f"{layer}.scale"] = module.scale.float()
    return by_name
