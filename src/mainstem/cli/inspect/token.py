"""`mainstem inspect token RUN "prompt"`: one token through one block, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Captured, alone, ending, finish, in_json, open_trace
from mainstem.cli.parts.screen import Screen
from mainstem.columns import clip
from mainstem.model.names import neuron
from mainstem.text import units

if TYPE_CHECKING:
    from mainstem.stream.analysis.token_trace import Joined, TokenTrace, Vector
    from mainstem.stream.analysis.word_trace import WordTrace


@dataclass(frozen=True, kw_only=True)
class Token(Captured):
    """One token through one block, step by step: norm, attention, addition, norm, MLP, addition."""

    token: str | None = None
    """A word of the prompt: its last token is traced, and attention is shown by word."""
    pos: int = -1
    """The position, instead of --token; -1 is the last."""
    layer: int = 0
    """The block."""
    top: int = 5
    """How many neurons, and words that a head reads, to show."""


def main(argv: Sequence[str]) -> None:
    """Parse, trace, print."""
    command = parse(Token, "inspect token", argv)
    screen = Screen(command.json)
    if command.token is not None:
        alone(command, "--token", "pos")
    trace = open_trace(command, screen)
    tokenizer, ids = trace.tokenizer, trace.ids[0].tolist()
    assert tokenizer is not None
    from mainstem.results import plain
    from mainstem.stream.analysis.token_trace import token_trace
    from mainstem.stream.analysis.word_trace import by_word
    from mainstem.stream.decompose import positions

    words = units.words(tokenizer, ids)
    if command.token is None:
        pos = positions(trace, command.pos).start
        word = next(unit for unit in words if unit.first <= pos < unit.last)
    else:
        word = units.find_word(tokenizer, ids, command.token)
        pos = word.last - 1
    one = token_trace(trace, pos, command.layer, top=command.top)
    read = by_word(trace, word, command.layer, words)
    token_text = units.shown(units.pieces(tokenizer, ids)[pos])
    screen.say(ending(f"block {one.layer}: '{token_text}', position {pos} of", command.prompt))
    _steps(one, screen)
    _heads(one, read, screen, command.top)
    _neurons(one, screen)
    result = {"token": in_json(tokenizer, ids)[pos], "trace": plain(one), "word": plain(read)}
    finish(command, screen, result, lambda: _arrays(one))


def _steps(one: "TokenTrace", screen: Screen) -> None:
    """The stream, each norm before and after, and each write, step by step, with the check of each addition."""
    rows: list[list[Any]] = []

    def vector(step: str, at: "Vector", check: float | None = None) -> None:
        rows.append([step, at.mean, at.std, at.norm, None if check is None else f"{check:.1e}"])

    def joined(join: "Joined", name: str, point: str, after: "Vector") -> None:
        by_slot = {norm.slot: norm for norm in join.norms}
        for slot in ("ln_in", "ln_out", None, "ln_add"):
            if slot is None:
                rows.append([f"  {join.label}", None, None, join.length, None])
            elif slot in by_slot:
                vector(f"  before {name}.{slot}", by_slot[slot].before)
                vector(f"  after {name}.{slot}", by_slot[slot].after)
        vector(point, after, join.checksum)

    vector("resid_pre", one.resid_pre)
    if one.resid_mid is not None and one.mlp is not None:
        joined(one.attention.join, "res_1", "resid_mid", one.resid_mid)
        joined(one.mlp.join, "res_2", "resid_post", one.resid_post)
    else:
        joined(one.attention.join, "res_1", "resid_post", one.resid_post)
    screen.table(("step", "mean", "std", "norm", "addition off by"), rows)


def _heads(one: "TokenTrace", read: "WordTrace", screen: Screen, top: int) -> None:
    """How much each head wrote, and what the word read through it."""
    word = clip(units.shown(read.word.text), 30)
    screen.say(f"what '{word}' reads, by word, and what each head writes")
    rows = []
    for head, by_word in zip(one.attention.heads, read.heads, strict=True):
        strongest = sorted(by_word.reads, key=lambda read: -read.weight)[:top]
        words = " ".join(f"{units.shown(r.text.strip() or r.text)} {r.weight:.2f}" for r in strongest if r.weight > 0)
        rows.append([head.write.label, head.write.length, head.write.share, head.entropy, clip(words, 40)])
    rows += [[bias.label, bias.length, bias.share, None, ""] for bias in one.attention.biases]
    screen.table(("head", "wrote", "share", "entropy", "reads"), rows)
    screen.say(f"heads and biases sum to the write: closing error {one.attention.closing_error:.1e}")


def _neurons(one: "TokenTrace", screen: Screen) -> None:
    """The gates of the MLP."""
    if one.mlp is None:
        return
    screen.say(
        f"of {one.mlp.neurons:,} neurons {one.mlp.above_zero:,} are above 0 before the activation, "
        f"{one.mlp.near_zero:,} near 0 after it"
    )
    rows = [[neuron(one.layer, n.index), n.pre, n.post, n.length] for n in one.mlp.top]
    screen.table(("neuron", "pre", "post", "wrote"), rows)


def _arrays(one: "TokenTrace") -> dict[str, Any]:
    return {
        "patterns": [head.pattern for head in one.attention.heads],
        "writes": [head.write.length for head in one.attention.heads],
        "shares": [head.write.share for head in one.attention.heads],
    }
