"""`mainstem inspect patch RUN "clean" "corrupt"`: which activation carries the difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mainstem.cli.opened import Opening, answer, finish, open_model, piece
from mainstem.cli.parse import Positional, parse
from mainstem.cli.screen import Screen
from mainstem.cli.signals import stoppable
from mainstem.errors import UserError
from mainstem.text import units
from mainstem.text.pairs import EncodedPairs, Pair, encode_pairs, read_pairs
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mainstem.model.gpt import GPT
    from mainstem.stream.patch import Grid

COLUMNS = 8
"""Columns of a grid that stand beside each other on 80 columns of a terminal."""


@dataclass(frozen=True, kw_only=True)
class Patch(Opening):
    """Run the corrupt prompt with one activation of the clean one in its place: how much of the answer comes back."""

    clean: Positional[str] = ""
    """A prompt after which the model gives the answer; or use --pairs."""
    corrupt: Positional[str] = ""
    """One of as many tokens after which it does not."""
    pairs: str | None = None
    """A .jsonl file of many: clean, corrupt, answer and foil on each line."""
    token: str | None = None
    """The answer; without it, the model's first choice after the clean prompt."""
    foil: str | None = None
    """The other answer; without it, the first choice after the corrupt prompt."""
    what: str = "resid_pre"
    """resid_pre resid_mid resid_post attn_out mlp_out, by block and position; head q k v pattern, by block and head."""
    fast: bool = False
    """Attribution patching: to first order, by one backward pass."""
    send: str | None = None
    """Path patching instead: from this head or branch, `L0H1`, `0_mlp_out`, ..."""
    to: tuple[str, ...] = ()
    """... to these readers, `L1H2.k`, or `final`."""
    top: int = 8
    """Cells that are named."""


def main(argv: Sequence[str]) -> None:
    """Parse, patch, print."""
    command = parse(Patch, "inspect patch", argv)
    screen = Screen(command.json)
    if (command.send is None) != (not command.to):
        raise UserError("path patching needs --send and --to")
    if bool(command.pairs) == bool(command.clean):
        raise UserError("give a clean and a corrupt prompt, or --pairs FILE")
    model, tokenizer = open_model(command, screen)
    encoded = _pairs(command, model, tokenizer)
    import torch

    from mainstem.stream.metrics import LogitDifference
    from mainstem.stream.patch import attribution_patch, patch_grid
    from mainstem.stream.path import path_patch

    device = model.wte.weight.device
    clean, corrupt = (torch.tensor(ids, device=device) for ids in (encoded.clean, encoded.corrupt))
    metric = LogitDifference(torch.tensor(encoded.answer, device=device), torch.tensor(encoded.foil, device=device))
    about = [
        f"clean    {encoded_text(tokenizer, encoded.clean[0])}",
        f"corrupt  {encoded_text(tokenizer, encoded.corrupt[0])}",
    ]
    screen.say("\n".join(about))
    if command.send is not None:
        path = path_patch(model, clean, corrupt, command.send, list(command.to), metric)
        _baselines(path.clean.mean().item(), path.corrupt.mean().item(), encoded, tokenizer, screen)
        value = path.values.item()
        screen.say(f"{command.send} -> {', '.join(command.to)}: {value:+.3f} of the difference comes back")
        sent = {"send": command.send, "to": command.to, "effect": value}
        finish(command, screen, sent, lambda: {"effects": path.effects.cpu().numpy()})
        return
    with stoppable() as check, screen.bar("patching", 1) as bar:
        if command.fast:
            grid = attribution_patch(model, clean, corrupt, metric, command.what)
        else:
            grid = patch_grid(
                model,
                clean,
                corrupt,
                metric,
                command.what,
                should_stop=check,
                progress=lambda done, total: bar.at(done, total=total),
            )
    _baselines(grid.clean.mean().item(), grid.corrupt.mean().item(), encoded, tokenizer, screen)
    _show(grid, encoded, tokenizer, screen, command.top)
    result = {
        "what": grid.what,
        "fast": command.fast,
        "clean": grid.clean.tolist(),
        "corrupt": grid.corrupt.tolist(),
        "columns": grid.columns,
        "rows": grid.rows(),
    }
    arrays = {"values": grid.values, "effects": grid.effects}
    finish(command, screen, result, lambda: {name: array.cpu().numpy() for name, array in arrays.items()})


def _pairs(command: Patch, model: "GPT", tokenizer: Tokenizer) -> EncodedPairs:
    """The pairs as ids, all of one length, each with an answer and a foil."""
    if command.pairs is not None:
        pairs = read_pairs(Path(command.pairs))
    else:
        pairs = [Pair(command.clean, command.corrupt, command.token or 0, command.foil)]
    encoded = encode_pairs(pairs, tokenizer)
    for index in range(len(pairs)):
        given = command.token if command.pairs is None else encoded.answer[index]
        encoded.answer[index], _ = answer(model, tokenizer, encoded.clean[index], given, None)
        encoded.foil[index], _ = answer(model, tokenizer, encoded.corrupt[index], encoded.foil[index], None)
    lengths = sorted({len(ids) for ids in encoded.clean})
    if len(lengths) > 1:
        raise UserError(f"{command.pairs}: pairs of {lengths} tokens; a grid is by position: give pairs of one length")
    return encoded


def encoded_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """A prompt with its tokens apart, to be compared with another's."""
    return units.clip("|".join(units.shown(text) for text in units.pieces(tokenizer, ids)), 70)


def _baselines(clean: float, corrupt: float, encoded: EncodedPairs, tokenizer: Tokenizer, screen: Screen) -> None:
    answer, foil = (piece(tokenizer, ids[0]) for ids in (encoded.answer, [encoded.foil[0] or 0]))
    of = f"{answer!r} over {foil!r}" if len(encoded.answer) == 1 else f"answer over foil, mean of {len(encoded.answer)}"
    screen.say(f"{of}: {clean:+.3f} clean, {corrupt:+.3f} corrupt; 1 restores all of the difference, 0 none")


def _show(grid: "Grid", encoded: EncodedPairs, tokenizer: Tokenizer, screen: Screen, top: int) -> None:
    """The grid, a row a block, as many columns beside each other as fit; then its strongest cells."""
    from mainstem.stream.patch import STREAM

    values = grid.values.tolist()
    heads = [str(column) for column in grid.columns]
    if grid.what in STREAM:
        texts = units.pieces(tokenizer, encoded.clean[0])
        heads = [f"{column} {units.clip(units.shown(texts[column]), 6)}" for column in grid.columns]
    for first in range(0, len(heads), COLUMNS):
        here = slice(first, first + COLUMNS)
        by_layer = zip(grid.layers, values, strict=True)
        rows = [[layer, *(f"{round(v, 2) + 0.0:+.2f}" for v in row[here])] for layer, row in by_layer]
        screen.table(("block", *heads[here]), rows)
    screen.table(("strongest", "restores"), [(label, f"{value:+.3f}") for label, value in grid.strongest(top)])
