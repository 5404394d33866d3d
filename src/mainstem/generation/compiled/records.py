"""NumPy records of a model for the compiled step: addresses and sizes, one record per block, without copies.

The records point into the model's tensors, so they remain valid when weights change in place. An unused slot has
address 0. Addresses are int64; data behind them is float32, except quantized matrices.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mainstem.config import GATED
from mainstem.model.attention import Attention, rotation
from mainstem.model.gpt import GPT
from mainstem.model.norms import Empty, LayerNorm
from mainstem.model.quantized import DTYPES, Quantized, weights_of
from mainstem.model.sublayer import Constant, Gain, Join

ADDRESS = INT = np.int64
MATRIX = np.dtype(
    [("weight", ADDRESS), ("scale", ADDRESS), ("bias", ADDRESS), ("outputs", INT), ("inputs", INT)], align=True
)
"""A matrix: weights (outputs, inputs), row by row, a scale per row for int8, and a bias per output."""
NORM = np.dtype([("kind", INT), ("gain", ADDRESS), ("bias", ADDRESS), ("eps", np.float32)], align=True)
NO_NORM, LAYERNORM, RMSNORM = range(3)
JOIN = np.dtype(
    [
        ("ln_in", NORM), ("ln_out", NORM), ("ln_add", NORM), ("skip", np.float32), ("damp", np.float32),
        ("gain", ADDRESS), ("gain_step", INT),
    ],
    align=True,
)  # fmt: skip
"""The residual equation's slots; the gain's step is 0 for a scalar, 1 for a vector."""
BLOCK = np.dtype(
    [
        ("res_1", JOIN), ("c_attn", MATRIX), ("q_norm", NORM), ("k_norm", NORM), ("attn_scale", np.float32),
        ("attn_proj", MATRIX), ("res_2", JOIN), ("c_fc", MATRIX), ("mlp_proj", MATRIX),
    ],
    align=True,
)  # fmt: skip
MODEL = np.dtype(
    [
        ("wte", MATRIX), ("wpe", ADDRESS), ("cos", ADDRESS), ("sin", ADDRESS), ("ln_f", NORM), ("head", MATRIX),
        ("ones", ADDRESS), ("n_head", INT), ("d_head", INT), ("d_mlp", INT), ("activation", INT), ("gated", INT),
    ],
    align=True,
)  # fmt: skip
"""A model. cos, sin: (n_ctx, d_head / 2), of the rotary angles of every position; ones: as wide as the widest norm."""
POSITION = np.dtype([("id", INT), ("row", INT), ("column", INT), ("place", INT), ("first", INT)])
"""A token, its row and column in the cache, its position in the text, and the first column of its row after padding."""
WORK = np.dtype(
    [
        ("threads", INT), ("rows", INT), ("capacity", INT), ("sync", ADDRESS), ("own", ADDRESS),
        ("own_bytes", INT), ("scores", ADDRESS), ("scores_bytes", INT), ("qkv", ADDRESS), ("z", ADDRESS),
        ("attn_write", ADDRESS), ("post", ADDRESS), ("up", ADDRESS), ("mlp_write", ADDRESS), ("logits", ADDRESS),
        ("keys", ADDRESS), ("values", ADDRESS), ("block_bytes", INT), ("row_bytes", INT), ("head_bytes", INT),
    ],
    align=True,
)  # fmt: skip
"""Buffers of a step: the threads' counters (`sync`), per-thread buffers (`own`, `scores`), shared buffers, and the KV
cache. `rows` of the cache have equally many positions each."""
LINE = 64
"""Bytes of a cache line; counters that threads write are that far apart."""
ARRIVED, ABANDONED, CLAIMS = 0, LINE, 2 * LINE
"""Offsets in `sync`: barrier arrivals, whether the step is abandoned, and claimed pieces."""
PHASES = 5
"""Phases of a block; the unembedding is one more."""
GELU, GELU_TANH, RELU, RELU2, SILU = range(5)
ACTIVATIONS = {"gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU, "relu2": RELU2, "swiglu": SILU, "geglu": GELU}
STORED = {"fp32": np.float32, "bf16": np.uint16, "int8": np.int8}
"""The NumPy type of stored weights; bfloat16 as its bits."""


class ModelRecords:
    """The records of one model; it keeps the tensors alive that they point to.

    Args:
        model: a supported model (`unsupported` is None).
    """

    def __init__(self, model: GPT):
        config = model.config
        self.weights = weights_of(model)
        self.like = np.empty(0, STORED[self.weights])
        self._alive: list[Tensor] = []  # the tensors behind the addresses
        self.model, self.blocks = np.zeros(1, MODEL), np.zeros(len(model.blocks), BLOCK)
        whole: Any = self.model[0]
        whole["wte"] = self._matrix(model.wte)
        if model.wpe is not None:
            whole["wpe"] = self._address(model.wpe.weight)
        if config.position == "rotary":
            angles = rotation(torch.arange(config.n_ctx)[None], config.d_head, config.rope_base, torch.float32)
            whole["cos"], whole["sin"] = map(self._address, angles)
        whole["ln_f"], whole["head"] = self._norm(model.ln_f), self._matrix(model.lm_head)
        whole["ones"] = self._address(torch.ones(max(config.d_model, config.d_head)))
        for name in ("n_head", "d_head", "d_mlp"):
            whole[name] = getattr(config, name)
        whole["activation"], whole["gated"] = ACTIVATIONS[config.activation], config.activation in GATED
        for site in model.joins():
            record, branch = self.blocks[site.block], site.branch
            record[site.join.name] = self._join(site.join)
            into = "c_attn" if site.kind == "attn" else "c_fc"
            record[into], record[f"{site.kind}_proj"] = (
                self._matrix(getattr(branch, into)), self._matrix(branch.c_proj)
            )  # fmt: skip
            if isinstance(branch, Attention):
                record["attn_scale"] = branch.scale
                if config.qk_norm:
                    record["q_norm"], record["k_norm"] = self._norm(branch.q_norm), self._norm(branch.k_norm)

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that a step reads for one token: every matrix except the embedding, and the unembedding."""
        width = self.like.itemsize
        matrices = [block[name] for block in self.blocks for name in ("c_attn", "attn_proj", "c_fc", "mlp_proj")]
        return width * sum(int(m["outputs"] * m["inputs"]) for m in [*matrices, self.model[0]["head"]])

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        tensor = tensor.detach().contiguous()
        if tensor.dtype in (torch.bfloat16, torch.int8):
            self._alive.append(tensor)
        else:
            self._alive.append(tensor := tensor.float())
        return tensor.data_ptr()

    def _matrix(self, layer: Any) -> tuple:
        quantized = isinstance(layer, Quantized)
        stored, scale = (layer.matrix.stored, layer.matrix.scale) if quantized else (layer.weight, None)
        return self._address(stored), self._address(scale), self._address(getattr(layer, "bias", None)), *stored.shape

    def _norm(self, norm: Any) -> tuple:
        if isinstance(norm, Empty):
            return NO_NORM, 0, 0, 0.0
        kind = LAYERNORM if isinstance(norm, LayerNorm) else RMSNORM
        return kind, self._address(norm.weight), self._address(getattr(norm, "bias", None)), norm.eps

    def _join(self, join: Join) -> tuple:
        skip, damp = (part.value if isinstance(part, Constant) else 1.0 for part in (join.skip, join.damp))
        gain = join.gain.weight if isinstance(join.gain, Gain) else None
        norms = (self._norm(norm) for norm in (join.ln_in, join.ln_out, join.ln_add))
        return *norms, skip, damp, self._address(gain), int(gain is not None and gain.ndim > 0)


_PLAIN = {nn.Embedding, nn.Linear, nn.Identity, nn.Dropout, nn.ModuleList}


def unsupported(model: GPT) -> str | None:
    """The first feature of a model that the compiled step does not support; None if it supports the model.

    It supports every GPT in float32 on the CPU. Subclasses, hooks, replaced methods, and blocks that were removed or
    added may compute something else and are not supported.
    """
    if type(model) is not GPT:
        return f"{type(model).__name__} is not GPT itself"
    if len(model.blocks) != model.config.n_layer:
        return f"the model has {len(model.blocks)} blocks, and `n_layer` is {model.config.n_layer}"
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        return "every module has a hook"
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("mainstem.model.") and type(module) not in _PLAIN:
            return f"{name} is a {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has a hook"
        for own in vars(module):
            if callable(getattr(type(module), own, None)):
                return f"{name or 'the model'} has a {own} of its own"
    stored = DTYPES.get(weights_of(model), torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        expected = stored if name.endswith(".stored") else torch.float32
        if tensor.dtype != expected or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} on {tensor.device}"
    return None
