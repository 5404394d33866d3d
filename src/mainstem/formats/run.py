"""Resolve a RUN: a run folder, a checkpoint, a bundled model, or a folder in Hugging Face's layout. No torch."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mainstem import atomic
from mainstem.config import ModelConfig
from mainstem.errors import DataError, RunError
from mainstem.formats.hf import config as hf_config
from mainstem.formats.hf import tokenizer as hf_tokenizer
from mainstem.runs import folder
from mainstem.runs.folder import BUNDLED, CONFIG, MODEL
from mainstem.text import tokenizer as tokenizers
from mainstem.text import tokens
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tokens import TOKENIZER, Prepared

_PICKLE = "a pickle; mainstem import nanogpt reads those of nanoGPT and minGPT"
_FILES = {
    ".gguf": "a GGUF file, which can be exported but not read; give the folder that it was exported from",
    ".pt": _PICKLE, ".pth": _PICKLE, ".bin": _PICKLE,
}  # fmt: skip
"""Why a file of this suffix is not a RUN, and what to do."""


def is_foreign(run: Path | str) -> bool:
    """Whether another program wrote a folder: it has `config.json` or weights, and none of mainstem's files."""
    path = Path(run)
    ours = any((path / name).exists() for name in ("run.json", "manifest.json", "checkpoints"))
    if ours or not path.is_dir():
        return False
    if not (path / hf_config.CONFIG).is_file():
        return any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))
    try:
        config = json.loads((path / hf_config.CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return not (isinstance(config, dict) and "format" in config)  # else a checkpoint without its manifest


def is_run(path: Path | str) -> bool:
    """Whether a path is a RUN folder, valid or damaged."""
    path = Path(path)
    return is_foreign(path) or any((path / name).exists() for name in ("run.json", "checkpoints", CONFIG))


USED = (CONFIG, TOKENIZER, MODEL)
"""The files of a checkpoint that `load` reads."""


@dataclass(frozen=True)
class ModelFolder:
    """The model folder of a RUN. Each file of a checkpoint is verified once, before it is read.

    `resolve` returns one; `load` accepts one in place of a RUN.
    """

    name: str
    """The RUN as the user wrote it."""
    path: Path
    """The checkpoint folder, or the folder of another program."""
    foreign: bool
    """Whether another program wrote it, without a manifest, and in Hugging Face's layout."""
    verified: set[str] = field(default_factory=set, repr=False, compare=False)
    """Names of the files whose checksum has been verified."""

    def verify(self, *names: str) -> None:
        """Verify the checksums of a checkpoint's files, once each. Raises RunError with the name of a damaged file."""
        todo = set(names) - self.verified
        if self.foreign or not todo:
            return
        if (fault := atomic.fault(self.path, todo, optional=(TOKENIZER,))) is not None:
            raise RunError(f"{fault}; open another checkpoint of this run, or the run itself")
        self.verified.update(todo)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The `config.json` of a checkpoint: `model`, `train`, and `weights` where they are quantized."""
        self.verify(CONFIG)
        return folder.checkpoint_settings(self.path)

    @cached_property
    def config(self) -> ModelConfig:
        """The model's config."""
        return hf_config.read(self.path) if self.foreign else ModelConfig.from_dict(self.settings["model"])

    @property
    def weights(self) -> str:
        """How the matrices are stored: fp32, bf16 or int8; fp32 for other programs' weights, which `load` converts."""
        return "fp32" if self.foreign else str(self.settings.get("weights", "fp32"))

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has the files of a tokenizer; they may still be damaged."""
        return hf_tokenizer.has_files(self.path) if self.foreign else (self.path / TOKENIZER).is_file()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the folder has none."""
        if self.foreign:
            return hf_tokenizer.read(self.path)
        if not (self.path / TOKENIZER).is_file():
            return None
        self.verify(TOKENIZER)
        return tokenizers.load(self.path / TOKENIZER)


def resolve(
    run: Path | str | ModelFolder,
    notice: Callable[[str], None] = lambda text: None,
    files: Collection[str] = USED,
) -> ModelFolder:
    """The model folder of a RUN; a resolved one is returned unchanged.

    Args:
        run: a run folder (the best checkpoint if there is one, else the last), a checkpoint, the name of a bundled
            model, or a folder in Hugging Face's layout. A folder takes precedence over a bundled model of its name.
        notice: called with a sentence for each damaged checkpoint that is skipped.
        files: the files that will be read. In a run folder, a checkpoint in which one of them is damaged is skipped; a
            damaged checkpoint given by its own path raises RunError.

    Raises RunError where no model is found.
    """
    if isinstance(run, ModelFolder):
        return run
    path = Path(run)
    if is_foreign(path):
        return ModelFolder(str(run), path, foreign=True)
    if path.is_file():
        reason = _FILES.get(path.suffix.lower(), "a file; give the folder of a run or of a model")
        raise RunError(f"{run}: {reason}")
    if not path.exists() and str(path) in BUNDLED:
        path = BUNDLED[str(path)]
    if (path / CONFIG).is_file() or folder.is_step(path):
        checkpoint = ModelFolder(str(run), path, foreign=False)
        checkpoint.verify(*files)
        return checkpoint
    if not path.exists():
        raise RunError(
            f"{path}: not found; start a run with: mainstem train {path} --preset tiny; or open the bundled model: "
            + ", ".join(BUNDLED)
        )
    runs = folder.RunFolder(path)
    if not runs.exists() and not runs.found():
        raise RunError(f"{path}: neither a run folder (no run.json) nor a checkpoint (no config.json)")
    return ModelFolder(str(run), runs.best_or_last(notice, files), foreign=False, verified=set(files))


def model_config(run: Path | str) -> ModelConfig:
    """The model config of a RUN, without its weights; of a run folder, from `run.json`."""
    started = folder.RunFolder(run)
    if started.exists():
        return ModelConfig.from_dict(started.settings()["model"])
    return resolve(run, files=(CONFIG,)).config


def tokenizer(name: Path | str) -> Tokenizer:
    """The tokenizer of a RUN, of a prepared folder, of a folder with GPT-2's two files, or in a tokenizer file.

    Raises DataError or RunError if it has no tokenizer.
    """
    path = Path(name)
    ours = is_run(path) and not is_foreign(path)
    if path.is_dir() and not ours and not (path / tokens.PASSPORT).is_file():
        opened = hf_tokenizer.read(path)
        if opened is None:
            raise RunError(f"{path}: no tokenizer.json, and no vocab.json with merges.txt")
        return opened
    if path.is_dir() and (path / "data" / TOKENIZER).is_file():
        path = path / "data"
    elif str(name) in BUNDLED or (path.is_dir() and not (path / TOKENIZER).is_file()):
        path = resolve(name, files=(TOKENIZER,)).path
    return hf_tokenizer.open_file(path / TOKENIZER if path.is_dir() else path)


def prepared(run: Path | str, data: Path | str | None, tokenizer: Tokenizer) -> Prepared:
    """The prepared folder `data`; default: that of the run. Raises DataError if its tokenizer is not the run's."""
    path = Path(data) if data is not None else folder.RunFolder(run).prepared()
    if path is None:
        raise DataError(f"{run}: no token files; give a folder that `mainstem data` wrote, as `data`")
    data_folder = tokens.load(path)
    if data_folder.tokenizer.hash != tokenizer.hash:
        raise DataError(
            f"{data_folder.path}: its tokenizer is not the run's; prepare the text again with the tokenizer of {run}"
        )
    return data_folder
