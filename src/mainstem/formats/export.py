"""`save` and `export`: a model and its tokenizer as a RUN of ours, or in other programs' formats."""

from pathlib import Path

from mainstem import atomic
from mainstem.errors import ConfigError, nearest
from mainstem.formats import gguf
from mainstem.formats.hf import folder as hf
from mainstem.model.gpt import GPT
from mainstem.model.quantized import WEIGHTS, quantize, weights_of
from mainstem.runs import checkpoint
from mainstem.text.tokenizer import Tokenizer

FORMATS = ("hf", "gguf", "safetensors")


def save(model: GPT, tokenizer: Tokenizer | None, folder: Path | str) -> Path:
    """Save a model and its tokenizer as a RUN, without optimizer state, and return the folder.

        ms.save(model, tokenizer, "models/mine")
        model, tokenizer = ms.load("models/mine")

    Args:
        model: any model; quantized matrices are stored as they are.
        tokenizer: the model's; None for a model that takes ids alone.
        folder: a new or empty folder.

    The folder is written atomically. Raises RunError where it is in use, TrainingFailed for weights that are not finite
    or on a full disk.
    """
    path = atomic.unused(Path(folder))
    checkpoint.save(path, model, tokenizer)
    return path


def export(
    model: GPT, tokenizer: Tokenizer | None, path: Path | str, format: str = "hf", *, weights: str | None = None
) -> Path:
    """Write a model and its tokenizer for other programs, atomically, and return the path.

        ms.export(*ms.load("runs/demo"), "demo-hf")                                   # transformers opens it
        ms.export(*ms.load("runs/demo"), "demo.gguf", "gguf", weights="q8_0")         # llama.cpp runs it
        ms.export(*ms.load("runs/demo"), "demo-int8", "safetensors", weights="int8")

    Args:
        model: a model that the format supports.
        tokenizer: the model's; None writes none.
        path: a new or empty folder; for gguf a file, which may replace a GGUF file.
        format: `hf` (a folder in Hugging Face's GPT-2 layout), `gguf`, or `safetensors` (a RUN, which holds any model).
        weights: how the matrices are stored: for gguf f32 (the default), f16 or q8_0; for safetensors fp32, bf16 or
            int8, by default as they are; hf has none.

    Raises ConfigError for what the format does not support, RunError where the path is in use, TrainingFailed on a full
    disk, UserError where the package gguf is not installed.
    """
    path = Path(path)
    if format not in FORMATS:
        raise ConfigError(f"format: unknown value {format!r}; {nearest(format, FORMATS)}")
    if format == "gguf":
        gguf.write(path, model, tokenizer, weights or "f32")
        return path
    if format == "safetensors":
        have = weights_of(model)
        if weights not in (None, *WEIGHTS):
            raise ConfigError(f"weights: unknown value {weights!r}; {nearest(str(weights), WEIGHTS)}")
        if weights not in (None, have):
            if have != "fp32":
                raise ConfigError(f"weights: {weights!r} is not possible, the model's are {have}; leave it out")
            model = quantize(model, str(weights))
        return save(model, tokenizer, path)
    if weights is not None:
        raise ConfigError(f"weights: {weights!r} is not possible; hf stores float32")
    hf.write(path, model, tokenizer)
    return path
