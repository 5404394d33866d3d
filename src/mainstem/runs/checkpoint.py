"""Checkpoints: tensors in safetensors, everything else in JSON; a folder that is written atomically.

A checkpoint is valid if every file has the size and sha256 of its manifest (`atomic.fault`); `runs/folder.py` chooses
the newest valid one.

No pickle is read or written. Every tensor is read to the CPU first, whichever device wrote it.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mainstem import atomic
from mainstem.config import ModelConfig
from mainstem.errors import RunError, TrainingFailed, shown
from mainstem.model import quantized
from mainstem.model.gpt import GPT
from mainstem.runs import folder
from mainstem.runs.folder import CARD, CONFIG, MODEL, OPTIM, STATE
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tokens import TOKENIZER

_WRAPPERS = re.compile(r"(?:(?<=^)|(?<=\.))(?:(?:module|_orig_mod)\.)+")
_SYSTEM_ERROR = re.compile(r"os error (\d+)")


def save(
    final: Path,
    model: GPT,
    tokenizer: Tokenizer | None,
    *,
    train: dict[str, Any] | None = None,
    optimizer: Mapping[str, Tensor] | None = None,
    state: dict[str, Any] | None = None,
    card: str | None = None,
) -> None:
    """Write a checkpoint folder: the model always; training's own state, and a card for people, when there is one.

    A tied matrix is written once, a quantized one as it is stored.

    Raises TrainingFailed on a non-finite weight or a full disk; nothing is written then.
    """
    tensors = quantized.tensors(model)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise TrainingFailed(f"{final}: {name} is not finite, so nothing was saved; lower `lr`")
    with atomic.new_folder(final) as temporary:
        write_tensors(temporary / MODEL, tensors)
        if optimizer is not None:
            write_tensors(temporary / OPTIM, optimizer)
        settings = {"format": folder.FORMAT, "model": model.config.to_dict(), "train": train}
        if (weights := quantized.weights_of(model)) != "fp32":
            settings["weights"] = weights
        (temporary / CONFIG).write_text(atomic.to_json(settings), encoding="utf-8")
        (temporary / STATE).write_text(atomic.to_json(state or {}), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(temporary / TOKENIZER)
        if card is not None:
            (temporary / CARD).write_text(card, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the default permissions (umask). Raises OSError, also on a full disk."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
        path.chmod(mode)  # the library lets its owner alone read it
    except SafetensorError as error:  # it wraps the system's error and keeps its number in the text alone
        number = _SYSTEM_ERROR.search(str(error))
        raise OSError(int(number[1]) if number else 0, str(error)) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU. Raises RunError naming the file if it is damaged."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path}: not readable ({error}); take another checkpoint") from None


def unwrapped(name: str) -> str:
    """A tensor's name without the prefixes of wrappers, `module.` and `_orig_mod.` in any nesting."""
    return _WRAPPERS.sub("", name)


def load_weights(model: GPT, path: Path) -> None:
    """Fill a model from a file of ours, by unwrapped names.

    Raises RunError as `fill` does, and where its matrices are quantized and the model's are not.
    """
    tensors = {unwrapped(name): tensor for name, tensor in read_tensors(path).items()}
    embedding = tensors.get("wte.weight")
    if quantized.weights_of(model) == "fp32" and embedding is not None and embedding.dtype in quantized.DTYPES.values():
        raise RunError(f"{path}: its weights are quantized, for generating; take the model they were quantized from")
    fill(model, tensors, lambda name: path)


@torch.no_grad()
def fill(
    model: GPT,
    tensors: Mapping[str, Tensor],
    source: Callable[[str], object],
    external: Callable[[str], str] = lambda name: name,
    oriented: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> None:
    """Fill a model, strictly: every tensor once, of the config's shape, finite, and no other tensor.

    Args:
        model: the model whose weights are replaced.
        tensors: by the names of the format that they come from; each is read when its turn comes.
        source: the file of a tensor of that name; every message begins with it.
        external: the format's name of one of our tensors, by our name.
        oriented: a tensor, by our name, transposed where the format stores it transposed; it is its own inverse.

    Raises RunError for missing, unknown, misshapen or non-finite tensors. What is float32 in the model may be stored in
    any floating-point type.
    """
    own = quantized.tensors(model)
    names = {external(name): name for name in own}
    mismatch = "they do not belong together"
    for key in sorted(names.keys() ^ set(tensors)):
        name = shown(key)[1:-1]
        what = f"it lacks {name}, which the config has" if key in names else f"it has {name}, and the config has not"
        raise RunError(f"{source(key)}: {what}; {mismatch}")
    for key, name in names.items():
        tensor, value = own[name], tensors[key]
        shape = tuple(oriented(name, tensor).shape)
        if tuple(value.shape) != shape:
            have = tuple(value.shape)
            raise RunError(f"{source(key)}: {key} is {have}, not {shape} as the config has it; {mismatch}")
        is_quantized = tensor.dtype in quantized.DTYPES.values()
        if value.dtype != tensor.dtype if is_quantized else not value.is_floating_point():
            raise RunError(f"{source(key)}: {key} is {value.dtype}, not {tensor.dtype}; {mismatch}")
        tensor.copy_(oriented(name, value))
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise RunError(f"{source(key)}: {key} is not finite as {tensor.dtype}; take another copy of the model")


def read_model(checkpoint: Path, settings: Mapping[str, Any]) -> GPT:
    """The model of a checkpoint folder, on the CPU, in evaluation mode.

    `settings` are its `config.json`. Raises RunError naming the file that is damaged or does not fit.
    """
    model, weights = GPT(ModelConfig.from_dict(settings["model"]), seed=None), settings.get("weights", "fp32")
    if weights not in quantized.WEIGHTS:
        raise RunError(f"{checkpoint / CONFIG}: weights {weights!r} are unknown; a later version may read them")
    if weights != "fp32":
        model = quantized.quantize(model, weights)
    load_weights(model, checkpoint / MODEL)
    return model.eval()


def resume(checkpoint: Path, model: GPT) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fill a model from a checkpoint, and return its `state.json` and the optimizer's tensors.

    Raises RunError, pointing to --init-from, if the checkpoint holds weights alone.
    """
    if not (checkpoint / OPTIM).is_file():
        raise RunError(
            f"{checkpoint}: it has weights and no optimizer, so it cannot be resumed; "
            f"start a new run from it with `init_from` {checkpoint}"
        )
    state = atomic.read_json(checkpoint / STATE)
    if not isinstance(state, dict) or state.get("step") != folder.step_of(checkpoint):
        raise RunError(f"{checkpoint / STATE}: its step is not the folder's; take another checkpoint")
    load_weights(model, checkpoint / MODEL)
    return state, read_tensors(checkpoint / OPTIM)
