"""The residual connection: how one branch joins the residual stream.

    x'  =  ln_add( skip * x  +  dropout( gain * ln_out( f( damp * ln_in(x) ) ) ) )

`Join` is this equation, for any row of the residual table; `Sublayer` wraps any branch in one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mainstem import residuals
from mainstem.config import ModelConfig
from mainstem.errors import ConfigError
from mainstem.model.norms import Empty, Norm, NormKind
from mainstem.model.tap import Tap, touch
from mainstem.residuals import Slots


class Constant(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """The product value * x; 0 is exact, also where x is not finite."""
        return self.value * x if self.value else torch.zeros_like(x)

    def extra_repr(self) -> str:
        """The constant, for the module's repr."""
        return f"{self.value:g}"


class Gain(nn.Module):
    """Multiplies by a learned scalar (ReZero) or a learned vector over d_model (LayerScale)."""

    def __init__(self, shape: tuple[int, ...], value: float):
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.full(shape, value))

    def reset_parameters(self) -> None:
        """Set the weight to its initial value."""
        nn.init.constant_(self.weight, self.value)

    def forward(self, x: Tensor) -> Tensor:
        """The product weight * x."""
        return self.weight * x


def make_gain(slots: Slots, d_model: int) -> nn.Module:
    """The module of the gain slot; the two joins of a block share a scalar gain."""
    shapes: dict[str, tuple[int, ...]] = {"scalar": (), "vector": (d_model,)}
    return Gain(shapes[slots.gain], slots.gain_init) if slots.gain in shapes else nn.Identity()


def _constant(value: float) -> nn.Module:
    return nn.Identity() if value == 1 else Constant(value)


class Join(nn.Module):
    """One join of a branch to the stream; unused slots are identities."""

    def __init__(
        self,
        slots: Slots,
        d_model: int,
        kind: NormKind,
        dropout: float,
        name: str,
        write_point: str,
        gain: nn.Module,
    ):
        super().__init__()

        def norm(slot: str) -> Norm | Empty:
            return kind.make(d_model, f"{name}.{slot}") if getattr(slots, slot) else Empty()

        self.ln_in, self.ln_out, self.ln_add = norm("ln_in"), norm("ln_out"), norm("ln_add")
        self.skip, self.damp, self.gain = _constant(slots.skip), _constant(slots.damp), gain
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.name, self.write_point = name, write_point

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor], tap: Tap | None = None) -> Tensor:
        """The stream x, (..., C), after the write of branch f is added.

        The tensor at the write point is the one that is added. Raises ConfigError if f returns another shape than x's.
        """
        write = f(self.damp(self.ln_in(x, tap)))
        if write.shape != x.shape:
            raise ConfigError(
                f"a branch must return the stream's shape {tuple(x.shape)}, and this one returned {tuple(write.shape)}"
            )
        write = self.dropout(self.gain(self.ln_out(write, tap)))
        return self.ln_add(self.skip(x) + touch(tap, self.write_point, write), tap)

    def points(self, inside: list[str]) -> list[str]:
        """The points of this join in the order of the forward pass, with the points inside the branch."""
        before, after, over = (norm.points() for norm in (self.ln_in, self.ln_out, self.ln_add))
        return [*before, *inside, *after, self.write_point, *over]


class Sublayer(nn.Module):
    """Any branch in any row of the residual table, usable alone: `Sublayer(nn.Linear(64, 64), 64, residual="post")`.

    Args:
        branch: a module from (..., d_model) to (..., d_model).
        d_model: the width of the stream.
        residual: the row's name, as in `mainstem.residuals.RESIDUALS`.
        dropout: the dropout probability of the branch's output.
        norm, norm_eps, bias: the kind of norm, as in ModelConfig.
        index, depth: the block and the number of blocks, for rows whose constants depend on them (deepnorm, layerscale,
            lns, mix).

    Sources: Vaswani et al. 2017, section 3.1 (post); Radford et al. 2019, section 2.3 (pre); the table has the rest.
    """

    def __init__(
        self,
        branch: nn.Module,
        d_model: int,
        *,
        residual: str = "pre",
        dropout: float = 0.0,
        norm: str = "layernorm",
        norm_eps: float = 1e-5,
        bias: bool = True,
        index: int = 0,
        depth: int = 1,
    ):
        super().__init__()
        ModelConfig(n_head=1, d_model=d_model, dropout=dropout, norm=norm, norm_eps=norm_eps)  # raises ConfigError
        if not 0 <= index < depth:
            raise ConfigError(f"index: {index} is not a block of a stack of depth {depth}; choose 0 to {depth - 1}")
        slots = residuals.row(residual).slots(index, depth)
        self.branch = branch
        kind = NormKind(norm, norm_eps, bias)
        self.join = Join(slots, d_model, kind, dropout, "join", "write", make_gain(slots, d_model))

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """The stream after the branch, (..., C) -> (..., C). Points: `write`, and `join.ln_in.mean` and so on."""
        return self.join(x, self.branch, tap)
