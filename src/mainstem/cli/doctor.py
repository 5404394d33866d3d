"""`mainstem doctor RUN|PRESET`: before step 0, whether it can work; after a failure, what went wrong."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstem import counts
from mainstem.cli.parts.arguments import Positional, parse
from mainstem.cli.parts.flags import spelled
from mainstem.cli.parts.screen import Screen
from mainstem.cli.train import Train
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import UserError, nearest
from mainstem.formats.run import is_run
from mainstem.presets import PRESETS
from mainstem.runs.folder import BUNDLED, RunFolder
from mainstem.text import tokens
from mainstem.training import doctor


@dataclass(frozen=True)
class Doctor:
    """Check memory, disk, epochs and rates before a run; checkpoints, losses and the stream after one."""

    target: Positional[str]
    """A preset or a RUN."""
    json: bool = False
    """One object on stdout."""


def _opened(run: str, screen: Screen) -> list[doctor.Finding]:
    """Findings about a model without a run folder: whether it opens, and the memory that generating takes."""
    from mainstem.formats.load import load

    try:
        model, tokenizer = load(run, screen.note)
    except UserError as error:
        return [doctor.Finding("opens", False, str(error))]
    memory, free = counts.memory(model.config), doctor.free_memory()
    need = memory["weights"] + memory["kv_cache"]
    parts = counts.parameters(model.config).total
    ids = "none; it takes ids and gives ids" if tokenizer is None else f"{tokenizer.kind} of {tokenizer.vocab_size:,}"
    return [
        doctor.Finding("opens", True, f"{parts:,} parameters, each there once, of its shape and finite"),
        doctor.Finding("tokenizer", tokenizer is not None, ids),
        doctor.Finding("memory", need < free, f"about {need / 1e9:.2f} GB to generate; {free / 1e9:.1f} GB are free"),
    ]


def main(argv: Sequence[str]) -> None:
    """Parse, look, print. Findings that are not well do not change the exit code."""
    command = parse(Doctor, "doctor", argv)
    screen, folder = Screen(command.json), RunFolder(command.target)
    if folder.exists():
        settings = folder.settings()
        model, train = ModelConfig.from_dict(settings["model"]), TrainConfig.from_dict(settings["train"])
        place = folder.prepared()
        train_tokens = None if place is None else len(tokens.load(place).train)
        findings = doctor.before(model, train, folder.path, train_tokens)
        findings += doctor.after(folder) + doctor.leftovers(folder)
    elif command.target in PRESETS and not is_run(command.target):
        preset = PRESETS[command.target]
        findings = doctor.before(preset.model, preset.train, Path("runs"), None)
    elif folder.path.exists() or command.target in BUNDLED:
        findings = _opened(command.target, screen)
    else:
        raise UserError(f"{command.target}: neither a preset nor a RUN; {nearest(command.target, PRESETS)}")
    findings = [dataclasses.replace(f, text=spelled(f.text, Train)) for f in findings]  # it speaks of training
    screen.table(["", "what", "found"], [["ok" if f.ok else "!!", f.name, f.text] for f in findings])
    well = all(finding.ok for finding in findings)
    screen.result({"target": command.target, "ok": well, "findings": [vars(finding) for finding in findings]})
