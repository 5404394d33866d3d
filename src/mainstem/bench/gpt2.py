"""One of our models as the GPT-2 of `transformers`, an optional extra: built from a config, filled with our weights."""

import importlib
from typing import Any

import torch

from mainstem.config import ModelConfig
from mainstem.model.gpt import GPT

_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
_NAMES = {"blocks.": "h.", "res_1.ln_in.": "ln_1.", "res_2.ln_in.": "ln_2."}


def unlike_gpt2(config: ModelConfig) -> str | None:
    """The first field whose value the GPT-2 of `transformers` cannot have; None if it can hold the model."""
    config = config.resolved()
    d_head = config.d_model // config.n_head
    form = {
        "residual": "pre", "norm": "layernorm", "position": "learned", "qk_norm": False, "bias": True,
        "lm_head_bias": False, "d_head": d_head, "attn_scale": d_head**-0.5,
    }  # fmt: skip
    fields = [name for name, value in form.items() if getattr(config, name) != value]
    fields += ["activation"] * (config.activation not in _ACTIVATIONS) + ["d_mlp"] * (config.d_mlp == 0)
    return next(iter(fields), None)


def gpt2(model: GPT, attention: str = "sdpa", use_cache: bool = False) -> Any:
    """The same model as a `GPT2LMHeadModel`, whose block matrices are ours transposed; `attention` as it names them.

    It keeps keys and values if `use_cache`, to generate with; elsewhere that would only hold them twice.

    Raises ImportError if `transformers` is not installed.
    """
    config, transformers = model.config, importlib.import_module("transformers")
    shape = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.n_ctx,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.d_model,
        n_inner=config.d_mlp,
        activation_function=_ACTIVATIONS[config.activation],
        layer_norm_epsilon=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=use_cache,
        attn_implementation=attention,
    )
    theirs = transformers.GPT2LMHeadModel(shape)
    slots = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            transposed = name.startswith("blocks.") and weight.ndim == 2
            slots[_their_name(name)].copy_(weight.T if transposed else weight)
    return theirs


def _their_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name if name.startswith("lm_head.") else f"transformer.{name}"
