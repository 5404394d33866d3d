"""A model's card: what is known of it, as the README.md of an exported folder. What is not known is said to be so."""

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
    """What is known of a model; a part that nobody recorded is empty."""

    name: str
    """Of the run's folder."""
    config: ModelConfig
    """Of the model that is written."""
    tokenizer: str
    """In words."""
    settings: Mapping[str, Any]
    """The run's `run.json`."""
    passport: Mapping[str, Any]
    """Of the text."""
    evaluation: Mapping[str, Any]
    """The row of the held-out text at this checkpoint."""
    step: int | None
    """Of the checkpoint."""
    earlier: str
    """The card that it came with."""

    @property
    def licence(self) -> list[str]:
        """The lines about a licence in the front matter of the earlier card."""
        front = _FRONT.match(self.earlier)
        return _LICENCE.findall(front[1]) if front else []

    @property
    def description(self) -> str:
        """One sentence."""
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
    """What the files of a RUN tell about its model, which is written with this config."""
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
    """The card's text.

    Args:
        facts: what is known.
        library: the package that opens the exported folder.
        opening: lines of Python that open it.
        notes: what the export left out or changed.
    """
    lines = ["---", *facts.licence, f"library_name: {library}", "pipeline_tag: text-generation"]
    lines += ["tags:", "- mainstem", "---", "", f"# {facts.name}", "", facts.description]
    lines += ["", *(f"- {note[0].upper()}{note[1:]}." for note in notes)] if notes else []
    if facts.passport or not facts.earlier:
        lines += ["", "## Text", "", *_text(facts.passport)]
    if facts.settings or not facts.earlier:
        lines += ["", "## Training", "", *_training(facts)]
    lines += ["", "## Open it", "", "```python", *opening, "```"]
    if facts.earlier:
        lines += ["", "## The card that it came with", "", _FRONT.sub("", facts.earlier).strip()]
    return "\n".join(lines) + "\n"


def _text(passport: Mapping[str, Any]) -> list[str]:
    if not passport:
        return ["What it was trained on is not recorded here, nor under which licence that is."]
    rows = [f"| {Path(str(row['name'])).name} | {row['bytes']:,} | `{row['sha256']}` |" for row in passport["sources"]]
    met = passport["counts"]
    held_out = "a text of its own" if passport.get("validation") else "the last tenth"
    licence = passport.get("licence") or "not recorded; who passes the model on has to know it"
    return [
        "| text | bytes | sha256 |", "|---|---|---|", *rows, "",
        f"{_many(met['documents'], 'document')}, {_many(met['tokens'], 'token')}; {held_out} was held out.",
        f"Licence of the text: {licence}.",
    ]  # fmt: skip


def _training(facts: Facts) -> list[str]:
    if not facts.settings:
        return ["How it was trained is not recorded here."]
    train = TrainConfig.from_dict(facts.settings["train"])
    n_ctx, done = facts.config.n_ctx, facts.step or train.steps
    lines = [
        f"{done:,} of {_many(train.steps, 'step')} of {_many(train.batch_size, 'window')} of {n_ctx:,} tokens, "
        f"{done * train.batch_size * n_ctx:,} tokens in all; {train.optimizer}, seed {train.seed}.",
    ]
    nats, bits = facts.evaluation.get("loss"), facts.evaluation.get("bits_per_byte")
    if nats is not None and bits is not None:
        lines += [f"On the held-out text: {nats:.4f} nats a token, {bits:.4f} bits per byte."]
    made = facts.settings.get("software", {}) | facts.settings.get("made_with", {})
    lines += [f"Made with {', '.join(f'{name} {value}' for name, value in made.items())}."] if made else []
    asked = facts.settings.get("asked")
    if asked is not None and asked["init_from"] is not None:
        lines += [f"It began with the weights of {Path(asked['init_from']).name}; their licence is not recorded here."]
    if (line := command(facts.name, asked)) is not None:
        lines += ["", "The command:", "", "```", line, "```"]
    return lines


def command(name: str, asked: Mapping[str, Any] | None) -> str | None:
    """The line that trains such a run, files by their names alone; None for a run that the library made."""
    if asked is None or asked["preset"] not in PRESETS:
        return None
    preset, words = PRESETS[asked["preset"]], ["mainstem", "train", name, "--preset", asked["preset"]]
    for flag in ("data", "val"):
        if asked[flag] and asked[flag] != [preset.data]:
            words += [f"--{flag}", *(Path(each).name for each in asked[flag])]
    for flag, default in (("tokenizer", "bpe"), ("init_from", None)):
        if asked[flag] != default:
            words += [f"--{flag.replace('_', '-')}", Path(asked[flag]).name]
    reading = {field.name: field.default for field in fields(Source)}
    groups: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("", asked["reading"], reading), ("", asked["train"], preset.train.to_dict()),
        ("model.", asked["model"], preset.model.to_dict()),
    ]  # fmt: skip
    for prefix, given, usual in groups:
        for field, value in given.items():
            if value != usual.get(field):
                words += _flag(prefix, field.replace("_", "-"), value)
    return shlex.join(words)


def _flag(prefix: str, field: str, value: Any) -> list[str]:
    """A field as it is typed."""
    if isinstance(value, bool):
        return [f"--{prefix}{field}" if value else f"--{prefix}no-{field}"]
    return [f"--{prefix}{field}", str(value)]
