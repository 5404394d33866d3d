"""The model card: the README.md of an exported folder. What is not recorded is marked as such."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mainstem import counts
from mainstem.atomic import read_json
from mainstem.config import ModelConfig, TrainConfig
from mainstem.formats.run import ModelFolder, resolve
from mainstem.presets import PRESETS
from mainstem.runs.checkpoint import CARD
from mainstem.runs.folder import RunFolder, read_rows, run_of, step_of
from mainstem.text.corpus import Source
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tokens import PASSPORT

_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LICENCE = re.compile(r"^license(?:_name|_link)?:.*(?:\n[ \t-].*)*", re.MULTILINE)
_KINDS = {"bpe": "byte-level BPE", "char": "characters", "byte": "bytes"}


@dataclass(frozen=True)
class Facts:
    """The facts of a model card; a part that is not recorded is empty."""

    name: str
    """The name of the run folder."""
    config: ModelConfig
    """The config of the exported model."""
    tokenizer: str
    """The kind of tokenizer, in words."""
    settings: Mapping[str, Any]
    """The contents of `run.json`."""
    passport: Mapping[str, Any]
    """The manifest of the training text, `passport.json`."""
    evaluation: Mapping[str, Any]
    """The evaluation row of this checkpoint in `metrics.jsonl`."""
    step: int | None
    """The step of the checkpoint; None where it is unknown."""
    earlier: str
    """The model card that the imported model had."""

    @property
    def licence(self) -> list[str]:
        """The licence lines in the front matter of the earlier card."""
        front = _FRONT.match(self.earlier)
        return _LICENCE.findall(front[1]) if front else []

    @property
    def description(self) -> str:
        """One sentence about the architecture and size of the model."""
        c = self.config.resolved()
        return (
            f"A GPT of {_many(c.n_layer, 'block')}, {c.d_model} wide, {_many(c.n_head, 'head')} of {c.d_head}, "
            f"{_many(c.n_ctx, 'position')}; residual {c.residual}, norm {c.norm}, activation {c.activation}, positions "
            f"{c.position}; {_many(counts.parameters(c).total, 'parameter')} (a tied matrix counts once); vocabulary "
            f"{c.vocab_size:,} ({self.tokenizer})."
        )


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def gather(run: Path | str | ModelFolder, config: ModelConfig, tokenizer: Tokenizer | None) -> Facts:
    """Collect the facts of a run or checkpoint; `config` is the config of the exported model."""
    source = resolve(run)
    place = source.path
    inside = run_of(place)
    folder, step = (RunFolder(source.name), None) if inside is None else (inside, step_of(place.resolve()))
    prepared = folder.prepared()
    rows = [row for row in read_rows(folder.metrics) if row.get("kind") == "eval" and row["step"] == step]
    card = place / CARD
    return Facts(
        name=folder.path.resolve().name,
        config=config,
        tokenizer="no tokenizer" if tokenizer is None else _KINDS[tokenizer.kind],
        settings=folder.settings() if folder.exists() else {},
        passport={} if prepared is None else read_json(prepared / PASSPORT),
        evaluation=rows[-1] if rows else {},
        step=step,
        earlier=card.read_text(encoding="utf-8", errors="replace") if card.is_file() else "",
    )


def markdown(facts: Facts, library: str, opening: Iterable[str], notes: Iterable[str] = ()) -> str:
    """The model card as Markdown.

    Args:
        facts: from `gather`.
        library: the package that loads the exported folder.
        opening: lines of Python that load it.
        notes: what the export dropped or changed.
    """
    lines = ["---", *facts.licence, f"library_name: {library}", "pipeline_tag: text-generation"]
    lines += ["tags:", "- mainstem", "---", "", f"# {facts.name}", "", facts.description]
    lines += ["", *(f"- {note[0].upper()}{note[1:]}." for note in notes)] if notes else []
    if facts.passport or not facts.earlier:
        lines += ["", "## Text", "", *_text(facts.passport)]
    if facts.settings or not facts.earlier:
        lines += ["", "## Training", "", *_training(facts)]
    lines += ["", "## Usage", "", "```python", *opening, "```"]
    if facts.earlier:
        lines += ["", "## The original model card", "", _FRONT.sub("", facts.earlier).strip()]
    return "\n".join(lines) + "\n"


def _text(passport: Mapping[str, Any]) -> list[str]:
    if not passport:
        return ["The training text and its licence are not recorded."]
    rows = [f"| {Path(str(row['name'])).name} | {row['bytes']:,} | `{row['sha256']}` |" for row in passport["sources"]]
    counted = passport["counts"]
    held_out = "a text of its own" if passport.get("validation") else "the last tenth"
    licence = passport.get("licence") or "not recorded; check it before you distribute the model"
    return [
        "| text | bytes | sha256 |", "|---|---|---|", *rows, "",
        f"{_many(counted['documents'], 'document')}, {_many(counted['tokens'], 'token')}; {held_out} was held out.",
        f"Licence of the text: {licence}.",
    ]  # fmt: skip


def _training(facts: Facts) -> list[str]:
    if not facts.settings:
        return ["The training settings are not recorded."]
    train = TrainConfig.from_dict(facts.settings["train"])
    n_ctx, done = facts.config.n_ctx, facts.step or train.steps
    lines = [
        f"{done:,} of {_many(train.steps, 'step')} of {_many(train.batch_size, 'window')} of {n_ctx:,} tokens, "
        f"{done * train.batch_size * n_ctx:,} tokens in total; {train.optimizer}, seed {train.seed}.",
    ]
    nats, bits = facts.evaluation.get("loss"), facts.evaluation.get("bits_per_byte")
    if nats is not None and bits is not None:
        lines += [f"Held-out loss: {nats:.4f} nats per token, {bits:.4f} bits per byte."]
    versions = facts.settings.get("software", {}) | facts.settings.get("made_with", {})
    lines += [f"Made with {', '.join(f'{name} {value}' for name, value in versions.items())}."] if versions else []
    options = facts.settings.get("asked")
    if options is not None and options["init_from"] is not None:
        name = Path(options["init_from"]).name
        lines += [f"Training started from the weights of {name}; their licence is not recorded here."]
    if (line := command(facts.name, options)) is not None:
        lines += ["", "The command:", "", "```", line, "```"]
    return lines


def command(name: str, options: Mapping[str, Any] | None) -> str | None:
    """The `mainstem train` command of a run, files without their folders; None for a run of the library."""
    if options is None or options["preset"] not in PRESETS:
        return None
    preset, words = PRESETS[options["preset"]], ["mainstem", "train", name, "--preset", options["preset"]]
    for flag in ("data", "val"):
        if options[flag] and options[flag] != [preset.data]:
            words += [f"--{flag}", *(Path(each).name for each in options[flag])]
    for flag, default in (("tokenizer", "bpe"), ("init_from", None)):
        if options[flag] != default:
            words += [f"--{flag.replace('_', '-')}", Path(options[flag]).name]
    reading = {field.name: field.default for field in fields(Source)}
    groups: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("", options["reading"], reading), ("", options["train"], preset.train.to_dict()),
        ("model.", options["model"], preset.model.to_dict()),
    ]  # fmt: skip
    for prefix, values, defaults in groups:
        for field, value in values.items():
            if value != defaults.get(field):
                words += _flag(prefix, field.replace("_", "-"), value)
    return shlex.join(words)


def _flag(prefix: str, field: str, value: Any) -> list[str]:
    """The command-line words of a field and its value."""
    if isinstance(value, bool):
        return [f"--{prefix}{field}" if value else f"--{prefix}no-{field}"]
    return [f"--{prefix}{field}", str(value)]
