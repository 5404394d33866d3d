"""`mainstem inspect patch RUN "clean" "corrupt"`: which activation carries the difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from mainstem.cli.parts.arguments import Positional, parse
from mainstem.cli.parts.inspection import Opening, alone, finish, first_choice, in_json, open_model, piece, typed_token
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.columns import clip
from mainstem.errors import UserError
from mainstem.stream.pairs import EncodedPairs, encode_pairs, encode_prompts, read_pairs
from mainstem.text import units
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mainstem.model.gpt import GPT
    from mainstem.stream.change.patch import Grid, Patched

COLUMNS = 8
"""Columns of a grid that stand beside each other on 80 columns of a terminal."""
SMALL = 0.05
"""A difference, as a share of the clean value, of which the shares that are restored say little."""


@dataclass(frozen=True, kw_only=True)
class Patch(Opening):
    """Activation patching: run the corrupt prompt with one activation of the clean one; measure what it restores."""

    clean: Annotated[Positional[str], arg(metavar="CLEAN")] = ""
    """A prompt that the model answers; or give --pairs."""
    corrupt: Annotated[Positional[str], arg(metavar="CORRUPT")] = ""
    """A prompt of the same number of tokens that it does not."""
    pairs: str | None = None
    """A .jsonl file of many pairs: clean, corrupt, answer and foil on each line."""
    token: str | None = None
    """The answer; by default the most probable token after the clean prompt."""
    foil: str | None = None
    """The other answer; by default the most probable token after the corrupt prompt."""
    what: Literal["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "head", "q", "k", "v", "pattern"] = (
        "resid_pre"
    )
    """What is patched: the first five by block and position, the others by block and head."""
    layers: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Blocks to patch; by default all."""
    positions: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Positions to patch; by default all."""
    fast: bool = False
    """Attribution patching: a first-order estimate from one backward pass."""
    send: str | None = None
    """Path patching instead: the sender, a head or branch (L0H1, 0_mlp_out, ...)."""
    to: Annotated[tuple[str, ...], arg(metavar="READER ...")] = ()
    """The receivers of path patching (L1H2.k, final, ...)."""
    top: int = 8
    """How many of the strongest cells to list."""


def main(argv: Sequence[str]) -> None:
    """Parse, patch, print."""
    command = parse(Patch, "inspect patch", argv)
    screen = Screen(command.json)
    _check(command)
    model, tokenizer = open_model(command, screen)
    encoded = _pairs(command, model, tokenizer)
    import torch

    from mainstem.stream.change.patch import HEADS, attribution_patch, patch_grid
    from mainstem.stream.change.path import path_patch
    from mainstem.stream.ids import padded
    from mainstem.stream.metrics import LogitDifference

    lengths = sorted({len(ids) for ids in encoded.clean})
    if len(lengths) > 1 and (command.positions or (command.send is None and command.what not in HEADS)):
        raise UserError(
            f"{command.pairs}: pairs of {lengths} tokens have no positions in common; give pairs of one length"
        )
    (clean, mask), (corrupt, _) = padded(model, encoded.clean), padded(model, encoded.corrupt)
    answers, foils = (torch.tensor(ids, device=clean.device) for ids in (encoded.answer, encoded.foil))
    metric = LogitDifference(answers, foils)
    if len(encoded.clean) == 1:
        screen.say(f"clean    {_apart(tokenizer, encoded.clean[0])}")
        screen.say(f"corrupt  {_apart(tokenizer, encoded.corrupt[0])}")
    result: dict[str, Any]
    if command.send is not None:
        path = path_patch(model, clean, corrupt, command.send, list(command.to), metric, mask=mask)
        _baselines(path, encoded, tokenizer, screen)
        value = path.values.item()
        screen.say(f"{command.send} -> {', '.join(command.to)}: {value:+.3f} of the difference comes back")
        result = {"send": command.send, "to": command.to, "value": value}
        finish(command, screen, result | _asked(path, encoded, tokenizer), lambda: {"effects": path.effects})
        return
    cells: dict[str, Any] = {"mask": mask}
    cells |= {"layers": list(command.layers) or None, "positions": list(command.positions) or None}
    with stoppable() as check, screen.bar("patching", 1) as bar:
        if command.fast:
            grid = attribution_patch(model, clean, corrupt, metric, command.what, **cells)
        else:
            cells |= {"should_stop": check, "progress": lambda done, total: bar.at(done, total=total)}
            grid = patch_grid(model, clean, corrupt, metric, command.what, **cells)
    _baselines(grid, encoded, tokenizer, screen)
    _show(grid, encoded, tokenizer, screen, command.top)
    rows = [
        {"layer": layer, "values": [cell["value"] for cell in cells]}
        for layer, cells in groupby(grid.to_dicts(), key=itemgetter("layer"))
    ]
    result = {"what": grid.what, "fast": command.fast, "columns": grid.columns, "rows": rows}
    arrays = {"layers": grid.layers, "columns": grid.columns, "values": grid.values, "effects": grid.effects}
    finish(command, screen, result | _asked(grid, encoded, tokenizer), lambda: arrays)


def _check(command: Patch) -> None:
    """Refuse flags that do not go together, and prompts that are missing."""
    if command.pairs is not None:
        if command.clean:
            raise UserError("--pairs and typed prompts do not go together; leave one of them out")
        alone(command, "--pairs", "token", "foil")
    elif not command.clean or not command.corrupt:
        raise UserError("give a clean and a corrupt prompt, or --pairs FILE")
    if (command.send is None) != (not command.to):
        raise UserError("path patching needs --send and --to")
    if command.send is not None:
        alone(command, "--send", "fast", "what", "layers", "positions")


def _pairs(command: Patch, model: "GPT", tokenizer: Tokenizer) -> EncodedPairs:
    """The pairs as ids, each with an answer and a foil; UserError where the two are one token."""
    if command.pairs is not None:
        encoded = encode_pairs(read_pairs(Path(command.pairs)), tokenizer)
    else:
        clean, corrupt = encode_prompts(command.clean, command.corrupt, tokenizer)
        answer = first_choice(model, clean) if command.token is None else typed_token(tokenizer, command.token)
        foil = None if command.foil is None else typed_token(tokenizer, command.foil)
        encoded = EncodedPairs([clean], [corrupt], [answer], [foil])
    for index, corrupt in enumerate(encoded.corrupt):
        typed = encoded.foil[index]
        encoded.foil[index] = foil = first_choice(model, corrupt) if typed is None else typed
        if encoded.answer[index] == foil:
            where = f"{command.pairs}, pair {index + 1}: " if command.pairs is not None else ""
            both = f"'{piece(tokenizer, foil)}' (id:{foil})"
            fix = "give another" if typed is not None else "give one: this is the first choice after the corrupt prompt"
            raise UserError(f"{where}the answer and the foil are both {both}; the foil must differ: {fix}")
    return encoded


def _apart(tokenizer: Tokenizer, ids: list[int]) -> str:
    """A prompt with its tokens apart, to be compared with another's."""
    return clip("|".join(units.shown(text) for text in units.pieces(tokenizer, ids)), 70)


def _baselines(patched: "Patched", encoded: EncodedPairs, tokenizer: Tokenizer, screen: Screen) -> None:
    """What is restored: the metric of both passes."""
    clean, corrupt = patched.clean.mean().item(), patched.corrupt.mean().item()
    of = f"answer over foil, mean of {len(encoded.answer)} pairs"
    if len(encoded.answer) == 1:
        answer, foil = (piece(tokenizer, i) for i in (encoded.answer[0], encoded.foil[0]) if i is not None)
        of = f"'{answer}' over '{foil}'"
    screen.say(f"{of}: {clean:+.3f} clean, {corrupt:+.3f} corrupt")
    screen.say("1 restores all of the difference, 0 none of it")
    if abs(clean - corrupt) < SMALL * abs(clean):
        screen.note(f"the difference, {clean - corrupt:+.4f}, is small beside {clean:+.3f}; its shares say little")


def _asked(patched: "Patched", encoded: EncodedPairs, tokenizer: Tokenizer) -> dict[str, Any]:
    """The pairs for a program: their tokens, answers and foils, and the metric of both passes."""
    pairs = [
        {
            "clean": in_json(tokenizer, clean),
            "corrupt": in_json(tokenizer, corrupt),
            "answer": in_json(tokenizer, [answer])[0],
            "foil": None if foil is None else in_json(tokenizer, [foil])[0],
        }
        for clean, corrupt, answer, foil in zip(
            encoded.clean, encoded.corrupt, encoded.answer, encoded.foil, strict=True
        )
    ]
    metric = {"clean": patched.clean.tolist(), "corrupt": patched.corrupt.tolist()}
    return {"pairs": pairs, "logit_difference": metric}


def _show(grid: "Grid", encoded: EncodedPairs, tokenizer: Tokenizer, screen: Screen, top: int) -> None:
    """The grid, a row a block, as many columns beside each other as fit; then its strongest cells."""
    from mainstem.stream.change.patch import STREAM

    values = grid.values.tolist()
    heads = [str(column) for column in grid.columns]
    if grid.what in STREAM and len(encoded.clean) == 1:
        texts = units.pieces(tokenizer, encoded.clean[0])
        heads = [f"{column} {clip(units.shown(texts[column]), 6)}" for column in grid.columns]
    for first in range(0, len(heads), COLUMNS):
        columns = slice(first, first + COLUMNS)
        by_layer = zip(grid.layers, values, strict=True)
        rows = [[layer, *(f"{round(v, 2) + 0.0:+.2f}" for v in row[columns])] for layer, row in by_layer]
        screen.table(("block", *heads[columns]), rows)
    screen.table(("strongest", "restores"), [(label, f"{value:+.3f}") for label, value in grid.top(top)])
