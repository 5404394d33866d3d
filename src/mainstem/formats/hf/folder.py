"""A folder in Hugging Face's GPT-2 layout: opened as a model of ours, and written. Nothing in it is ever run.

Weights are read from safetensors alone, in one file or in shards. Source of the layout: the `transformers` library's
GPT2LMHeadModel, whose block matrices are kept as (inputs, outputs).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mainstem.atomic import new_folder, read_json, to_json, unused
from mainstem.config import ModelConfig
from mainstem.counts import parameters
from mainstem.errors import RunError, shown
from mainstem.formats.hf import config as configs
from mainstem.formats.hf import tokenizer as tokenizers
from mainstem.formats.keys import KeyMap, weights
from mainstem.formats.vocabulary import check, trimmed
from mainstem.model.gpt import GPT
from mainstem.runs.checkpoint import CARD, MODEL, write_tensors
from mainstem.text.tokenizer import Tokenizer

INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of a file of weights."""
_MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
KEYS = KeyMap(
    {"wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f", "lm_head": "lm_head"},
    blocks={
        "res_1.ln_in": "transformer.h.*.ln_1", "res_2.ln_in": "transformer.h.*.ln_2",
        **{name: f"transformer.h.*.{name}" for name in _MATRICES},
    },
    transposed=_MATRICES,
)  # fmt: skip
_HEAD, _WTE = "lm_head.weight", "transformer.wte.weight"
_MASK = re.compile(r"^transformer\.h\.\d+\.attn\.(bias|masked_bias)$")
"""Constants that some versions store beside the weights."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""What can be opened, as safetensors calls it and as PyTorch does."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "pytorch_model.pt")


class _Files(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors by the names of the layout, each read when it is asked for."""

    def __init__(self, folder: Path):
        self._at: dict[str, tuple[str, Path]] = {}  # by the layout's name: the file's own, and the file
        self._opened: dict[Path, Any] = {}
        self._folder = folder
        self.dtypes: set[str] = set()
        self.weights = 0  # how many numbers
        for file, keys in _shards(folder).items():
            try:
                opened = self._opened[file] = safe_open(file, framework="pt", device="cpu")
                stored = set(opened.keys())
            except (SafetensorError, OSError) as error:
                raise RunError(f"{file}: not readable as safetensors ({error}); fetch the file again") from None
            for key in sorted(stored if keys is None else keys | stored):
                if key not in stored or (keys is not None and key not in keys):
                    where = "it lacks" if key not in stored else "it has"
                    raise RunError(f"{file}: {where} {key}, and {INDEX} says otherwise; fetch both again")
                name = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
                if name in self._at:
                    raise RunError(f"{file}: {key} is there twice, with `transformer.` and without; remove one")
                if _MASK.match(name):
                    continue
                header = opened.get_slice(key)
                if header.get_dtype() not in _DTYPES:
                    raise RunError(f"{file}: {key} is {header.get_dtype()}; only {', '.join(_DTYPES)} can be opened")
                self._at[name] = key, file
                self.dtypes.add(_DTYPES[header.get_dtype()])
                self.weights += math.prod(header.get_shape())

    def __getitem__(self, name: str) -> Tensor:
        key, file = self._at[name]
        return self._opened[file].get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def place(self, name: str) -> Path:
        """The file of a tensor; the folder for one that is not there."""
        return self._at[name][1] if name in self._at else self._folder

    def tie(self) -> None:
        """Keep the embedding alone of a tied pair: a file that stores the matrix once may store it as the unembedding.

        Raises RunError where both are there and differ.
        """
        if _HEAD in self and _WTE in self and not torch.equal(*(self[name].nan_to_num(0) for name in (_HEAD, _WTE))):
            raise RunError(
                f"{self.place(_HEAD)}: {_HEAD} is not wte.weight, and {configs.CONFIG} ties them; set "
                f"tie_word_embeddings to false, or remove {_HEAD}"
            )
        head = self._at.pop(_HEAD, None)
        if head is not None:
            self._at.setdefault(_WTE, head)


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """The files that hold the weights, each with the keys that an index says it has; None without one."""
    if (folder / MODEL).is_file():
        return {folder / MODEL: None}
    index = folder / INDEX
    if not index.is_file():
        if pickles := [name for name in _PICKLES if (folder / name).is_file()]:
            raise RunError(
                f"{folder / pickles[0]}: a pickle, which can run any code when it is opened, so it is not; save the "
                f"model as {MODEL}"
            )
        if any(folder.glob("model-*.safetensors")):
            raise RunError(f"{index}: not found, and only it says what the files of weights beside it are; fetch it")
        raise RunError(f"{folder / MODEL}: not found; the folder has a {configs.CONFIG} and no weights")
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise RunError(f"{index}: no weight_map that names the file of each tensor; fetch the file again")
    files: dict[Path, set[str] | None] = {}
    for key, name in places.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise RunError(f"{index}: {key} is said to be in {shown(name)}; only safetensors beside it are opened")
        if not (folder / name).is_file():
            raise RunError(f"{folder / name}: not found, and {INDEX} says that {key} is in it; fetch the file")
        keys = files.setdefault(folder / name, set())
        assert keys is not None
        keys.add(key)
    return files


def load(folder: Path, notice: Callable[[str], None] = lambda text: None) -> tuple[GPT, Tokenizer | None]:
    """Open a folder: the model in evaluation mode, float32, on the CPU, and the tokenizer; None where it has none.

    `notice` is told of weights that were stored in another precision. Raises UserError, which names the file and the
    field or tensor, for whatever cannot be represented or is damaged.
    """
    config, tokenizer = configs.read(folder), tokenizers.read(folder)
    files = _Files(folder)
    if config.tie_embeddings:
        files.tie()
    _require_size(config, files.weights, folder)
    model = GPT(config, seed=None)
    KEYS.fill(model, files, files.place)
    if others := sorted(files.dtypes - {"float32"}):
        how = " and rounded" if "float64" in others else ", exactly"
        notice(f"{folder}: stored as {', '.join(others)}; opened as float32{how}")
    return model.eval(), tokenizer


def _require_size(config: ModelConfig, weights: int, folder: Path) -> None:
    """RunError before a model is built that is far larger than its weights; `fill` names what differs by less."""
    one = parameters(config.replace(n_layer=1))
    wanted = one.total + (config.n_layer - 1) * one.blocks
    if wanted > 2 * weights + 1_000_000:
        raise RunError(
            f"{folder / configs.CONFIG}: a model of its sizes has {wanted:,} parameters, and the folder {weights:,}; "
            "they do not belong together"
        )


def write(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer | None,
    card: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write a folder that `transformers` opens, atomically; embedding rows past the tokenizer's ids are dropped.

    Args:
        folder: where; nothing may be there yet, or an empty folder.
        model: any that the layout holds; quantized matrices are dequantized to float32.
        tokenizer: written with it, if there is one.
        card: the text of its README.md.
        max_shard_size: bytes of weights a file, at most, unless one tensor alone is larger.

    Raises ConfigError as `Layout.require` does, RunError where the folder is in use, TrainingFailed on a full disk.
    """
    unused(folder)
    model_size = model.config.vocab_size if tokenizer is None else check(model.config.vocab_size, tokenizer, folder)
    config = model.config.replace(vocab_size=model_size)
    eot_id = None if tokenizer is None else tokenizer.eot_id
    settings = configs.write(config, eot_id)
    tensors = KEYS.write(trimmed(weights(model), model_size))
    with new_folder(folder, manifest=False) as temporary:
        (temporary / configs.CONFIG).write_text(to_json(settings, indent=2), encoding="utf-8")
        (temporary / GENERATION).write_text(
            to_json(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eot_id)), encoding="utf-8"
        )
        _write_weights(temporary, tensors, max_shard_size)
        if tokenizer is not None:
            tokenizers.write(temporary, tokenizer, config.n_ctx)
        if card is not None:
            (temporary / CARD).write_text(card, encoding="utf-8")


def _write_weights(folder: Path, tensors: dict[str, Tensor], most: int) -> None:
    """One file, or shards of at most so many bytes and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    room = most
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = most
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        write_tensors(folder / MODEL, shards[0], {"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
    (folder / INDEX).write_text(to_json(index, indent=2), encoding="utf-8")
