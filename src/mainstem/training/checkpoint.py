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
from mainstem.model import quantize
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

    A tied matrix is written once, a narrow one as it is stored.

    Raises TrainingFailed on a non-finite weight or a full disk; nothing is left then.
    """
    tensors = quantize.tensors(model)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise TrainingFailed(f"{final}: {name} is not finite, so nothing was saved; lower --lr")
    with durable.whole_folder(final) as temporary:
        _write(temporary / MODEL, tensors)
        if optimizer is not None:
            _write(temporary / OPTIM, optimizer.tensors())
        settings = {"format": folder.FORMAT, "model": model.config.to_dict(), "train": train}
        if (weights := quantize.weights_of(model)) != "fp32":
            settings["weights"] = weights
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
    """Fill a model from a file, strictly: every tensor once, of its own shape, and nothing more.

    Prefixes that wrappers leave (`module.`, `_orig_mod.`) are taken off in any nesting. Raises RunError otherwise, and
    where the file's matrices are narrow and the model's are not, or the other way round.
    """
    tensors = {_WRAPPERS.sub("", name): tensor for name, tensor in read_tensors(path).items()}
    wanted, weights = quantize.tensors(model), quantize.weights_of(model)
    apart = "the file and its config.json do not belong together"
    if weights == "fp32" and tensors.get("wte.weight", wanted["wte.weight"]).dtype in quantize.DTYPES.values():
        raise RunError(f"{path}: its weights are stored narrow, for generating; take what they were made from")
    for name in sorted(wanted.keys() ^ tensors.keys()):
        where = "the file lacks" if name in wanted else "the model has no"
        raise RunError(f"{path}: {where} {name}; {apart}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            found = tensors[name]
            if tensor.shape != found.shape:
                raise RunError(f"{path}: {name} is {tuple(found.shape)}, not {tuple(tensor.shape)}; {apart}")
            if weights != "fp32" and tensor.dtype != found.dtype:
                raise RunError(f"{path}: {name} is {found.dtype}, not {tensor.dtype}; {apart}")
            tensor.copy_(found)


def load(run: Path | str, notice: Callable[[str], None] = lambda text: None) -> tuple[GPT, Tokenizer | None]:
    """Open a RUN: a run folder (best checkpoint if there is one, else last) or a checkpoint folder.

    Returns the model in evaluation mode, on the CPU, and the tokenizer (None where the folder has none). `notice` is
    told of damaged checkpoints that were passed over.
    """
    checkpoint = folder.resolve(run, notice)
    settings = folder.checkpoint_settings(checkpoint)
    model, weights = GPT(ModelConfig.from_dict(settings["model"])), settings.get("weights", "fp32")
    if weights not in quantize.WEIGHTS:
        raise RunError(f"{checkpoint / CONFIG}: weights {weights!r} are unknown; a later version may read them")
    if weights != "fp32":
        model = quantize.narrow(model, weights)
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
