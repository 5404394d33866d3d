"""Checkpoints of nanoGPT and minGPT (A. Karpathy): read, not written.

They are pickles, so they are opened only where the caller trusts who made them, and as weights alone even then. No file
says what its MLPs compute. What is known of it:

    keys                 model_args       lm_head.weight   masks    from                        activation
    tok_emb, blocks.*    none             its own          either   minGPT of 2020              gelu
    transformer.*        with `bias`      wte.weight       either   nanoGPT since June 2023     gelu
    transformer.*        without `bias`   wte.weight       either   nanoGPT, its first month    gelu_tanh
    transformer.*        none             wte.weight       no       nanoGPT, its weights alone  gelu
    transformer.*        none             its own          yes      minGPT                      gelu_tanh

nanoGPT of February to June 2023 wrote the second row's files and computed gelu_tanh: the caller has to say so. Whatever
is in no row is refused until the caller names the activation.
"""

import io
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from mainstem.atomic import read_json
from mainstem.config import ModelConfig
from mainstem.errors import ConfigError, DataError, RunError, nearest
from mainstem.formats.hf import folder as hf
from mainstem.formats.keys import KeyMap
from mainstem.model.gpt import GPT
from mainstem.runs.checkpoint import unwrapped
from mainstem.text.tokenizer import Characters

KEYS = KeyMap(hf.KEYS.modules, hf.KEYS.blocks)
"""Hugging Face's names, the matrices as nn.Linear has them."""
_OF_2020 = {
    r"^tok_emb\.": "transformer.wte.", r"^ln_f\.": "transformer.ln_f.", r"^head\.": "lm_head.",
    r"^blocks\.(\d+)\.ln([12])\.": r"transformer.h.\1.ln_\2.",
    r"^blocks\.(\d+)\.attn\.mask$": r"transformer.h.\1.attn.bias",
    r"^blocks\.(\d+)\.attn\.proj\.": r"transformer.h.\1.attn.c_proj.",
    r"^blocks\.(\d+)\.mlp\.0\.": r"transformer.h.\1.mlp.c_fc.",
    r"^blocks\.(\d+)\.mlp\.2\.": r"transformer.h.\1.mlp.c_proj.",
}  # fmt: skip
"""Names of 2020 to today's, as patterns; the positions and the queries, keys and values need more than a name."""
_WTE, _WPE, _HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
_HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25, "gopher-44m": 16,
    "gpt-mini": 6, "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip
"""Heads of minGPT's model types, which its config.json may name in place of numbers."""


def read(file: Path, *, trust_pickle: bool = False, n_head: int | None = None, activation: str | None = None) -> GPT:
    """Open a `.pt` of nanoGPT or of minGPT, of 2020 or later; the model in evaluation mode, on the CPU.

    Prefixes that wrappers leave (`module.`, `_orig_mod.`) are taken off in any nesting; the weights may be the whole
    file, or lie under `model` or `state_dict`. Masks are checked and left out.

    Args:
        file: what torch.save wrote.
        trust_pickle: whether the caller trusts who made it.
        n_head: for files without model_args; else a `config.json` of minGPT beside the file may say it.
        activation: one of ours, in place of what the table above says.

    Raises RunError or ConfigError, which name the file, for what is damaged, holds anything but weights and plain
    values, or cannot be represented.
    """
    file = Path(file)
    tensors, args = _contents(_load(file, trust_pickle), file)
    if of_2020 := any(name.startswith(("tok_emb.", "blocks.")) for name in tensors):
        tensors = _renamed(tensors, file)
    said = args or {}
    shapes = _shapes(tensors, said, file)
    head, wte = tensors.get(_HEAD), tensors[_WTE]
    same = head is None or (head.dtype == wte.dtype and (head.is_set_to(wte) or head.equal(wte)))  # NaN is not itself
    if tied := same and not of_2020:
        tensors.pop(_HEAD, None)
    masked = _drop_masks(tensors, shapes["block_size"], file)
    bias = said.get("bias", args is not None or "transformer.ln_f.bias" in tensors)
    activation = activation or ("gelu" if of_2020 else _activation(args, tied, masked, bias))
    if activation is None:
        raise RunError(f"{file}: its form does not say whether the MLPs compute gelu or gelu_tanh; give `activation`")
    try:
        config = ModelConfig(
            vocab_size=shapes["vocab_size"],
            n_ctx=shapes["block_size"],
            n_layer=shapes["n_layer"],
            n_head=_heads(said.get("n_head"), n_head, file),
            d_model=shapes["n_embd"],
            activation=activation,
            dropout=said.get("dropout", 0.0),
            mlp_dropout=0.0,  # theirs is after the MLP
            bias=bias,
            tie_embeddings=tied,
        )
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    model = GPT(config)
    KEYS.fill(model, tensors, lambda name: file)
    return model.eval()


def _activation(args: Mapping[str, Any] | None, tied: bool, masked: bool, bias: bool) -> str | None:
    """What the table says of keys that begin with `transformer.`; None for what is in no row."""
    if args is not None:
        return ("gelu" if "bias" in args else "gelu_tanh") if tied else None
    if tied:
        return None if masked else "gelu"
    return "gelu_tanh" if masked and bias else None


def _require_trust(file: Path, trust_pickle: bool) -> None:
    if file.is_dir():
        raise RunError(f"{file}: a folder; give the file in it that torch.save wrote")
    if not file.is_file():
        raise RunError(f"{file}: no such file; give the path of one")
    if file.suffix in (".safetensors", ".gguf", ".json"):
        raise RunError(f"{file}: not a file of torch.save; mainstem import hf opens folders with safetensors")
    if not trust_pickle:
        raise RunError(
            f"{file}: a pickle, which can run any code when it is opened; if you trust who made it, add "
            "`trust_pickle`, and it is read as data alone"
        )


def _load(file: Path, trust_pickle: bool) -> Any:
    """What is in the file: weights, numbers, words, and containers of them."""
    _require_trust(file, trust_pickle)
    if torch.__version__ < "2.10":
        raise RunError(
            f"{file}: even a pickle of weights can run code in PyTorch {torch.__version__} (CVE-2026-24747); install "
            "2.10 or newer"
        )
    try:
        with warnings.catch_warnings():  # of files that are refused anyway
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise anything
        if isinstance(error, (MemoryError, PermissionError)) or "allocate memory" in str(error):
            raise
        found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if found is None:
            raise RunError(f"{file}: no weights that torch.save wrote, or not all of the file; copy it again") from None
        raise RunError(
            f"{file}: it holds {found[1]!r}, which is no weight, so it is not opened; save the state_dict alone"
        ) from None


def _contents(found: Any, file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors by their names in the unwrapped model, and what model_args says; None without it."""
    held: Any = found if isinstance(found, Mapping) else {}
    args = held.get("model_args")
    if args is not None:
        if not isinstance(args, Mapping) or not all(
            isinstance(value, (int, float, str, type(None))) for value in args.values()
        ):
            raise RunError(f"{file}: its model_args are no dict of plain values; nanoGPT did not write them")
        for name, value in args.items():
            if name not in _ARGS:
                raise RunError(
                    f"{file}: model_args has {name} {value!r}, which nanoGPT does not know, and which may change what "
                    f"the model computes; {nearest(str(name), _ARGS)}"
                )
        args = {name: value for name, value in args.items() if value is not None}
    held = next((held[name] for name in ("model", "state_dict") if isinstance(held.get(name), Mapping)), held)
    tensors: dict[str, Tensor] = {}
    for key, tensor in held.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise RunError(f"{file}: its {str(key)!r} is no tensor; give a state_dict, or a dict that has it as model")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise RunError(f"{file}: {key} is {tensor.layout} on {tensor.device}; only plain tensors can be read")
        if (name := unwrapped(key)) in tensors:
            raise RunError(f"{file}: {name} is there twice, under different prefixes; remove one")
        tensors[name] = tensor
    return tensors, args


def _renamed(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The tensors of the form of 2020 by the names of today's, queries, keys and values in one matrix."""
    if both := [name for name in tensors if name.startswith(("transformer.", "lm_head."))]:
        raise RunError(f"{file}: {both[0]} is today's minGPT, the rest is that of 2020; save one model alone")
    tensors = dict(tensors)
    for name in [name for name in tensors if re.match(r"blocks\.\d+\.attn\.query\.(weight|bias)$", name)]:
        names = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if missing := [each for each in names if each not in tensors]:
            raise RunError(f"{file}: it lacks {missing[0]}; take the file as minGPT wrote it")
        parts = [tensors.pop(each) for each in names]
        if len({(part.shape, part.dtype) for part in parts}) != 1 or parts[0].ndim == 0:
            raise RunError(f"{file}: {', '.join(names)} are not of one shape and type")
        tensors[name.replace("blocks.", "transformer.h.").replace(".query.", ".c_attn.")] = torch.cat(parts)
    if (positions := tensors.pop("pos_emb", None)) is not None:
        if positions.ndim != 3 or len(positions) != 1:
            raise RunError(f"{file}: pos_emb is {tuple(positions.shape)}, not (1, positions, width)")
        tensors[_WPE] = positions[0]
    for old, new in _OF_2020.items():
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    return tensors


def _shapes(tensors: Mapping[str, Tensor], said: Mapping[str, Any], file: Path) -> dict[str, int]:
    """What the shapes say of the config, by nanoGPT's names; RunError where model_args says otherwise."""
    for name in (_WTE, _WPE):
        if name not in tensors or tensors[name].ndim != 2:
            raise RunError(f"{file}: no matrix {name} in it, which every nanoGPT and minGPT has; give another file")
    blocks = {found[1] for name in tensors if (found := re.match(r"transformer\.h\.(\d+)\.", name))}
    rows, width = tensors[_WTE].shape
    shapes = {"n_layer": len(blocks), "n_embd": width, "block_size": len(tensors[_WPE]), "vocab_size": rows}
    for name, value in shapes.items():
        if said.get(name, value) != value:
            raise RunError(f"{file}: model_args has {name} {said[name]!r}, and its weights have {value}")
    return shapes


def _drop_masks(tensors: dict[str, Tensor], n_ctx: int, file: Path) -> bool:
    """Take the masks out, and say whether there were any. RunError for one that is not the causal one."""
    names = [name for name in tensors if re.match(r"transformer\.h\.\d+\.attn\.bias$", name)]
    for name in names:
        mask = tensors.pop(name)
        if mask.shape != (1, 1, n_ctx, n_ctx) or not mask[0, 0].bool().equal(torch.ones_like(mask[0, 0]).tril().bool()):
            raise RunError(f"{file}: {name} is not the causal mask of {n_ctx} positions; only that can be opened")
    return bool(names)


def _heads(said: Any, given: int | None, file: Path) -> Any:
    """The number of heads: of model_args, else the caller's, else of minGPT's config.json beside the file."""
    if said is not None and given not in (None, said):
        raise RunError(f"{file}: model_args has n_head {said!r}, and `n_head` is {given}; leave it out")
    found = given if said is None else said
    if found is None and (beside := file.with_name("config.json")).is_file():
        content = read_json(beside)
        model = content.get("model") if isinstance(content, dict) else None
        found = model.get("n_head") or _HEADS.get(str(model.get("model_type"))) if isinstance(model, dict) else None
    if found is None:
        raise RunError(f"{file}: nothing in it says into how many heads the width is split; give `n_head`")
    return found


class _Plain(pickle.Unpickler):
    """Numbers, words and containers: whatever would have to be imported is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse it."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_meta(file: Path, *, trust_pickle: bool = False) -> Characters:
    """The character tokenizer of nanoGPT's `meta.pkl`, which has no end of text.

    Raises RunError without `trust_pickle`, DataError for anything but one id a character, from 0 on.
    """
    file = Path(file)
    _require_trust(file, trust_pickle)
    content = file.read_bytes()
    try:
        meta = _Plain(io.BytesIO(content)).load()
        alphabet = "".join(meta["itos"][i] for i in range(meta["vocab_size"]))
        alphabet.encode()  # no half of a UTF-16 pair
        by_id = dict(enumerate(alphabet))
        by_character = {character: i for i, character in by_id.items()}
        sound = 0 < len(by_id) == len(by_character) and (meta["itos"], meta["stoi"]) == (by_id, by_character)
    except Exception:  # damaged pickles raise anything
        sound = False
    if not sound:
        raise DataError(f"{file}: not nanoGPT's meta.pkl: vocab_size, and one id a character from 0 on, both ways")
    return Characters(alphabet, end_of_text=False)
