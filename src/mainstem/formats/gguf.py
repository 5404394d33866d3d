"""GGUF files of architecture `gpt2`, which llama.cpp runs: written, not read, through the `gguf` package.

Source of names and keys: the specification of GGUF and llama.cpp's graph of `gpt2`, which has tanh-GELU, biases
everywhere, and q.k over the square root of a head's width.
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
"""How matrices are stored: gguf's name for a tensor's type, and for the file's."""
BLOCK_SIZE = 32
"""Weights that share a scale in Q8_0; a row is a number of whole blocks."""
_LARGEST = {"F16": 65504, "Q8_0": 65504 * 127}
"""What a weight can be; of Q8_0, by the half-precision scale of its block."""


def write(
    path: Path, model: GPT, tokenizer: Tokenizer | None, weights: str = "f32", facts: Mapping[str, str] | None = None
) -> None:
    """Write a file, whole or not at all; rows past the tokenizer's ids are left out.

    Args:
        path: the file; a GGUF file that is there is replaced.
        model: any that the layout holds; quantized matrices are dequantized first.
        tokenizer: a byte-level BPE, or bytes. Without one the file takes ids and gives ids.
        weights: GGUF type of the matrices and the embedding, a key of DTYPES; positions, norms and biases are float32.
        facts: for `general.*`, such as name, license and description.

    Raises ConfigError as `Layout.require` does and for a type that the shapes do not allow, DataError for a tokenizer
    that the format cannot hold, RunError where another kind of file is there, UserError where gguf is not installed,
    TrainingFailed on a full disk.
    """
    gguf, config = _package(), model.config
    replaceable(path)
    LAYOUT.require(config)
    if weights not in DTYPES:
        raise ConfigError(f"weights: unknown value {weights!r}; {nearest(weights, DTYPES)}")
    if weights == "q8_0" and (odd := [n for n in (config.d_model, config.d_mlp) if n % BLOCK_SIZE]):
        raise ConfigError(f"weights: q8_0 stores blocks of {BLOCK_SIZE} weights, and a row here has {odd[0]}; take f16")
    vocab_size = config.vocab_size if tokenizer is None else check(config.vocab_size, tokenizer, path)
    if tokenizer is not None:
        _refuse(tokenizer)
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
        except OSError as error:  # of a write that was cut short NumPy says no number
            raise error if error.errno else OSError(errno.ENOSPC, "the disk took a part alone", str(path)) from None


def replaceable(path: Path) -> None:
    """Raise RunError where another kind of file would be replaced."""
    if path.is_file() and path.stat().st_size:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise RunError(f"{path}: it is there and is no GGUF file; choose another name")


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(f"GGUF files are written by the package gguf ({error}): pip install 'mainstem[gguf]'") from None


def _add_tensor(file: Any, gguf: Any, name: str, tensor: Tensor, tensor_type: str) -> None:
    """A matrix in the type that was asked for; positions are looked up and added, so they stay float32."""
    kind = tensor_type if tensor.ndim == 2 and not name.startswith("position_embd") else "F32"
    if kind in _LARGEST and (largest := float(tensor.abs().max())) > _LARGEST[kind]:
        raise ConfigError(f"weights: {name} has {largest:.3g}, and {kind} ends at {_LARGEST[kind]:,}; take f32")
    stored = gguf.GGMLQuantizationType[kind]
    file.add_tensor(name, gguf.quants.quantize(tensor.cpu().numpy(), stored), raw_dtype=stored)


def _refuse(tokenizer: Tokenizer) -> None:
    """DataError for a tokenizer that the format cannot hold."""
    if tokenizer.kind == "char":
        raise DataError(
            "GGUF's gpt2 cannot hold a tokenizer of kind char (it has byte-level BPE); mainstem export hf holds it"
        )
    if tokenizer.eot_id is None:
        raise DataError(
            f"GGUF's gpt2 cannot hold a tokenizer without an end of text ({tokenizer.end_of_text}): llama.cpp would "
            "take id 11 for it; mainstem export hf holds it"
        )


def _add_tokenizer(file: Any, gguf: Any, tokenizer: Tokenizer) -> None:
    """Tokens, their kinds, and merges."""
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
    # llama.cpp asks for merges; this one never applies, for a piece begins as single characters
    file.add_token_merges(hf_tokenizer.merges(tokenizer) or [f"{end} {end}"])
    file.add_bos_token_id(tokenizer.eot_id)
    file.add_eos_token_id(tokenizer.eot_id)
    file.add_add_bos_token(False)


def left_out(tokenizer: Tokenizer | None) -> list[str]:
    """What a file does not say, one sentence each."""
    if tokenizer is None:
        return ["no tokenizer: llama.cpp takes ids and gives ids"]
    if (why := hf_tokenizer.unlike_gpt2(tokenizer)) is not None:
        return [f"llama.cpp makes ids by GPT-2's pattern and by merges, and this tokenizer has {why}; ids may differ"]
    return []
