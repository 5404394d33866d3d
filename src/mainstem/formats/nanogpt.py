"""Import checkpoints of nanoGPT and minGPT (A. Karpathy).

They are pickles, so they are loaded only with `trust_pickle`, and then with `weights_only=True`. The files do not
record the activation; it is inferred as follows:

    keys                 model_args       lm_head.weight   masks    from                        activation
    tok_emb, blocks.*    none             untied           either   minGPT of 2020              gelu
    transformer.*        with `bias`      tied             either   nanoGPT since June 2023     gelu
    transformer.*        without `bias`   tied             either   nanoGPT, its first month    gelu_tanh
    transformer.*        none             tied             no       nanoGPT, weights alone      gelu
    transformer.*        none             untied           yes      minGPT                      gelu_tanh

nanoGPT of February to June 2023 wrote files as in the second row but computed gelu_tanh; pass `activation` for those.
Any other combination is refused unless `activation` is given.
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
"""The names of Hugging Face's GPT-2, with matrices stored as (outputs, inputs)."""
_OF_2020 = {
    r"^tok_emb\.": "transformer.wte.", r"^ln_f\.": "transformer.ln_f.", r"^head\.": "lm_head.",
    r"^blocks\.(\d+)\.ln([12])\.": r"transformer.h.\1.ln_\2.",
    r"^blocks\.(\d+)\.attn\.mask$": r"transformer.h.\1.attn.bias",
    r"^blocks\.(\d+)\.attn\.proj\.": r"transformer.h.\1.attn.c_proj.",
    r"^blocks\.(\d+)\.mlp\.0\.": r"transformer.h.\1.mlp.c_fc.",
    r"^blocks\.(\d+)\.mlp\.2\.": r"transformer.h.\1.mlp.c_proj.",
}  # fmt: skip
"""Patterns that map minGPT's names of 2020 to today's; `_renamed` handles positions, queries, keys and values."""
_WTE, _WPE, _HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
_HEADS = {
    "openai-gpt": 12, "gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25, "gopher-44m": 16,
    "gpt-mini": 6, "gpt-micro": 4, "gpt-nano": 3,
}  # fmt: skip
"""The number of heads of minGPT's model types, which its config.json may name instead of a number."""


def read(file: Path, *, trust_pickle: bool = False, n_head: int | None = None, activation: str | None = None) -> GPT:
    """Load a `.pt` file of nanoGPT or minGPT (2020 or later) as a model in evaluation mode, on the CPU.

    Prefixes of wrappers (`module.`, `_orig_mod.`) are removed; the weights may be the whole file, or under `model` or
    `state_dict`. Causal masks are checked and dropped.

    Args:
        file: a file of torch.save.
        trust_pickle: whether the caller trusts the source of the file.
        n_head: number of heads, for files without model_args; default: from minGPT's `config.json` beside the file.
        activation: a value of `ModelConfig.activation`; default: from the table above.

    Raises RunError or ConfigError, which name the file, if it is damaged, holds anything but weights and plain values,
    or is not supported.

    >>> model = read(Path("ckpt.pt"), trust_pickle=True)
    """
    file = Path(file)
    tensors, args = _contents(_load(file, trust_pickle), file)
    if of_2020 := any(name.startswith(("tok_emb.", "blocks.")) for name in tensors):
        tensors = _renamed(tensors, file)
    settings = args or {}
    shapes = _shapes(tensors, settings, file)
    head, wte = tensors.get(_HEAD), tensors[_WTE]
    same = head is None or (head.dtype == wte.dtype and (head.is_set_to(wte) or head.equal(wte)))  # NaN is not itself
    if tied := same and not of_2020:
        tensors.pop(_HEAD, None)
    masked = _drop_masks(tensors, shapes["block_size"], file)
    bias = settings.get("bias", args is not None or "transformer.ln_f.bias" in tensors)
    activation = activation or ("gelu" if of_2020 else _activation(args, tied, masked, bias))
    if activation is None:
        raise RunError(f"{file}: the activation is not recorded and may be gelu or gelu_tanh; give `activation`")
    try:
        config = ModelConfig(
            vocab_size=shapes["vocab_size"],
            n_ctx=shapes["block_size"],
            n_layer=shapes["n_layer"],
            n_head=_heads(settings.get("n_head"), n_head, file),
            d_model=shapes["n_embd"],
            activation=activation,
            dropout=settings.get("dropout", 0.0),
            mlp_dropout=0.0,  # in these programs it is after the MLP
            bias=bias,
            tie_embeddings=tied,
        )
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    model = GPT(config, seed=None)
    KEYS.fill(model, tensors, lambda name: file)
    return model.eval()


def _activation(args: Mapping[str, Any] | None, tied: bool, masked: bool, bias: bool) -> str | None:
    """The activation by the table above, for keys that begin with `transformer.`; None if it is in no row."""
    if args is not None:
        return ("gelu" if "bias" in args else "gelu_tanh") if tied else None
    if tied:
        return None if masked else "gelu"
    return "gelu_tanh" if masked and bias else None


def _require_trust(file: Path, trust_pickle: bool) -> None:
    if file.is_dir():
        raise RunError(f"{file}: a folder; give the .pt file in it")
    if not file.is_file():
        raise RunError(f"{file}: no such file; give the path of a .pt file")
    if file.suffix in (".safetensors", ".gguf", ".json"):
        raise RunError(f"{file}: not a file of torch.save; use mainstem import hf for folders with safetensors")
    if not trust_pickle:
        raise RunError(
            f"{file}: a pickle, which can run any code when it is loaded; if you trust its source, add `trust_pickle`, "
            "and only its weights are loaded"
        )


def _load(file: Path, trust_pickle: bool) -> Any:
    """The contents of the file: tensors, numbers, strings, and containers of them."""
    _require_trust(file, trust_pickle)
    if torch.__version__ < "2.10":
        raise RunError(
            f"{file}: even with weights_only a pickle can run code in PyTorch {torch.__version__} (CVE-2026-24747); "
            "install 2.10 or newer"
        )
    try:
        with warnings.catch_warnings():  # about files that are refused anyway
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise anything
        if isinstance(error, (MemoryError, PermissionError)) or "allocate memory" in str(error):
            raise
        name = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if name is None:
            raise RunError(f"{file}: damaged, truncated or not a file of torch.save; copy it again") from None
        raise RunError(
            f"{file}: it holds {name[1]!r}, which is not a tensor or a plain value; save the state_dict alone"
        ) from None


def _contents(content: Any, file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors by their names in the unwrapped model, and model_args; None if there is none."""
    state: Any = content if isinstance(content, Mapping) else {}
    args = state.get("model_args")
    if args is not None:
        if not isinstance(args, Mapping) or not all(
            isinstance(value, (int, float, str, type(None))) for value in args.values()
        ):
            raise RunError(f"{file}: model_args is not a dict of plain values; it is not a file of nanoGPT")
        for name, value in args.items():
            if name not in _ARGS:
                raise RunError(
                    f"{file}: model_args: unknown field {name} {value!r}, which may change what the model computes; "
                    f"{nearest(str(name), _ARGS)}"
                )
        args = {name: value for name, value in args.items() if value is not None}
    state = next((state[name] for name in ("model", "state_dict") if isinstance(state.get(name), Mapping)), state)
    tensors: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise RunError(f"{file}: {str(key)!r} is not a tensor; give a state_dict, or a dict with one as `model`")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise RunError(f"{file}: {key} is {tensor.layout} on {tensor.device}; only dense CPU tensors are supported")
        if (name := unwrapped(key)) in tensors:
            raise RunError(f"{file}: {name} occurs twice, under different prefixes; remove one")
        tensors[name] = tensor
    return tensors, args


def _renamed(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The tensors of a minGPT file of 2020 by today's names, with queries, keys and values in one matrix."""
    if both := [name for name in tensors if name.startswith(("transformer.", "lm_head."))]:
        raise RunError(f"{file}: {both[0]} is a name of today's minGPT, the others are of 2020; save one model alone")
    tensors = dict(tensors)
    for name in [name for name in tensors if re.match(r"blocks\.\d+\.attn\.query\.(weight|bias)$", name)]:
        names = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if missing := [each for each in names if each not in tensors]:
            raise RunError(f"{file}: {missing[0]} is missing; use the file as minGPT wrote it")
        parts = [tensors.pop(each) for each in names]
        if len({(part.shape, part.dtype) for part in parts}) != 1 or parts[0].ndim == 0:
            raise RunError(f"{file}: {', '.join(names)} differ in shape or dtype")
        tensors[name.replace("blocks.", "transformer.h.").replace(".query.", ".c_attn.")] = torch.cat(parts)
    if (positions := tensors.pop("pos_emb", None)) is not None:
        if positions.ndim != 3 or len(positions) != 1:
            raise RunError(f"{file}: pos_emb is {tuple(positions.shape)}, not (1, positions, width)")
        tensors[_WPE] = positions[0]
    for old, new in _OF_2020.items():
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    return tensors


def _shapes(tensors: Mapping[str, Tensor], args: Mapping[str, Any], file: Path) -> dict[str, int]:
    """The config fields that follow from the shapes, by nanoGPT's names. RunError if model_args differs."""
    for name in (_WTE, _WPE):
        if name not in tensors or tensors[name].ndim != 2:
            raise RunError(f"{file}: {name} is missing, which nanoGPT and minGPT always have; give another file")
    blocks = {match[1] for name in tensors if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    rows, width = tensors[_WTE].shape
    shapes = {"n_layer": len(blocks), "n_embd": width, "block_size": len(tensors[_WPE]), "vocab_size": rows}
    for name, value in shapes.items():
        if args.get(name, value) != value:
            raise RunError(f"{file}: model_args has {name} {args[name]!r}, but the weights have {value}")
    return shapes


def _drop_masks(tensors: dict[str, Tensor], n_ctx: int, file: Path) -> bool:
    """Remove the masks; returns whether there were any. RunError for one that is not the causal mask."""
    names = [name for name in tensors if re.match(r"transformer\.h\.\d+\.attn\.bias$", name)]
    for name in names:
        mask = tensors.pop(name)
        if mask.shape != (1, 1, n_ctx, n_ctx) or not mask[0, 0].bool().equal(torch.ones_like(mask[0, 0]).tril().bool()):
            raise RunError(f"{file}: {name} is not the causal mask of {n_ctx} positions; other masks are not supported")
    return bool(names)


def _heads(stored: Any, n_head: int | None, file: Path) -> Any:
    """The number of heads: from model_args, else the caller's `n_head`, else from minGPT's config.json."""
    if stored is not None and n_head not in (None, stored):
        raise RunError(f"{file}: model_args has n_head {stored!r}, but `n_head` is {n_head}; omit it")
    heads: Any = n_head if stored is None else stored
    if heads is None and (settings := file.with_name("config.json")).is_file():
        content = read_json(settings)
        model = content.get("model") if isinstance(content, dict) else None
        heads = model.get("n_head") or _HEADS.get(str(model.get("model_type"))) if isinstance(model, dict) else None
    if heads is None:
        raise RunError(f"{file}: the number of heads is not recorded; give `n_head`")
    return heads


class _Plain(pickle.Unpickler):
    """An unpickler for numbers, strings and containers; it refuses everything that would be imported."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every import. Raises UnpicklingError with the name."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_meta(file: Path, *, trust_pickle: bool = False) -> Characters:
    """Load the character tokenizer of nanoGPT's `meta.pkl`, which has no end-of-text token.

    Raises RunError without `trust_pickle`, and DataError unless there is one id per character, from 0 on.
    """
    file = Path(file)
    _require_trust(file, trust_pickle)
    content = file.read_bytes()
    try:
        meta = _Plain(io.BytesIO(content)).load()
        alphabet = "".join(meta["itos"][i] for i in range(meta["vocab_size"]))
        alphabet.encode()  # raises for a lone surrogate
        by_id = dict(enumerate(alphabet))
        by_character = {character: i for i, character in by_id.items()}
        valid = 0 < len(by_id) == len(by_character) and (meta["itos"], meta["stoi"]) == (by_id, by_character)
    except Exception:  # damaged pickles raise anything
        valid = False
    if not valid:
        raise DataError(f"{file}: not nanoGPT's meta.pkl: vocab_size, and one id per character in stoi and itos")
    return Characters(alphabet, end_of_text=False)
