"""One of our models as the GPT-2 of `transformers`, an optional extra: as `formats.hf` writes it, without a folder."""

import importlib
from typing import Any

import torch

from mainstem.config import ModelConfig
from mainstem.formats.hf.config import LAYOUT, write
from mainstem.formats.hf.folder import KEYS
from mainstem.formats.keys import weights
from mainstem.model.gpt import GPT


def unlike_gpt2(config: ModelConfig) -> str | None:
    """The first field whose value the GPT-2 of `transformers` cannot have; None if it can hold the model."""
    return next((field for field, _, _ in LAYOUT.misfits(config)), None)


def gpt2(model: GPT, attention: str = "sdpa", use_cache: bool = False) -> Any:
    """The same model as a `GPT2LMHeadModel` without dropout; `attention` as it names them.

    Its weights are copies. It keeps keys and values if `use_cache`, to generate with; elsewhere that would only hold
    them twice.

    Raises ImportError if `transformers` is not installed, ConfigError as `Layout.require` does.
    """
    transformers = importlib.import_module("transformers")
    config = model.config.replace(embd_dropout=0.0, attn_dropout=0.0, attn_out_dropout=0.0)
    shape = transformers.GPT2Config(**write(config), use_cache=use_cache, attn_implementation=attention)
    theirs = transformers.GPT2LMHeadModel(shape)
    slots = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in weights(model).items():
            slots[KEYS.external(name)].copy_(KEYS.oriented(name, weight))
    return theirs
