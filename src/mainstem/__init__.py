"""mainstem: a GPT toolkit in which the residual stream is a thing you can hold.

The public names below are loaded when they are first used, so that `import mainstem` loads no torch.
"""

import importlib
from typing import Any

_HOMES = {
    "At": "mainstem.stream.change.intervene",
    "BPE": "mainstem.text.tokenizer",
    "Bytes": "mainstem.text.tokenizer",
    "Characters": "mainstem.text.tokenizer",
    "GPT": "mainstem.model.gpt",
    "Intervention": "mainstem.stream.change.intervene",
    "LogitDifference": "mainstem.stream.metrics",
    "Loss": "mainstem.stream.metrics",
    "ModelConfig": "mainstem.config",
    "PRESETS": "mainstem.presets",
    "Prepared": "mainstem.text.tokens",
    "RESIDUALS": "mainstem.residuals",
    "Recorder": "mainstem.model.tap",
    "RunFolder": "mainstem.runs.folder",
    "Sampling": "mainstem.config",
    "Source": "mainstem.text.corpus",
    "Sublayer": "mainstem.model.sublayer",
    "TokenLogProb": "mainstem.stream.metrics",
    "TokenLogit": "mainstem.stream.metrics",
    "Tokenizer": "mainstem.text.tokenizer",
    "Trace": "mainstem.stream.trace",
    "TrainConfig": "mainstem.config",
    "Training": "mainstem.training.loop",
    "TunedLens": "mainstem.stream.analysis.tuned",
    "UserError": "mainstem.errors",
    "Windows": "mainstem.text.tokens",
    "ablation": "mainstem.stream.change.ablate",
    "add": "mainstem.stream.change.intervene",
    "attribution_patch": "mainstem.stream.change.patch",
    "bigrams": "mainstem.circuits.bigrams",
    "capture": "mainstem.stream.capture",
    "capture_generation": "mainstem.stream.capture",
    "composition": "mainstem.circuits.composition",
    "evaluate": "mainstem.training.evaluate",
    "export": "mainstem.formats.export",
    "generate": "mainstem.generation.decoding",
    "generate_batch": "mainstem.generation.decoding",
    "generate_ids": "mainstem.generation.decoding",
    "head_contexts": "mainstem.circuits.contexts",
    "head_scores": "mainstem.circuits.heads",
    "head_scores_on": "mainstem.circuits.heads",
    "load": "mainstem.formats.load",
    "mean": "mainstem.stream.change.intervene",
    "neuron_contexts": "mainstem.circuits.contexts",
    "overlap": "mainstem.circuits.overlap",
    "patch": "mainstem.stream.change.patch",
    "patch_grid": "mainstem.stream.change.patch",
    "path_patch": "mainstem.stream.change.path",
    "prepare": "mainstem.text.tokens",
    "quantize": "mainstem.model.quantized",
    "resample": "mainstem.stream.change.intervene",
    "save": "mainstem.formats.export",
    "set_to": "mainstem.stream.change.intervene",
    "skip_trigrams": "mainstem.circuits.skip_trigrams",
    "spectra": "mainstem.circuits.spectra",
    "steering_vector": "mainstem.stream.change.steering",
    "stream_text": "mainstem.generation.decoding",
    "train": "mainstem.training.train",
    "train_lens": "mainstem.stream.analysis.tuned",
    "virtual": "mainstem.circuits.virtual",
    "zero": "mainstem.stream.change.intervene",
}

__version__ = "0.1.0"
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name from the room where it lives (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mainstem' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
