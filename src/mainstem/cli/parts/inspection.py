"""What the commands of inspect and circuits share: options, opening a RUN and a prompt, tokens as text, output."""

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from mainstem import atomic
from mainstem.cli.parts.arguments import Positional
from mainstem.cli.parts.screen import Screen
from mainstem.columns import tail, width
from mainstem.errors import DataError, UserError
from mainstem.text import units
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from mainstem.model.gpt import GPT
    from mainstem.stream.trace import Trace

LINE = 80
"""Columns of a terminal."""
WORTH_A_WORD = 100
"""MB from which on a capture is announced."""
LEAST = {"top": 1, "steps": 1, "batch_size": 1, "held_out": 1, "windows": 1, "sequences": 1, "seed": 0}
MOST = 1_000_000
"""What the numbers of the questions may be, where they have these flags."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options of every command of inspect and circuits: where the result goes."""

    json: bool = False
    """One object on stdout."""
    npz: str | None = None
    """Also write the arrays to this .npz file."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name, None)
            if value is not None and not least <= value <= MOST:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {value} is not possible; give {least} to {MOST:,}")
        if self.npz is not None:  # before anything is computed
            atomic.replaceable(Path(self.npz))


@dataclass(frozen=True, kw_only=True)
class Opening(Output):
    """Options of a command that opens a model."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a checkpoint inside one, a folder in Hugging Face's GPT-2 layout, or a bundled model (bard)."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1, mps."""
    dtype: Literal["float32", "float64"] = "float32"
    """What the model computes in."""


@dataclass(frozen=True, kw_only=True)
class Prompt(Opening):
    """Options of a command that reads a prompt."""

    prompt: Annotated[Positional[str], arg(metavar="PROMPT")]
    """The text that the model reads."""


@dataclass(frozen=True, kw_only=True)
class Captured(Prompt):
    """Options of a command that captures the forward pass of a prompt."""

    budget: float = 4.0
    """The most memory that the capture may take, in GB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.budget < 1e6:
            raise UserError(f"--budget {self.budget} is not possible; give gigabytes, above 0")


def alone(command: Any, flag: str, *others: str) -> None:
    """Raise UserError where a field that the flag makes meaningless differs from its default."""
    for field in fields(command):
        if field.name in others and getattr(command, field.name) != field.default:
            raise UserError(f"{flag} and --{field.name.replace('_', '-')} do not go together; leave one of them out")


def open_model(command: Opening, screen: Screen) -> tuple["GPT", Tokenizer]:
    """The model on its device, and its tokenizer. Raises DataError for a run without one."""
    import torch

    from mainstem.formats.load import load
    from mainstem.training.device import Device

    model, tokenizer = load(command.run, screen.note)
    if tokenizer is None:
        raise DataError(f"{command.run}: no tokenizer.json, so it cannot read a prompt; copy one into the folder")
    device = Device.choose(command.device).device
    if command.device == "auto" and command.dtype == "float64" and device.type == "mps":  # which has no float64
        device = torch.device("cpu")
    model.to(device, getattr(torch, command.dtype))
    return model, tokenizer


def read_prompt(text: str, model: "GPT", tokenizer: Tokenizer, screen: Screen) -> list[int]:
    """The ids of a prompt; of one that is longer than the context, the last of them."""
    ids, n_ctx = tokenizer.encode(text), model.config.n_ctx
    if not ids:
        raise DataError("the prompt is empty; give at least one token")
    if len(ids) > n_ctx:
        screen.note(f"{len(ids)} tokens do not fit the context of {n_ctx}; only the last {n_ctx} are read")
    return ids[-n_ctx:]


def open_trace(command: Captured, screen: Screen, points: Sequence[str] = ()) -> "Trace":
    """The trace of the prompt: what a capture keeps by default, and these points."""
    from mainstem.stream.capture import capture, default_points, estimate
    from mainstem.stream.points import select

    model, tokenizer = open_model(command, screen)
    ids = read_prompt(command.prompt, model, tokenizer, screen)
    kept = [*default_points(model), *select(points, model)]
    needed = estimate(model, kept, 1, len(ids)) / 1e6
    if needed > WORTH_A_WORD:
        screen.note(f"the capture takes {needed:,.0f} MB")
    return capture(model, [ids], kept, tokenizer=tokenizer, budget=int(command.budget * 1e9))


def held_out(
    run: str,
    data: str | None,
    model: "GPT",
    tokenizer: Tokenizer,
    count: int,
    check: Callable[[], None] = lambda: None,
) -> Iterator["Tensor"]:
    """At most `count` windows, ids (1, T) on the model's device, of the text that a run's training did not see.

    `data` is a prepared folder, None the run's own; `check` is called before each window and may raise. Raises
    UserError for a count below 1, DataError for a folder that cannot be read or is another tokenizer's.
    """
    import torch

    from mainstem.formats.run import prepared
    from mainstem.text import tokens

    if count < 1:
        raise UserError(f"{count} windows of held-out text are not possible; read at least 1")
    val = prepared(run, data, tokenizer).val
    length = min(model.config.n_ctx, len(val) - 1)
    windows = tokens.evaluation_windows(val, length, 1, vocab_size=model.config.vocab_size)
    for ids, _ in itertools.islice(windows, count):
        check()
        yield torch.from_numpy(ids).to(model.wte.weight.device)


def typed_token(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token as it was typed: its text, in which `\\n` and `\\t` stand for themselves, or `id:198`."""
    number = re.fullmatch(r"id:(\d+)", text)
    if number is not None:
        return units.single_token(tokenizer, int(number[1]))
    return units.single_token(tokenizer, text.replace("\\n", "\n").replace("\\t", "\t"))


def first_choice(model: "GPT", ids: Sequence[int]) -> int:
    """The most probable next token."""
    import torch

    with torch.no_grad():
        return int(model(torch.tensor([ids], device=model.wte.weight.device))[0, -1].argmax())


def piece(tokenizer: Tokenizer, i: int) -> str:
    """One token as text for a terminal."""
    return units.shown(units.pieces(tokenizer, [i])[0])


def in_json(tokenizer: Tokenizer, ids: Iterable[int]) -> list[dict[str, Any]]:
    """Tokens for a program: `id`, and `text` with nothing escaped."""
    ids = list(ids)
    return [{"id": i, "text": text} for i, text in zip(ids, units.pieces(tokenizer, ids), strict=True)]


def ending(start: str, text: str) -> str:
    """A title line: the start, and as much of the end of the text as fits beside it."""
    return f"{start} '{tail(units.shown(text), max(20, LINE - width(start) - 3))}'"


def finish(command: Output, screen: Screen, result: Mapping[str, Any], arrays: Callable[[], Mapping[str, Any]]) -> None:
    """Print the object of --json and write the file of --npz (atomically); arrays may be tensors on any device."""
    if command.npz is not None:
        import numpy as np
        import torch

        plain: dict[str, Any] = {
            name: array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else array
            for name, array in arrays().items()
        }
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **plain)
        path = Path(command.npz)
        atomic.write_bytes(path, buffer.getvalue())
        screen.note(f"wrote {path}")
    screen.result(result)
