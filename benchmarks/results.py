"""All benchmarks by one command, each in a process of its own, as one table: benchmarks/RESULTS.md."""

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstem import atomic
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.errors import RunError, TrainingFailed
from mainstem.runs.provenance import commit

Words = tuple[str, ...]
QUICK = {
    "train": "--rounds 1",
    "decode": "--rounds 1 --shape mid",
    "data": "--rounds 1 --megabytes 1 --vocab-size 300",
    "time-to-loss": "--seeds 1 --iterations 2",
    "inspect": "--rounds 1 --preset tiny --tokens 12 --grid-tokens 5",
}
"""The smallest of each question."""
RATES = ("ratio", "speedup", "growth")
"""Ends of the names of figures, beside those that say what is over what."""


@dataclass(frozen=True)
class Result:
    """What one benchmark said."""

    words: tuple[str, ...]
    """As they are typed after `python -m benchmarks`."""
    found: dict[str, Any]
    """Its object."""
    seconds: float
    """From its start to its end."""

    def rows(self) -> list[tuple[str, str, str]]:
        """Each figure, its value, and the interquartile range of its ratios where the benchmark has one."""
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
            return ", ".join(_number(row["speedup"]) for row in self.found["seeds"]) + f" (by seed{self._chosen()})"
        return " to ".join(map(_number, quartiles)) if quartiles else ""

    def _chosen(self) -> str:
        text = self.found.get("chosen_on")
        return f"; settings chosen on {text}" if text else ""


def commands(data: str, run: str | None = None, other: str | None = None, quick: bool = False) -> list[Words]:
    """The benchmarks in their order.

    Args:
        data, other: the texts of time-to-loss, a row each.
        run: on whose held-out text int8 is measured.
        quick: take the smallest of everything, to try the way; the figures mean nothing.
    """
    trained = ("--run", run) if run is not None else ()
    shapes = [("train", "--shape", shape) for shape in ("small", "mid", "andrea")]
    races = [("time-to-loss", "--data", text) for text in (data, other) if text is not None]
    words: list[Words] = [*shapes, ("decode", *trained), ("data",), *races, ("inspect",)]
    if not quick:
        return words
    return [(*each, *QUICK[each[0]].split()) for each in words if each not in shapes[1:]]


def measure(
    every: Sequence[Words], *, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> Iterator[Result]:
    """Run each of `commands` to its end, one after the other. Raises the error of one that fails, with its message."""
    for done, words in enumerate(every):
        progress(done, len(every), words[0])
        start = time.perf_counter()
        line = [sys.executable, "-m", "benchmarks", *words, "--json"]
        process = subprocess.run(line, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if process.returncode != 0:
            messages = process.stderr.strip().splitlines() or ["no message"]
            kind = RunError if process.returncode == RunError.exit_code else TrainingFailed
            raise kind(f"{' '.join(words)}: {messages[-1]}")
        yield Result(words, json.loads(process.stdout), time.perf_counter() - start)


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
        "| question | figure | value | interquartile range |",
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
    other: str | None = None
    """Another text of `time-to-loss`, on which the preset's settings were not chosen."""
    run: str | None = None
    """The trained RUN of `decode`, on whose held-out text int8 weights are measured."""
    quick: bool = False
    """Take the smallest of everything, to try the way; the figures mean nothing."""
    out: str = "benchmarks/RESULTS.md"
    """The page; one that is there is replaced."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, write."""
    command = parse(Results, "results", argv, program="python -m benchmarks")
    screen, out = Screen(command.json), atomic.replaceable(Path(command.out))
    every = commands(command.data, command.run, command.other, command.quick)
    results: list[Result] = []
    with screen.bar("results", len(every)) as bar:
        for result in measure(every, progress=lambda done, total, what: bar.at(done, what, total=total)):
            results.append(result)
            bar.say(f"{' '.join(result.words)}: {result.seconds:.0f} s")
            atomic.write_text(out, page(results))  # so that what was measured stays, whatever comes next
    for result in results:
        screen.say(f"{' '.join(result.words)} ({result.seconds:.0f} s)")
        screen.table(("figure", "value", "interquartile range"), result.rows())
    screen.say(f"written to {out}")
    rows = [{"words": result.words, "seconds_taken": result.seconds, **result.found} for result in results]
    screen.result({"out": str(out), "results": rows})
