"""Checkpoints: tensors in safetensors, everything else in JSON; a folder that is either whole or absent.

No pickle is read or written. Every tensor is read to the CPU first, whichever device wrote it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mainstem import durable
from mainstem.config import ModelConfig
from mainstem.errors import RunError, TrainingFailed
from mainstem.model.gpt import GPT
from mainstem.text import tokenizer as tokenizers
from mainstem.text.tokenizer import Tokenizer
from mainstem.training import folder
from mainstem.training.optim import Optimizer

MODEL, OPTIM, STATE, CONFIG, TOKENIZER = (
    "model.safetensors", "optim.safetensors", "state.json", "config.json", "tokenizer.json"
)  # fmt: skip
_WRAPPERS = re.compile(r"(?:(?<=^)|(?<=\.))(?:(?:module|_orig_mod)\.)+")
_SYSTEM_ERROR = re.compile(r"os error (\d+)")


def save(
    final: Path,
    model: GPT,
    tokenizer: Tokenizer | None,
    *,
    train: dict[str, Any] | None = None,
    optimizer: Optimizer | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint folder: the model always, training's own state when there is one.

    A tied matrix is written once. Raises TrainingFailed on a non-finite weight or a full disk; nothing is left then.
    """
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise TrainingFailed(f"{final}: {name} is not finite, so nothing was saved; lower --lr")
    with durable.whole_folder(final) as temporary:
        _write(temporary / MODEL, tensors)
        if optimizer is not None:
            _write(temporary / OPTIM, optimizer.tensors())
        settings = {"format": folder.FORMAT, "model": model.config.to_dict(), "train": train}
        (temporary / CONFIG).write_text(durable.to_json(settings), encoding="utf-8")
        (temporary / STATE).write_text(durable.to_json(state or {}), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(temporary / TOKENIZER)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # it wraps the system's error, whose number stands in its text alone
        number = _SYSTEM_ERROR.search(str(error))
        raise OSError(int(number[1]) if number else 0, str(error)) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU. Raises RunError naming the file if it is damaged."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path}: not readable ({error}); take another checkpoint") from None


def load_weights(model: GPT, path: Path) -> None:
    """Fill a model from a file, strictly: every parameter once, of its own shape, and nothing more.

    Prefixes that wrappers leave (`module.`, `_orig_mod.`) are taken off in any nesting. Raises RunError otherwise.
    """
    tensors = {_WRAPPERS.sub("", name): tensor for name, tensor in read_tensors(path).items()}
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() ^ tensors.keys()):
        where = "the file lacks" if name in parameters else "the model has no"
        raise RunError(f"{path}: {where} {name}; the file and its config.json do not belong together")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                found, wanted = tuple(tensors[name].shape), tuple(parameter.shape)
                raise RunError(f"{path}: {name} is {found}, not {wanted}; file and config.json do not belong together")
            parameter.copy_(tensors[name])


def load(run: Path | str, notice: Callable[[str], None] = lambda text: None) -> tuple[GPT, Tokenizer | None]:
    """Open a RUN: a run folder (best checkpoint if there is one, else last) or a checkpoint folder.

    Returns the model in evaluation mode, on the CPU, and the tokenizer (None where the folder has none). `notice` is
    told of damaged checkpoints that were passed over.
    """
    checkpoint = folder.resolve(run, notice)
    config = ModelConfig.from_dict(folder.checkpoint_settings(checkpoint)["model"])
    model = GPT(config)
    load_weights(model, checkpoint / MODEL)
    model.eval()
    has_tokenizer = (checkpoint / TOKENIZER).is_file()
    return model, tokenizers.load(checkpoint / TOKENIZER) if has_tokenizer else None


def resume(checkpoint: Path, model: GPT, optimizer: Optimizer) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint and return its `state.json`.

    Raises RunError, pointing to --init-from, if the checkpoint holds weights alone.
    """
    if not (checkpoint / OPTIM).is_file():
        raise RunError(
            f"{checkpoint}: it has weights and no optimizer, so it cannot be resumed; "
            f"start a new run from it with --init-from {checkpoint}"
        )
    state = durable.read_json(checkpoint / STATE)
    if not isinstance(state, dict) or state.get("step") != folder.step_of(checkpoint):
        raise RunError(f"{checkpoint / STATE}: its step is not the folder's; take another checkpoint")
    load_weights(model, checkpoint / MODEL)
    optimizer.load_tensors(read_tensors(checkpoint / OPTIM), state["step"])
    return state
