"""What a RUN is: a run of ours, a checkpoint, a bundled model, or a folder in Hugging Face's layout. No torch."""

import json
from collections.abc import Callable
from pathlib import Path

from mainstem.config import ModelConfig
from mainstem.errors import DataError, RunError
from mainstem.formats.hf import config as hf_config
from mainstem.formats.hf import tokenizer as hf_tokenizer
from mainstem.runs import folder
from mainstem.text import tokens
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tokens import TOKENIZER, Prepared

_PICKLE = "a pickle; mainstem import nanogpt reads those of nanoGPT and minGPT"
_FILES = {
    ".gguf": "a GGUF file, which is written and not read; give the folder that it was made from",
    ".pt": _PICKLE, ".pth": _PICKLE, ".bin": _PICKLE,
}  # fmt: skip
"""What is said of a file in a RUN's place."""


def is_foreign(run: Path | str) -> bool:
    """Whether it is a folder of another program: it has a `config.json` or weights, and nothing of ours."""
    path = Path(run)
    ours = any((path / name).exists() for name in ("run.json", "manifest.json", "checkpoints"))
    if ours or not path.is_dir():
        return False
    if not (path / hf_config.CONFIG).is_file():
        return any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))
    try:
        said = json.loads((path / hf_config.CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return not (isinstance(said, dict) and "format" in said)  # that one is ours, and has lost its manifest


def is_run(path: Path | str) -> bool:
    """Whether a folder of that path is a RUN, sound or not."""
    path = Path(path)
    return is_foreign(path) or any((path / name).exists() for name in ("run.json", "checkpoints", folder.CONFIG))


def find(run: Path | str, notice: Callable[[str], None] = lambda text: None) -> Path:
    """The folder whose weights a RUN means. Raises RunError where there is none that can be opened.

    `notice` is told of damaged checkpoints that were passed over.
    """
    if is_foreign(run):
        return Path(run)
    if Path(run).is_file():
        what = _FILES.get(Path(run).suffix.lower(), "a file; give the folder of a run or of a model")
        raise RunError(f"{run}: {what}")
    return folder.resolve(run, notice)


def model_config(run: Path | str) -> ModelConfig:
    """The model's config of a RUN, without reading its weights."""
    return hf_config.read(Path(run)) if is_foreign(run) else folder.model_config(run)


def stored(run: Path | str) -> str:
    """How a RUN's matrices are stored: fp32, bf16 or int8; fp32 of those that are widened when they are opened."""
    path = find(run)
    return "fp32" if is_foreign(path) else str(folder.checkpoint_settings(path).get("weights", "fp32"))


def has_tokenizer(run: Path | str) -> bool:
    """Whether a RUN has the files of one; they may still be damaged."""
    return hf_tokenizer.has_files(find(run))


def tokenizer(name: Path | str) -> Tokenizer:
    """The tokenizer of a RUN, a prepared folder, a folder with GPT-2's two files, or a file itself.

    Raises DataError or RunError for what is none, and for a RUN without one.
    """
    path = Path(name)
    ours = is_run(path) and not is_foreign(path)
    if path.is_dir() and not ours and not (path / tokens.PASSPORT).is_file():
        found = hf_tokenizer.read(path)
        if found is None:
            raise RunError(f"{path}: no tokenizer.json, and no vocab.json with merges.txt")
        return found
    if path.is_dir() and (path / "data" / TOKENIZER).is_file():
        path = path / "data"
    elif str(name) in folder.BUNDLED or (path.is_dir() and not (path / TOKENIZER).is_file()):
        path = folder.resolve(name)
    return hf_tokenizer.open_file(path / TOKENIZER if path.is_dir() else path)


def prepared(run: Path | str, data: Path | str | None, tokenizer: Tokenizer) -> Prepared:
    """The prepared folder `data`, or a run's own wherever it stands. Raises DataError for another tokenizer's."""
    path = Path(data) if data is not None else folder.RunFolder(run).prepared()
    if path is None:
        raise DataError(f"{run}: no token files are here; give a folder that `mainstem data` made, as `data`")
    found = tokens.load(path)
    if found.tokenizer.hash != tokenizer.hash:
        raise DataError(
            f"{found.path}: its tokenizer is not the run's; prepare the text again with the tokenizer of {run}"
        )
    return found
