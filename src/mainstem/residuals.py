"""Every kind of residual connection, as rows of one table.

One equation serves all of them. With x the stream and f the branch (attention or MLP):

    x'  =  ln_add( skip * x  +  dropout( gain * ln_out( f( damp * ln_in(x) ) ) ) )

A row says which of the three norms exist, what the constants are at a block of a given index in a stack of a given
depth, whether a final norm `ln_f` follows the last block, and how the row's source initialises its matrices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from mainstem.errors import ConfigError, nearest


@dataclass(frozen=True)
class Slots:
    """The slots of the equation at one block: three optional norms, and three constants."""

    ln_in: bool = False
    """Whether there is a norm on the branch's input."""
    ln_out: bool = False
    """Whether there is a norm on the branch's output, before the addition."""
    ln_add: bool = False
    """Whether there is a norm over the sum, in the stream itself."""
    skip: float = 1.0
    """Factor on the stream before the addition."""
    damp: float = 1.0
    """Factor on the branch's input."""
    gain: str = "one"
    """`one`; `scalar`, learned and shared by a block's two joins; or `vector`, learned, (d_model,) for each join."""
    gain_init: float = 1.0


@dataclass(frozen=True)
class Residual:
    """One row of the table: the slots of every block, the final norm, and the initialisation."""

    name: str
    source: str
    slots: Callable[[int, int], Slots]
    """(block index from 0, number of blocks) -> the slots of that block."""
    ln_f: bool = True
    """Whether there is a final norm after the last block."""
    init: str = "gpt2"
    """The initialisation of the source, used for `init="auto"`."""
    out_scale: Callable[[int], float] = lambda depth: 1 / math.sqrt(2 * depth)
    """Number of blocks -> GPT-2's factor on the std of the output projections; used by `gpt2` initialisation only."""
    branch_gain: Callable[[int], float] = lambda depth: 1.0
    """Number of blocks -> factor on the std of v, the output projections and both MLP matrices (DeepNorm's beta)."""


def _layerscale_init(depth: int) -> float:
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


_PRE = Slots(ln_in=True)
_POST = Slots(ln_add=True)

RESIDUALS: dict[str, Residual] = {
    row.name: row
    for row in (
        Residual("pre", "GPT-2; ANDREA; Mini GPT", lambda i, L: _PRE),
        Residual("post", "Vaswani et al. 2017, section 3.1", lambda i, L: _POST, ln_f=False, init="xavier"),
        Residual("sandwich", "CogView; Gemma 2; Peri-LN, 2502.02732", lambda i, L: Slots(ln_in=True, ln_out=True)),
        Residual("reordered", "OLMo 2, 2501.00656", lambda i, L: Slots(ln_out=True)),
        Residual("none", "control: no norms", lambda i, L: Slots(), ln_f=False),
        Residual(
            "deepnorm",
            "DeepNet, 2203.00555, decoder-only",
            lambda i, L: Slots(ln_add=True, skip=(2 * L) ** 0.25),
            ln_f=False,
            init="xavier",
            out_scale=lambda L: 1.0,
            branch_gain=lambda L: (8 * L) ** -0.25,
        ),
        Residual("rezero", "ReZero, 2003.04887", lambda i, L: Slots(gain="scalar", gain_init=0.0), ln_f=False),
        Residual(
            "layerscale",
            "LayerScale, 2103.17239",
            lambda i, L: Slots(ln_in=True, gain="vector", gain_init=_layerscale_init(L)),
        ),
        Residual(
            "lns",
            "LayerNorm Scaling, 2502.05795",
            lambda i, L: Slots(ln_in=True, damp=1 / math.sqrt(i + 1)),
            out_scale=lambda L: 1.0,
        ),
        Residual("mix", "Mix-LN, 2412.13795", lambda i, L: _POST if i < math.ceil(L / 4) else _PRE),
        Residual("no_skip", "control: norms without skips", lambda i, L: Slots(ln_in=True, skip=0.0)),
        Residual("no_skip_bare", "control: neither norms nor skips", lambda i, L: Slots(skip=0.0), ln_f=False),
    )
}


def row(name: str) -> Residual:
    """The row of that name. Raises ConfigError with the nearest valid name."""
    if name not in RESIDUALS:
        raise ConfigError(f"residual: unknown value {name!r}; {nearest(name, RESIDUALS)}")
    return RESIDUALS[name]
