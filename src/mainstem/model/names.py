"""Names of points of a forward pass and labels of results; only this module formats and parses them.

    point("resid_pre", 3)   "blocks.3.resid_pre"     a tensor of a forward pass
    write(3, "attn")        "3_attn_out"             a row of a result: the write of block 3's attention
    head(3, 1, "q")         "L3H1.q"                 a head, or a tensor of it
    neuron(3, 17)           "L3N17"                  a neuron of block 3's MLP
    row(3, "attn.b_O")      "3_attn.b_O"             any other row of block 3

Points of the stream, each (B, T, C):

    embed, pos_embed                      the embeddings (before their dropout)
    blocks.{l}.resid_pre                  the stream as block l reads it
    blocks.{l}.attn_out                   the write of attention (after ln_out, gain and dropout)
    blocks.{l}.resid_mid                  the stream between the two (absent where d_mlp is 0)
    blocks.{l}.mlp_out                    the write of the MLP
    blocks.{l}.resid_post                 the stream after block l
    resid_final                           the input of ln_f

Inside a block:

    blocks.{l}.attn.q .k .v .z            (B, T, H, D); q and k after QK-norm and rotation
    blocks.{l}.attn.pattern               (B, H, T query, T key), the softmax
    blocks.{l}.mlp.pre .mlp.post          (B, T, M), around the activation; gated: pre is the gate's, post the product
    blocks.{l}.res_{1,2}.{ln}.mean .scale (B, T, 1), of ln_in, ln_out or ln_add: the norm is (x - mean) / scale, then
                                          gain and bias; likewise ln_f.mean, ln_f.scale
"""

import re
from typing import NamedTuple

FINAL = "resid_final"
"""The point of the stream that `ln_f` reads, after the last block."""

_POINT = re.compile(r"blocks\.(\d+)\.(.+)")
_UNIT = re.compile(r"L(\d+)([HN])(\d+)(?:\.(\w+))?")
_ROW = re.compile(r"(\d+)_(.+)")


def point(name: str, block: int | str | None = None) -> str:
    """The point of that name in a block; outside the blocks if None. A `*` stands for every block in a pattern."""
    return name if block is None else f"blocks.{block}.{name}"


def split(point: str) -> tuple[int | None, str]:
    """The block of a point, None outside the blocks, and its name in the block: (3, "attn.q"), (None, "embed")."""
    match = _POINT.fullmatch(point)
    return (None, point) if match is None else (int(match[1]), match[2])


def head(block: int, index: int, part: str = "") -> str:
    """The label of a head, `L3H1`, or of a part of it, `L3H1.q`."""
    return f"L{block}H{index}" + (f".{part}" if part else "")


def neuron(block: int, index: int) -> str:
    """The label of a neuron, `L3N17`."""
    return f"L{block}N{index}"


def row(block: int, name: str) -> str:
    """The label of a row of a block that is no head and no neuron: `3_mlp.b_out`."""
    return f"{block}_{name}"


def write(block: int, kind: str) -> str:
    """The label of what a block's attention (`attn`) or MLP (`mlp`) adds to the stream: `3_attn_out`."""
    return row(block, f"{kind}_out")


class Label(NamedTuple):
    """A label, read: `L3H1.q` is (3, "head", 1, "q"), `3_attn_out` (3, "attn_out"), `embed` (None, "embed")."""

    block: int | None
    name: str
    """`head`, `neuron`, or the row's name: `attn_out`, `mlp.b_out`, `embed`."""
    unit: int | None = None
    """The head's or neuron's index in its block."""
    part: str = ""
    """What follows a head or neuron: `q`, `post`."""

    @property
    def kind(self) -> str | None:
        """`attn` or `mlp`, the branch of the block that it belongs to; None outside the blocks."""
        if self.block is None:
            return None
        return {"head": "attn", "neuron": "mlp"}.get(self.name) or re.split(r"[._]", self.name)[0]


def parse_label(text: str) -> Label:
    """Read a label. Text that names no block is the name of a row outside the blocks."""
    if unit := _UNIT.fullmatch(text):
        return Label(int(unit[1]), {"H": "head", "N": "neuron"}[unit[2]], int(unit[3]), unit[4] or "")
    if in_block := _ROW.fullmatch(text):
        return Label(int(in_block[1]), in_block[2])
    return Label(None, text)
