"""Options and output that every export format shares."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from mainstem import atomic
from mainstem.cli.parts.arguments import Positional
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mainstem.formats.card import Facts
    from mainstem.formats.run import ModelFolder
    from mainstem.model.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Export:
    """Options of every export: the model, and where it is written."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a checkpoint inside one, a folder in Hugging Face's layout, or a bundled model (bard)."""
    out: str
    """The folder to write; it must not exist yet."""
    json: bool = False
    """One object on stdout."""


@contextlib.contextmanager
def writing(out: Path) -> Iterator[Callable[[], None]]:
    """Write `out` while signals are caught: the function that it yields raises Interrupted once one has arrived."""
    atomic.remove_leftovers(out.parent)
    with stoppable() as check:
        yield check
        check()


def open_run(run: str, screen: Screen) -> tuple["ModelFolder", "GPT", Tokenizer | None]:
    """The folder that the RUN means, its model, and its tokenizer."""
    from mainstem.formats.load import load
    from mainstem.formats.run import resolve

    folder = resolve(run, screen.note)
    return folder, *load(folder, screen.note)


def facts_of(run: "ModelFolder", model: "GPT", tokenizer: Tokenizer | None, trimmed: bool) -> "Facts":
    """The facts of the model card; with `trimmed`, of a vocabulary that is cut to the tokenizer's."""
    from mainstem.formats.card import gather

    config = model.config
    if trimmed and tokenizer is not None:
        config = config.replace(vocab_size=tokenizer.vocab_size)
    return gather(run, config, tokenizer)


def finish(command: Export, screen: Screen, notes: Sequence[str], nexts: Iterable[str], **facts: Any) -> None:
    """Report the files written, what the format could not hold, and the next command."""
    out = Path(command.out)
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    sizes = {file.name: file.stat().st_size for file in files}
    for note in notes:
        screen.note(note)
    screen.say(f"{out}: {sum(sizes.values()):,} bytes")
    if out.is_dir():
        screen.table(("file", "bytes"), sizes.items())
    for number, line in enumerate(nexts):
        screen.say(f"{'next' if number == 0 else '':<10}{line}")
    result = {"run": command.run, "out": command.out, "bytes": sum(sizes.values()), "files": sizes, "notes": notes}
    screen.result({**result, **facts})
