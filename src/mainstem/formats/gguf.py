"""GGUF files of architecture `gpt2`, which llama.cpp runs: written, not read, through the `gguf` package.

Source of names and keys: the specification of GGUF and llama.cpp's graph of `gpt2`, which has tanh-GELU, biases
everywhere, and q.k over the square root of a head's width.
"""

import contextlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mainstem.durable import whole_file
from mainstem.errors import ConfigError, DataError, UserError, nearest
from mainstem.formats.gpt2 import Layout
from mainstem.formats.hf import tokenizer as hf_tokenizer
from mainstem.formats.keys import KeyMap, weights
from mainstem.formats.vocabulary import check, trimmed
from mainstem.model.gpt import GPT
from mainstem.text.tokenizer import END_OF_TEXT, Tokenizer, byte_alphabet

LAYOUT = Layout("GGUF's gpt2", ("gelu_tanh",), least_blocks=1)
KEYS = KeyMap(
    {
        "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output",
        "blocks.*.res_1.ln_in": "blk.*.attn_norm", "blocks.*.res_2.ln_in": "blk.*.ffn_norm",
        "blocks.*.attn.c_attn": "blk.*.attn_qkv", "blocks.*.attn.c_proj": "blk.*.attn_output",
        "blocks.*.mlp.c_fc": "blk.*.ffn_up", "blocks.*.mlp.c_proj": "blk.*.ffn_down",
    }
)  # fmt: skip
DTYPES = {"f32": ("F32", "ALL_F32"), "f16": ("F16", "MOSTLY_F16"), "q8_0": ("Q8_0", "MOSTLY_Q8_0")}
"""How matrices are stored: gguf's name for a tensor's type, and for the file's."""
GROUP = 32
"""Weights that share a scale in Q8_0; a row is a number of whole groups."""


def write(
    path: Path, model: GPT, tokenizer: Tokenizer | None, dtype: str = "f32", facts: Mapping[str, str] | None = None
) -> None:
    """Write a file, whole or not at all; rows past the tokenizer's ids are left out.

    Args:
        path: the file; one that is there is replaced.
        model: any that the layout holds; narrow matrices are widened first.
        tokenizer: a byte-level BPE, or bytes. Without one the file takes ids and gives ids.
        dtype: of the matrices and the embedding, a key of DTYPES; positions, norms and biases are float32.
        facts: for `general.*`, such as name, license and description.

    Raises ConfigError as `Layout.require` does and for a dtype that the shapes do not allow, DataError for a tokenizer
    that the format cannot hold, UserError where gguf is not installed, TrainingFailed on a full disk.
    """
    gguf, config = _package(), model.config
    LAYOUT.require(config)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: unknown value {dtype!r}; {nearest(dtype, DTYPES)}")
    if dtype == "q8_0" and (odd := [n for n in (config.d_model, config.d_mlp) if n % GROUP]):
        raise ConfigError(f"dtype: q8_0 groups {GROUP} weights, and a row here has {odd[0]}; take f16")
    vocab_size = config.vocab_size if tokenizer is None else check(config.vocab_size, tokenizer, path)
    pieces = None if tokenizer is None else _pieces(tokenizer)
    tensor_type, file_type = DTYPES[dtype]
    with whole_file(path) as temporary, contextlib.closing(gguf.GGUFWriter(str(temporary), "gpt2")) as file:
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
        _add_tokenizer(file, gguf, tokenizer, pieces)
        for name, tensor in KEYS.write(trimmed(weights(model), vocab_size)).items():
            _add_tensor(file, gguf, name, tensor, tensor_type)
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(f"GGUF files are written by the package gguf ({error}): pip install 'mainstem[gguf]'") from None


def _add_tensor(file: Any, gguf: Any, name: str, tensor: Tensor, tensor_type: str) -> None:
    """A matrix in the type that was asked for; positions are looked up and added, so they stay float32."""
    kind = tensor_type if tensor.ndim == 2 and not name.startswith("position_embd") else "F32"
    stored = gguf.GGMLQuantizationType[kind]
    file.add_tensor(name, gguf.quants.quantize(tensor.cpu().numpy(), stored), raw_dtype=stored)


def _pieces(tokenizer: Tokenizer) -> list[str]:
    """Each id's token as GPT-2's files write bytes. DataError for a tokenizer that is not of bytes."""
    if tokenizer.kind == "char":
        raise DataError(
            "GGUF's gpt2 cannot hold a tokenizer of kind char (it has byte-level BPE); mainstem export hf holds it"
        )
    character_of = {byte: character for character, byte in byte_alphabet().items()}
    pieces = ["".join(character_of[byte] for byte in piece) for piece in tokenizer.token_bytes]
    return [
        piece or (END_OF_TEXT if i == tokenizer.eot_id else f"<|{i}|>") for i, piece in enumerate(pieces)
    ]  # special ids, and ids without a token


def _add_tokenizer(file: Any, gguf: Any, tokenizer: Tokenizer | None, pieces: list[str] | None) -> None:
    if tokenizer is None or pieces is None:
        file.add_tokenizer_model("no_vocab")
        return
    kinds = gguf.TokenType
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(pieces)
    file.add_token_types([kinds.NORMAL if piece else kinds.CONTROL for piece in tokenizer.token_bytes])
    file.add_token_merges(hf_tokenizer.merges(tokenizer))
    if tokenizer.eot_id is not None:
        file.add_bos_token_id(tokenizer.eot_id)
        file.add_eos_token_id(tokenizer.eot_id)
    file.add_add_bos_token(False)


def left_out(tokenizer: Tokenizer | None) -> list[str]:
    """What a file does not say, one sentence each."""
    if tokenizer is None:
        return ["no tokenizer: llama.cpp takes ids and gives ids"]
    if not hf_tokenizer.is_near_gpt2(tokenizer):
        return [
            "llama.cpp splits text by GPT-2's pattern, which is not this tokenizer's: runs of white space, and "
            "numbers, may become other ids"
        ]
    return []
