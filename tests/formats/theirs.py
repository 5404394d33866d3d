"""GPT-2 as `transformers` has it, tiny, square and stirred; folders in its layout, and what is said of them here."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers as library
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mainstem.errors import UserError
from mainstem.formats.load import load
from mainstem.text.tokenizer import BPE, END_OF_TEXT
from models import stir

transformers = pytest.importorskip("transformers", reason="transformers is the other side of these tests")
transformers.utils.logging.disable_progress_bar()

WIDTH = 12
"""Of everything that can have it: a matrix is square wherever one may be, so that no shape tells of a transpose."""
MODEL = "model.safetensors"

CHOICES: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu", "relu", "relu2"),
    "n_inner": (WIDTH, None, 20),
    "tie_word_embeddings": (True, False),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (False, True),
}
EVERY = [
    dict(zip(CHOICES, values, strict=True))
    | {"layer_norm_epsilon": (1e-5, 1e-3)[number % 5 % 2], "n_layer": 1 + number % 3, "n_head": 1 + number % 7 % 3}
    for number, values in enumerate(itertools.product(*CHOICES.values()))
]
"""Every combination of the choices; number of blocks, heads and eps turn beside them."""


def config(**options: Any) -> Any:
    """A GPT2Config whose patterns can be looked at; no dropout."""
    shape = dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_inner"), WIDTH)
    plain = {"n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2Config(**shape | plain | quiet | options, attn_implementation="eager")


def model(**options: Any) -> nn.Module:
    """Their model, float32, stirred, in evaluation mode."""
    made = transformers.GPT2LMHeadModel(config(**options))
    stir(made, torch.float32, by=0.15)
    return made


def opened(folder: Path) -> nn.Module:
    """A folder as `transformers` opens it: whole, with nothing that it had to make up or did not want."""
    made, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said.values()), said
    return made.eval()


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """The folder's one file of weights, its tensors changed in place."""
    tensors = load_file(folder / MODEL)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / MODEL, {"format": "pt"})


def said(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """What a JSON file of a folder says."""
    return json.loads((folder / name).read_text(encoding="utf-8"))


def put(folder: Path, values: Any, name: str = "config.json") -> None:
    """Let a JSON file of a folder say something else."""
    (folder / name).write_text(json.dumps(values), encoding="utf-8")


def refusal(path: Path, open_: Callable[[Path], Any] = load) -> str | None:
    """What is said of a RUN that does not open: a UserError alone, in one line that names it. None if it opens."""
    try:
        open_(path)
    except UserError as error:
        caught = error
    else:
        return None
    assert "\n" not in str(caught)
    assert caught.exit_code == 2
    assert str(path) in str(caught)
    return str(caught)


def by_gpt2s_pattern(texts: list[str]) -> BPE:
    """A BPE whose file splits as GPT-2's does, so that it is written as vocab.json and merges.txt too."""
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=319, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([END_OF_TEXT])
    return BPE(inner.to_str())
