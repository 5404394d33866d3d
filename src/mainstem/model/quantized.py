"""Quantized weights: the same model with its matrices in fewer bytes, for reading and generating, not for training.

What is stored narrow are the linear layers' matrices and the token embedding: they are nearly all of a model, and what
a step of generation waits for. Norms, biases, gains and positions stay as they are. Every matrix is widened where it is
used, so all that reads `.weight` reads what the model computes with.
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
"""How matrices may be stored; `fp32`, as they were trained."""
LEVELS = 127
"""int8 holds -127 to 127 times a row's scale; -128 is not used."""
DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
"""Of a narrow matrix."""


class Matrix(nn.Module):
    """A matrix in few bytes; one module where two layers share it."""

    stored: Tensor
    """(rows, columns), bfloat16 or int8."""
    scale: Tensor | None
    """(rows,), float32: what a row of int8 is multiplied by; None for bfloat16."""

    def __init__(self, stored: Tensor, scale: Tensor | None):
        super().__init__()
        self.register_buffer("stored", stored)
        self.register_buffer("scale", scale)

    @property
    def weights(self) -> Weights:
        """How it is stored."""
        return "bf16" if self.scale is None else "int8"

    def widened(self, rows: Tensor | None = None) -> Tensor:
        """The rows that are asked for, (..., columns), all if None; float32 unless the module was made float64."""
        stored = self.stored if rows is None else F.embedding(rows, self.stored)
        if self.scale is None:
            return stored.to(torch.promote_types(stored.dtype, torch.float32))
        return stored.to(self.scale.dtype) * (self.scale if rows is None else self.scale[rows])[..., None]


class Quantized(nn.Module):
    """A layer whose matrix is narrow. Mixed in before the PyTorch class whose place it takes."""

    matrix: Matrix

    @property
    def weight(self) -> Tensor:
        """The matrix as it is used, (rows, columns); a new one at every call."""
        return self.matrix.widened()

    def train(self, mode: bool = True) -> "Quantized":
        """Evaluation mode alone: raises ConfigError for the other."""
        if mode:
            have = self.matrix.weights
            raise ConfigError(f"{have} weights cannot be trained; take the model that they were made from")
        return super().train(False)


class QuantizedLinear(Quantized, nn.Linear):  # type: ignore[override]
    """x W^T + b with a narrow W."""

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None = None):
        nn.Module.__init__(self)
        self.matrix = matrix
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = matrix.stored.shape


class QuantizedEmbedding(Quantized, nn.Embedding):  # type: ignore[override]
    """Rows of a narrow matrix; only those that are asked for are widened."""

    def __init__(self, matrix: Matrix):
        nn.Module.__init__(self)
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.stored.shape

    def forward(self, ids: Tensor) -> Tensor:
        """(...) -> (..., columns)."""
        return self.matrix.widened(ids)

    def extra_repr(self) -> str:
        """The shape, in the module's printed form."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


def weights_of(model: GPT) -> Weights:
    """How a model's matrices are stored."""
    return model.wte.matrix.weights if isinstance(model.wte, Quantized) else "fp32"


def quantize(model: GPT, weights: str) -> GPT:
    """A new model with the same config and its matrices stored narrow, in evaluation mode; the source is untouched.

    Args:
        model: any GPT whose matrices are not narrow yet.
        weights: `bf16` rounds to bfloat16; `int8` rounds each row to a multiple of its largest value / 127, so that
            no weight moves by more than half of that (a row is an output of a layer, or a token).

    Raises ConfigError for another name, a model that is narrow, and weights that are not finite or too large.
    """
    if weights not in DTYPES:
        raise ConfigError(f"weights: unknown value {weights!r}; {nearest(weights, DTYPES)}")
    if (have := weights_of(model)) != "fp32":
        raise ConfigError(f"weights: the model's are {have} already; narrow the one that it was made from")
    put: dict[int, Any] = {}  # what the copy has in a module's place, by the module's id
    shared = _rounded(model.wte.weight, weights, "wte")
    put[id(model.wte)] = QuantizedEmbedding(shared)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            matrix = shared if layer.weight is model.wte.weight else _rounded(layer.weight, weights, name)
            bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
            put[id(layer)] = QuantizedLinear(matrix, bias)
    return copy.deepcopy(model, put).requires_grad_(False).eval()


@torch.no_grad()
def _rounded(weight: Tensor, weights: str, name: str) -> Matrix:
    """The matrix of the layer of that name, narrow."""
    weight = weight.detach()
    scale = None
    if weights == "bf16":
        stored = weight.to(torch.bfloat16)
        sound = torch.isfinite(stored).all()
    else:
        scale = weight.abs().amax(1).float() / LEVELS  # (rows,)
        steps = weight / torch.where(scale > 0, scale, torch.inf)[:, None]  # a row of zeros stays one
        sound = torch.isfinite(scale).all()
        stored = steps.round().clamp(-LEVELS, LEVELS).to(torch.int8)
    if not sound:
        raise ConfigError(f"weights: {name} has weights that {weights} cannot hold; open an earlier checkpoint")
    return Matrix(stored, scale)


def tensors(model: GPT) -> dict[str, Tensor]:
    """Every tensor of a model by name, each once, as a checkpoint holds it.

    Those of a float32 model are the model's own, not copies. A parameter has its own name; a narrow matrix has the
    name that it would have as a parameter, its scales `{layer}.scale`. A tied matrix is under the embedding's name.
    """
    found: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, Matrix):
            layer = name.removesuffix(".matrix")
            found[f"{layer}.weight"] = module.stored.to(DTYPES[module.weights])
            if module.scale is not None:
                found[f"{layer}.scale"] = module.scale.float()
    return found
