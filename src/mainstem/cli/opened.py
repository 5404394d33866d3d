"""A RUN and a prompt, opened as several verbs need them."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainstem import durable
from mainstem.cli.parse import Positional
from mainstem.cli.screen import Screen
from mainstem.errors import DataError, UserError
from mainstem.text import units
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mainstem.model.gpt import GPT
    from mainstem.stream.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the answer goes."""

    json: bool = False
    """One object on stdout."""
    npz: str | None = None
    """Also write the arrays to this .npz file."""


@dataclass(frozen=True, kw_only=True)
class Opening(Output):
    """A model, and how it is opened."""

    run: Positional[str]
    """A run folder, or a checkpoint inside one."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, mps, auto."""
    dtype: str = "float32"
    """float32, or float64 for the last digits."""


@dataclass(frozen=True, kw_only=True)
class Prompt(Opening):
    """A model and a text."""

    prompt: Positional[str]
    """The text that is read."""
    budget: float = 4.0
    """GB that the capture may take."""


def open_model(command: Opening, screen: Screen) -> tuple["GPT", Tokenizer]:
    """The model on its device, and its tokenizer. Raises DataError for a run without one."""
    import torch

    from mainstem.training.checkpoint import load
    from mainstem.training.device import Device

    if command.dtype not in ("float32", "float64"):
        raise UserError(f"dtype: {command.dtype!r} is not possible; give float32 or float64")
    model, tokenizer = load(command.run, screen.note)
    if tokenizer is None:
        raise DataError(f"{command.run}: no tokenizer.json, so it cannot read a prompt; copy one into the folder")
    model.to(Device.choose(command.device).device, getattr(torch, command.dtype))
    return model, tokenizer


def read_prompt(text: str, model: "GPT", tokenizer: Tokenizer, screen: Screen) -> list[int]:
    """The ids of a prompt; of one that is longer than the context, the last of them."""
    ids, n_ctx = tokenizer.encode(text), model.config.n_ctx
    if not ids:
        raise DataError("the prompt is empty; give at least one token")
    if len(ids) > n_ctx:
        screen.note(f"{len(ids)} tokens do not fit the context of {n_ctx}; only the last {n_ctx} are read")
    return ids[-n_ctx:]


def data_of(run: str) -> Path:
    """The prepared text of a run, wherever it stands."""
    from mainstem.training.folder import RunFolder

    folder = RunFolder(run)
    if folder.data.is_dir() or not folder.exists():
        return folder.data
    return Path(folder.settings()["data"][0])


def open_trace(command: Prompt, screen: Screen, **options: Any) -> "Trace":
    """The trace of the prompt."""
    from mainstem.stream.capture import capture

    model, tokenizer = open_model(command, screen)
    ids = read_prompt(command.prompt, model, tokenizer, screen)
    return capture(model, [ids], tokenizer=tokenizer, budget=int(command.budget * 1e9), **options)


def typed_token(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token as it was typed; `\\n` and `\\t` may stand for themselves."""
    return units.single_token(tokenizer, text.replace("\\n", "\n").replace("\\t", "\t"))


def answer(
    model: "GPT", tokenizer: Tokenizer, ids: list[int], token: str | int | None, foil: str | None
) -> tuple[int, int | None]:
    """The ids of an answer and a foil; without an answer, what the model puts first after the ids."""
    import torch

    if token is None:
        with torch.no_grad():
            token = int(model(torch.tensor([ids], device=model.wte.weight.device))[0, -1].argmax())
    elif isinstance(token, str):
        token = typed_token(tokenizer, token)
    return token, None if foil is None else typed_token(tokenizer, foil)


def piece(tokenizer: Tokenizer, i: int) -> str:
    """One token as it is shown."""
    return units.shown(units.pieces(tokenizer, [i])[0])


def pieces_of(trace: "Trace") -> list[str]:
    """The prompt's tokens as they are shown, each in its place."""
    assert trace.tokenizer is not None
    return [units.shown(text) for text in units.pieces(trace.tokenizer, trace.ids[0].tolist())]


def tail(text: str, columns: int = 40) -> str:
    """The end of a prompt, on one line."""
    flat = text.replace("\n", "\\n")
    return flat if units.width(flat) <= columns else "..." + flat[-columns:]


def finish(command: Output, screen: Screen, result: Mapping[str, Any], arrays: Callable[[], Mapping[str, Any]]) -> None:
    """The one object of --json, and the file of --npz, whole or absent."""
    if command.npz is not None:
        import numpy as np

        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays())
        path = Path(command.npz)
        durable.write_bytes(path, buffer.getvalue())
        screen.note(f"wrote {path}")
    screen.result(result)
