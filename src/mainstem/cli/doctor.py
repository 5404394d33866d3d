"""`mainstem doctor RUN|PRESET`: before step 0, whether it can work; after a failure, what went wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstem.cli.parse import Positional, parse
from mainstem.cli.screen import Screen
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import UserError, nearest
from mainstem.presets import PRESETS
from mainstem.text import tokens
from mainstem.training import doctor
from mainstem.training.folder import RunFolder


@dataclass(frozen=True)
class Doctor:
    """Look at memory, disk, epochs and rates before a run; at checkpoints, losses and the stream after one."""

    target: Positional[str]
    """A preset or a run folder."""
    json: bool = False
    """One object on stdout."""


def _train_tokens(folder: RunFolder, settings: dict[str, Any]) -> int | None:
    """How many tokens the run trains on, if its token files are where it left them."""
    for path in (folder.data, *map(Path, settings.get("asked", {}).get("data", ()))):
        if (path / tokens.PASSPORT).is_file():
            return len(tokens.load(path).train)
    return None


def main(argv: Sequence[str]) -> None:
    """Parse, look, print. Findings that are not well do not change the exit code."""
    command = parse(Doctor, "doctor", argv)
    screen, folder = Screen(command.json), RunFolder(command.target)
    if folder.exists():
        settings = folder.settings()
        model, train = ModelConfig.from_dict(settings["model"]), TrainConfig.from_dict(settings["train"])
        findings = doctor.before(model, train, folder.path, _train_tokens(folder, settings))
        findings += doctor.after(folder) + doctor.leftovers(folder)
    elif command.target in PRESETS:
        preset = PRESETS[command.target]
        findings = doctor.before(preset.model, preset.train, Path("runs"), None)
    elif folder.path.exists():
        raise UserError(f"{folder.path}: no run was started here (no run.json); name a run folder or a preset")
    else:
        raise UserError(f"{command.target}: neither a preset nor a run folder; {nearest(command.target, PRESETS)}")
    screen.table(["", "what", "found"], [["ok" if f.ok else "!!", f.name, f.text] for f in findings])
    well = all(finding.ok for finding in findings)
    screen.result({"target": command.target, "ok": well, "findings": [vars(finding) for finding in findings]})
