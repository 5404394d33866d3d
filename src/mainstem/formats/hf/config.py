"""Convert between Hugging Face's GPT-2 `config.json` and `ModelConfig`. No torch.

Each field is read, or is known not to affect the model, or is refused by name, so that an imported model computes what
its folder says.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mainstem.atomic import read_json
from mainstem.config import ModelConfig
from mainstem.errors import ConfigError, RunError, shown
from mainstem.formats.gpt2 import Layout
from mainstem.runs.folder import CONFIG

ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "gelu_python": "gelu",
}  # fmt: skip
"""Hugging Face's activations to mainstem's; of several names for one function, the first is written."""
LAYOUT = Layout(
    "GPT-2's layout in a Hugging Face folder", tuple(dict.fromkeys(ACTIVATIONS.values())), unscaled=True, by_depth=True
)
_ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer", "n_ctx": "n_positions",
}  # fmt: skip
_READ: dict[str, tuple[type, Any]] = {  # type, and default
    "vocab_size": (int, 50257), "n_positions": (int, 1024), "n_embd": (int, 768), "n_layer": (int, 12),
    "n_head": (int, 12), "n_inner": (int, None), "activation_function": (str, "gelu_new"),
    "layer_norm_epsilon": (float, 1e-5), "tie_word_embeddings": (bool, True), "scale_attn_weights": (bool, True),
    "scale_attn_by_inverse_layer_idx": (bool, False), "embd_pdrop": (float, 0.1), "attn_pdrop": (float, 0.1),
    "resid_pdrop": (float, 0.1),
}  # fmt: skip
_TOO_MANY = 1 << 31
"""Integers from here on are refused."""
_ONLY: dict[str, tuple[Any, ...]] = {  # other values would be another model, or code from the folder
    "model_type": ("gpt2",), "add_cross_attention": (False,), "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None), "auto_map": (None,), "quantization_config": (None,),
    "architectures": (None, [], ["GPT2LMHeadModel"], ["GPT2Model"]),
}  # fmt: skip
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_CHANGE_NOTHING = frozenset((
    # how products are rounded in half precision, how a new model is drawn, how it is run
    "reorder_and_upcast_attn", "initializer_range", "use_cache", "dtype", "torch_dtype", "use_bfloat16",
    "torchscript", "is_decoder", "chunk_size_feed_forward", "gradient_checkpointing", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation", "tie_encoder_decoder",
    "cross_attention_hidden_size",
    # who wrote it
    "_name_or_path", "xla_device", "transformers_version", "_commit_hash", "tokenizer_class", "finetuning_task",
    # what is returned, and the heads of other tasks
    "output_hidden_states", "output_attentions", "output_scores", "output_past", "return_dict",
    "return_dict_in_generate", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "predict_special_tokens", "id2label", "label2id", "num_labels", "_num_labels",
    "problem_type", "task_specific_params",
    # the tokenizer's, which says it itself, and how to sample
    "bos_token_id", "eos_token_id", "eos_token_ids", "pad_token_id", "sep_token_id",
    "decoder_start_token_id", "prefix",
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
))  # fmt: skip
_HF_NAMES = {
    "n_ctx": "n_positions", "d_model": "n_embd", "d_mlp": "n_inner", "norm_eps": "layer_norm_epsilon",
    "embd_dropout": "embd_pdrop", "attn_dropout": "attn_pdrop", "attn_out_dropout": "resid_pdrop",
}  # fmt: skip
"""Hugging Face's name of a `ModelConfig` field, where it differs."""


def read(path: Path) -> ModelConfig:
    """Read a folder's `config.json` as a `ModelConfig`. RunError or ConfigError names the file, field and value."""
    file = path / CONFIG
    fields = read_json(file) if file.is_file() else None
    if not isinstance(fields, dict):
        raise RunError(f"{file}: not a config; it should be one JSON object")
    values = _values(fields, file)
    if values["n_head"] < 1 or values["n_embd"] % values["n_head"]:
        raise RunError(f"{file}: n_head {values['n_head']} does not divide n_embd {values['n_embd']}")
    d_head = max(1, values["n_embd"] // values["n_head"])
    try:
        return ModelConfig(
            vocab_size=values["vocab_size"],
            n_ctx=values["n_positions"],
            n_layer=values["n_layer"],
            n_head=values["n_head"],
            d_model=values["n_embd"],
            d_mlp=4 * values["n_embd"] if values["n_inner"] is None else values["n_inner"],
            norm_eps=values["layer_norm_epsilon"],
            activation=ACTIVATIONS[values["activation_function"]],
            attn_scale=d_head**-0.5 if values["scale_attn_weights"] else 1.0,
            attn_scale_by_depth=values["scale_attn_by_inverse_layer_idx"],
            embd_dropout=values["embd_pdrop"],
            attn_dropout=values["attn_pdrop"],
            attn_out_dropout=values["resid_pdrop"],
            mlp_dropout=0.0,
            mlp_out_dropout=values["resid_pdrop"],
            tie_embeddings=values["tie_word_embeddings"],
        ).resolved()
    except ConfigError as error:
        field, _, rest = str(error).partition(":")
        raise ConfigError(f"{file}: {_HF_NAMES.get(field, field)}:{rest}") from None


def _values(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The values of the fields in `_READ`, checked. RunError for a field that may affect the model otherwise."""
    fields = dict(content)
    for alias, name in _ALIASES.items():
        if alias in fields and fields.setdefault(name, fields[alias]) != fields.pop(alias):
            both = f"{alias} {shown(content[alias])} and {name} {shown(fields[name])}"
            raise RunError(f"{file}: {both} differ; they must be equal")
    if "model_type" not in fields and "n_embd" not in fields:
        raise RunError(f"{file}: no model_type and no n_embd; only GPT-2's layout is supported")
    for name, value in fields.items():
        if name in _ONLY and value not in _ONLY[name]:
            supported = " or ".join(map(repr, _ONLY[name]))
            raise RunError(f"{file}: {name} {shown(value)} is not supported; only {supported} is")
        if name not in _READ and name not in _ONLY and name not in _CHANGE_NOTHING:
            raise RunError(
                f"{file}: unknown field {shown(name)[1:-1]} {shown(value)}, which may change what the model computes; "
                "remove it if it does not"
            )
    return {name: _typed(name, fields.get(name, default), kind, file) for name, (kind, default) in _READ.items()}


def _typed(name: str, value: Any, kind: type, file: Path) -> Any:
    if type(value) is int and value >= _TOO_MANY:
        raise RunError(f"{file}: {name} {shown(value)} is too large")
    if kind is float and type(value) is int:
        value = float(value)
    valid = type(value) is kind and not (isinstance(value, float) and not math.isfinite(value))
    if not valid and not (name == "n_inner" and value is None):
        raise RunError(f"{file}: {name} {shown(value)} should be {_KINDS[kind]}")
    if name == "n_inner" and value is not None and value < 1:
        raise RunError(f"{file}: n_inner {value} is not possible; it must be at least 1, or null for 4 x n_embd")
    if name == "activation_function" and value not in ACTIVATIONS:
        raise RunError(f"{file}: activation_function {shown(value)} is not supported; use {', '.join(ACTIVATIONS)}")
    if name.endswith("_pdrop") and not 0 <= value < 1:
        raise RunError(f"{file}: {name} {value:g} is not possible; it must be 0 or more and below 1")
    return value


def write(config: ModelConfig, eot_id: int | None = None) -> dict[str, Any]:
    """The contents of `config.json` for a model. Raises ConfigError as `Layout.require` does."""
    LAYOUT.require(config)
    config = config.resolved()
    activations = {activation: name for name, activation in reversed(ACTIVATIONS.items())}
    return {
        "activation_function": activations[config.activation],
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": config.attn_dropout,
        "bos_token_id": eot_id,
        "dtype": "float32",
        "embd_pdrop": config.embd_dropout,
        "eos_token_id": eot_id,
        "initializer_range": 0.02,
        "layer_norm_epsilon": config.norm_eps,
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_head": config.n_head,
        "n_inner": None if config.d_mlp == 4 * config.d_model else config.d_mlp,
        "n_layer": config.n_layer,
        "n_positions": config.n_ctx,
        "resid_pdrop": config.attn_out_dropout,
        "scale_attn_by_inverse_layer_idx": config.attn_scale_by_depth,
        "scale_attn_weights": math.isclose(config.attn_scale, config.d_head**-0.5),
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }


def left_out(config: ModelConfig) -> list[str]:
    """Notes on fields that the layout cannot store and that do not affect evaluation, one sentence each."""
    config = config.resolved()
    notes = []
    if config.mlp_dropout:
        notes.append(f"mlp_dropout {config.mlp_dropout:g} is dropped: the layout has no dropout inside the MLP")
    if config.mlp_out_dropout != config.attn_out_dropout:
        notes.append(
            f"mlp_out_dropout {config.mlp_out_dropout:g} becomes {config.attn_out_dropout:g}, as attn_out_dropout: the "
            "layout has one value for both"
        )
    if not config.bias:
        notes.append("biases are written as zeros: the layout always has them")
    return notes
