"""All benchmarks by one command, each in a process of its own, as one table: benchmarks/RESULTS.md."""

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstem import atomic
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.errors import RunError, TrainingFailed
from mainstem.runs.provenance import commit

RATES = ("ratio", "speedup", "growth")
"""Ends of the names of figures, beside those that say what is over what."""


@dataclass(frozen=True)
class Result:
    """What one benchmark said."""

    words: tuple[str, ...]
    """As they are typed after `python -m benchmarks`."""
    found: dict[str, Any]
    """Its object."""

    def rows(self) -> list[tuple[str, str, str]]:
        """Each figure, its value, and the middle half of its ratios where the benchmark has one."""
        rows = []
        for name, value in self.found.items():
            is_figure = "_over_" in name or "_minus_" in name or name.split("_")[-1] in RATES
            if is_figure and (value is None or isinstance(value, float)):
                rows.append((name, _number(value), self._middle(name)))
        return rows

    def _middle(self, name: str) -> str:
        timing = self.found.get("timings", {}).get(name) or {}
        quartiles = timing.get("ratio_quartiles")
        if quartiles is None and name == "encode_over_tokenizers":
            quartiles = self.found.get("ratio_quartiles")
        if quartiles is None and name == "speedup":
            return ", ".join(_number(row["speedup"]) for row in self.found["seeds"]) + " (by seed)"
        return " to ".join(map(_number, quartiles)) if quartiles else ""


def commands(data: str, run: str | None) -> list[tuple[str, ...]]:
    """The benchmarks in their order. `data`: of time-to-loss; `run`: on whose held-out text int8 is measured."""
    trained = ("--run", run) if run is not None else ()
    shapes = [("train", "--shape", shape) for shape in ("small", "mid", "andrea")]
    return [*shapes, ("decode", *trained), ("data",), ("time-to-loss", "--data", data), ("inspect",)]


def measure(
    data: str, run: str | None = None, *, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> Iterator[Result]:
    """Run each of `commands` to its end, one after the other. Raises the error of one that fails, with its message."""
    every = commands(data, run)
    for done, words in enumerate(every):
        progress(done, len(every), words[0])
        line = [sys.executable, "-m", "benchmarks", *words, "--json"]
        process = subprocess.run(line, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if process.returncode != 0:
            said = process.stderr.strip().splitlines() or ["it said nothing"]
            kind = RunError if process.returncode == RunError.exit_code else TrainingFailed
            raise kind(f"{' '.join(words)}: {said[-1]}")
        yield Result(words, json.loads(process.stdout))


def page(results: Sequence[Result]) -> str:
    """The results as Markdown: machine and versions, then a table, then each benchmark's own notes."""
    facts = results[0].found
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks results`. Ratios within one run, medians; `python -m benchmarks QUESTION "
        "--help` says of what.",
        "",
        f"- machine: {_processor()}, {facts['threads']} threads, {platform.system()}, {platform.machine()}",
        f"- mainstem {importlib.metadata.version('mainstem')}, commit {commit()}",
        f"- Python {platform.python_version()}, torch {facts['torch']}, {', '.join(_peers())}",
        "",
        "| question | figure | value | middle half |",
        "|---|---|---|---|",
    ]
    for result in results:
        words = " ".join(Path(word).name if "/" in word else word for word in result.words)
        for number, (name, value, middle) in enumerate(result.rows()):
            lines.append(f"| {f'`{words}`' if number == 0 else ''} | {name} | {value} | {middle} |")
    notes = dict.fromkeys(note for result in results for note in result.found.get("notes", ()))
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def _peers() -> list[str]:
    """The libraries that ours is measured beside, as they are installed."""
    found = []
    for name in ("transformers", "llama-cpp-python", "transformer_lens", "tokenizers"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.2f}"


def _processor() -> str:
    """The processor's name where the system tells it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    name = next((line.split(":")[1] for line in lines if line.startswith("model name")), platform.processor())
    return name.strip() or "an unnamed processor"


@dataclass(frozen=True, kw_only=True)
class Results:
    """Run every benchmark, each in a process of its own, and write their figures into one page. It takes long, and
    nothing else should run meanwhile."""

    data: str
    """The text of `time-to-loss`."""
    run: str | None = None
    """The trained RUN of `decode`, on whose held-out text int8 weights are measured."""
    out: str = "benchmarks/RESULTS.md"
    """The page; one that is there is replaced."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, write."""
    command = parse(Results, "results", argv, program="python -m benchmarks")
    screen = Screen(command.json)

    out = atomic.replaceable(Path(command.out))
    with screen.bar("results", 1) as bar:
        results: list[Result] = []
        for result in measure(
            command.data, command.run, progress=lambda done, total, what: bar.at(done, what, total=total)
        ):
            results.append(result)
            atomic.write_text(out, page(results))  # so that what was measured stays, whatever comes next
    for result in results:
        screen.say(f"{' '.join(result.words)}")
        screen.table(("figure", "value", "middle half"), result.rows())
    screen.say(f"written to {out}")
    screen.result({"out": str(out), "results": [{"words": result.words, **result.found} for result in results]})
