"""Export GGUF files of architecture `gpt2`, which llama.cpp runs, with the `gguf` package. Import is not supported.

Source of names and keys: the GGUF specification and llama.cpp's graph of `gpt2`, which has tanh-GELU, biases in all
linear layers, and attention scores q.k / sqrt(d_head).
"""

import contextlib
import errno
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mainstem.atomic import new_file
from mainstem.errors import ConfigError, DataError, RunError, UserError, nearest
from mainstem.formats import keys
from mainstem.formats.gpt2 import Layout
from mainstem.formats.hf import tokenizer as hf_tokenizer
from mainstem.formats.vocabulary import check, trimmed
from mainstem.model.gpt import GPT
from mainstem.text.tokenizer import Tokenizer, spelled

LAYOUT = Layout("GGUF's gpt2", ("gelu_tanh",), least_blocks=1, least_head=2)
KEYS = keys.KeyMap(
    {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"},
    blocks={
        "res_1.ln_in": "blk.*.attn_norm", "res_2.ln_in": "blk.*.ffn_norm",
        "attn.c_attn": "blk.*.attn_qkv", "attn.c_proj": "blk.*.attn_output",
        "mlp.c_fc": "blk.*.ffn_up", "mlp.c_proj": "blk.*.ffn_down",
    },
)  # fmt: skip
DTYPES = {"f32": ("F32", "ALL_F32"), "f16": ("F16", "MOSTLY_F16"), "q8_0": ("Q8_0", "MOSTLY_Q8_0")}
"""Dtypes of the matrices: gguf's tensor type and file type."""
BLOCK_SIZE = 32
"""Weights that share a scale in Q8_0; the length of a row must be a multiple of it."""
_LARGEST = {"F16": 65504, "Q8_0": 65504 * 127}
"""The largest weight of each tensor type; for Q8_0 it follows from the half-precision scale of a block."""


def write(
    path: Path, model: GPT, tokenizer: Tokenizer | None, weights: str = "f32", facts: Mapping[str, str] | None = None
) -> None:
    """Write a model as a GGUF file, atomically; padding rows of the vocabulary are dropped.

    Args:
        path: the file; an existing GGUF file is replaced.
        model: any model that the layout supports; quantized matrices are dequantized.
        tokenizer: byte-level BPE or bytes. None: llama.cpp then works with token ids.
        weights: GGUF type of the matrices and the embedding, a key of DTYPES; positions, norms and biases are float32.
        facts: for `general.*`, such as name, license and description.

    Raises ConfigError as `Layout.require` does and for a type that the shapes do not allow, DataError for a tokenizer
    that is not supported, RunError if the path is a file of another kind, UserError if gguf is not installed,
    TrainingFailed on a full disk.

    >>> gguf.write(Path("model.gguf"), *mainstem.load("runs/demo"), weights="q8_0")
    """
    gguf, config = _package(), model.config
    replaceable(path)
    LAYOUT.require(config)
    if weights not in DTYPES:
        raise ConfigError(f"weights: unknown value {weights!r}; {nearest(weights, DTYPES)}")
    if weights == "q8_0" and (odd := [n for n in (config.d_model, config.d_mlp) if n % BLOCK_SIZE]):
        raise ConfigError(f"weights: q8_0 needs rows of a multiple of {BLOCK_SIZE} weights, not {odd[0]}; use f16")
    vocab_size = config.vocab_size if tokenizer is None else check(config.vocab_size, tokenizer, path)
    if tokenizer is not None:
        _require_tokenizer(tokenizer)
    tensor_type, file_type = DTYPES[weights]
    with new_file(path) as temporary, contextlib.closing(gguf.GGUFWriter(str(temporary), "gpt2")) as file:
        for name, value in {"name": path.stem, **(facts or {})}.items():
            file.add_string(f"general.{name}", value)
        file.add_file_type(gguf.LlamaFileType[file_type])
        file.add_quantization_version(gguf.GGML_QUANT_VERSION)
        file.add_context_length(config.n_ctx)
        file.add_embedding_length(config.d_model)
        file.add_block_count(config.n_layer)
        file.add_feed_forward_length(config.d_mlp)
        file.add_head_count(config.n_head)
        file.add_layer_norm_eps(config.norm_eps)
        file.add_vocab_size(vocab_size)
        if tokenizer is None:
            file.add_tokenizer_model("no_vocab")
        else:
            _add_tokenizer(file, gguf, tokenizer)
        for name, tensor in KEYS.write(trimmed(keys.weights(model), vocab_size)).items():
            _add_tensor(file, gguf, name, tensor, tensor_type)
        try:
            file.write_header_to_file()
            file.write_kv_data_to_file()
            file.write_tensors_to_file()
        except OSError as error:  # NumPy gives no errno for a short write
            raise error if error.errno else OSError(errno.ENOSPC, "the file was written in part", str(path)) from None


def replaceable(path: Path) -> None:
    """Raise RunError if `path` is an existing file that is not GGUF."""
    if path.is_file() and path.stat().st_size:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise RunError(f"{path}: exists and is not a GGUF file; choose another name")


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(f"export to GGUF needs the package gguf ({error}): pip install 'mainstem[gguf]'") from None


def _add_tensor(file: Any, gguf: Any, name: str, tensor: Tensor, tensor_type: str) -> None:
    """Add a tensor: matrices in `tensor_type`; the position embedding, norms and biases in float32."""
    kind = tensor_type if tensor.ndim == 2 and not name.startswith("position_embd") else "F32"
    if kind in _LARGEST and (largest := float(tensor.abs().max())) > _LARGEST[kind]:
        raise ConfigError(f"weights: {name} has {largest:.3g}, and {kind} ends at {_LARGEST[kind]:,}; use f32")
    stored = gguf.GGMLQuantizationType[kind]
    file.add_tensor(name, gguf.quants.quantize(tensor.cpu().numpy(), stored), raw_dtype=stored)


def _require_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise DataError for a tokenizer that the format does not support."""
    if tokenizer.kind == "char":
        raise DataError(
            "GGUF's gpt2 does not support tokenizers of kind char, only byte-level BPE; use mainstem export hf"
        )
    if tokenizer.eot_id is None:
        raise DataError(
            f"GGUF's gpt2 does not support a tokenizer without an end-of-text token ({tokenizer.end_of_text}): "
            "llama.cpp would use id 11; use mainstem export hf"
        )


def _add_tokenizer(file: Any, gguf: Any, tokenizer: Tokenizer) -> None:
    """Add the tokens, their types, and the merges."""
    kinds, added = gguf.TokenType, hf_tokenizer.added(tokenizer)
    tokens = [
        (added[i][0], kinds.CONTROL if added[i][1] else kinds.USER_DEFINED) if i in added
        else (spelled(piece), kinds.NORMAL) if piece
        else (f"<|unused {i}|>", kinds.UNUSED)
        for i, piece in enumerate(tokenizer.token_bytes)
    ]  # fmt: skip
    end = tokenizer.end_of_text
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list([token for token, _ in tokens])
    file.add_token_types([kind for _, kind in tokens])
    # llama.cpp requires merges; this one never applies, since pieces start as single characters
    file.add_token_merges(hf_tokenizer.merges(tokenizer) or [f"{end} {end}"])
    file.add_bos_token_id(tokenizer.eot_id)
    file.add_eos_token_id(tokenizer.eot_id)
    file.add_add_bos_token(False)


def left_out(tokenizer: Tokenizer | None) -> list[str]:
    """Notes on what the file does not hold, one sentence each."""
    if tokenizer is None:
        return ["no tokenizer: llama.cpp reads and returns token ids"]
    if (why := hf_tokenizer.unlike_gpt2(tokenizer)) is not None:
        return [f"llama.cpp tokenizes by GPT-2's pattern and by merges, but this tokenizer has {why}; ids may differ"]
    return []
