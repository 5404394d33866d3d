"""What a person sees: lines on stdout, progress on stderr; a bar on a terminal, plain lines elsewhere."""

import io
import re
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mainstem.atomic import to_json
from mainstem.cli.parts.flags import spelled

_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?")
UNLIMITED = 100_000  # columns of a table that is not shown on a terminal
PLAIN_EVERY = 10.0  # seconds between progress lines where there is no terminal


class Screen:
    """Where a verb prints. With `json`, stdout carries one object and everything else goes to stderr."""

    def __init__(self, json: bool = False):
        self.json = json
        self.progress = Console(stderr=True, highlight=False)

    def say(self, text: str = "") -> None:
        """A line for a person."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def stream(self, text: str) -> None:
        """Text as it comes, without an end of line."""
        print(text, end="", file=sys.stderr if self.json else sys.stdout, flush=True)

    def note(self, text: str) -> None:
        """Something that a person should know, apart from the output; names in backticks are spelled as flags."""
        print(f"note: {spelled(text)}", file=sys.stderr, flush=True)

    def result(self, value: Any) -> None:
        """The one object of --json; nothing without it."""
        if self.json:
            print(to_json(value, encoding=sys.stdout.encoding or "utf-8"))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Columns in plain text: words to the left, numbers to the right. A terminal's width wraps words alone."""
        cells = [[_cell(value) for value in row] for row in rows]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
        for i, title in enumerate(columns):
            number = bool(cells) and all(_is_number(row[i]) for row in cells)
            table.add_column(Text(title), justify="right" if number else "left", no_wrap=number, overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        stream = sys.stderr if self.json else sys.stdout
        width = Console(file=stream).width if stream.isatty() else UNLIMITED
        text = io.StringIO()
        Console(file=text, width=width, color_system=None).print(Padding(table, (0, 0, 0, 2)))
        for line in text.getvalue().splitlines():
            self.say(line.rstrip())

    def bar(self, what: str, total: int) -> "Bar":
        """Progress towards a total."""
        return Bar(self.progress, what, total)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 or value == 0 else f"{value:.1e}"


def _is_number(text: str) -> bool:
    return text == "-" or _NUMBER.fullmatch(text) is not None


def bar_text(value: float, largest: float, columns: int = 20) -> str:
    """A bar of at most so many columns; below zero it is pale."""
    full, pale = ("█", "░") if (sys.stdout.encoding or "").lower().startswith("utf") else ("#", "-")
    return (full if value >= 0 else pale) * round(columns * abs(value) / largest) if largest else ""


def _left(first: tuple[int, float], done: int, total: int) -> str:
    """The time that is left at the pace since the first report."""
    seconds = (time.monotonic() - first[1]) / (done - first[0]) * (total - done)
    return f"  {int(seconds) // 60}:{int(seconds) % 60:02} left" if done < total else ""


class Bar:
    """`with screen.bar("training", steps) as bar: bar.at(step, "loss 3.21")`."""

    def __init__(self, console: Console, what: str, total: int):
        self._console, self._what, self._total = console, what, total
        self._shown = time.monotonic()
        self._first: tuple[int, float] | None = None  # how far it was, and when: a resumed run does not begin at 0
        self._said = (-1, "")
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn(what),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[note]}"),
                console=console,
                transient=False,
                expand=True,
            )
            self._task = self._progress.add_task(what, total=total, note="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def at(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show how far the work is; the total may turn out another."""
        self._total = self._total if total is None else total
        first, self._first = self._first, self._first or (done, time.monotonic())
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=self._total, note=note)
        elif time.monotonic() - self._shown >= PLAIN_EVERY or (done == self._total and (done, note) != self._said):
            self._shown, self._said = time.monotonic(), (done, note)
            left = "" if first is None or done <= first[0] else _left(first, done, self._total)
            print(f"{self._what} {done:,}/{self._total:,}{left}  {note}".rstrip(), file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)
