"""A block: attention, then an MLP, each joined to the stream."""

from typing import NamedTuple

from torch import Tensor, nn

from mainstem import residuals
from mainstem.config import ModelConfig
from mainstem.model.attention import CAUSAL, KV, Attention, View
from mainstem.model.init import Initialiser
from mainstem.model.mlp import MLP
from mainstem.model.names import point, write
from mainstem.model.norms import Norm, NormKind
from mainstem.model.sublayer import Join, make_gain
from mainstem.model.tap import Tap, touch


class Site(NamedTuple):
    """One join where it stands in a stack, with the branch inside it."""

    block: int
    kind: str
    """`attn` or `mlp`."""
    join: Join
    branch: Attention | MLP
    reads: str
    """The point of the stream that the branch reads."""
    write: str
    """The point of what is added."""
    after: str
    """The point of the stream after the addition."""

    @property
    def label(self) -> str:
        """What its write is called in a result: `0_attn_out`."""
        return write(self.block, self.kind)

    def point(self, name: str) -> str:
        """A point of its block, by the name there: `attn.z`."""
        return point(name, self.block)

    def scale(self, slot: str) -> str | None:
        """The point of the scale of the norm in `ln_in`, `ln_out` or `ln_add`; None where the slot is empty."""
        norm = getattr(self.join, slot)
        return self.point(f"{norm.point}.scale") if isinstance(norm, Norm) else None


class Block(nn.Module):
    """Two joins: resid_pre -> attn_out -> resid_mid -> mlp_out -> resid_post.

    It is built for a place in the stack, and keeps the constants of that place; it does not know where it stands.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        slots = residuals.row(config.residual).slots(index, config.n_layer)
        gain = make_gain(slots, config.d_model)
        self.attn = Attention(config, index)
        width, kind = config.d_model, NormKind.of(config)
        self.res_1 = Join(slots, width, kind, config.attn_out_dropout, "res_1", "attn_out", gain)
        self.mlp: MLP | None = None
        if config.d_mlp:
            self.mlp = MLP(config)
            if slots.gain != "scalar":
                gain = make_gain(slots, config.d_model)
            self.res_2 = Join(slots, width, kind, config.mlp_out_dropout, "res_2", "mlp_out", gain)

    def init_weights(self, init: Initialiser, name: str) -> None:
        """Draw the weights of both branches; `name` is the block's."""
        self.attn.init_weights(init, f"{name}.attn")
        if self.mlp is not None:
            self.mlp.init_weights(init, f"{name}.mlp")

    def joins(self, index: int) -> list[Site]:
        """Its joins in the order of the forward pass, as block `index` of a stack."""
        attn = (index, "attn", self.res_1, self.attn, point("resid_pre", index), point("attn_out", index))
        if self.mlp is None:
            return [Site(*attn, point("resid_post", index))]
        mlp = (index, "mlp", self.res_2, self.mlp, point("resid_mid", index), point("mlp_out", index))
        return [Site(*attn, point("resid_mid", index)), Site(*mlp, point("resid_post", index))]

    def points(self) -> list[str]:
        """Its points, without the block's prefix, in the order of the forward pass."""
        attention = self.res_1.points([f"attn.{point}" for point in ("q", "k", "v", "pattern", "z")])
        mlp = ["resid_mid", *self.res_2.points(["mlp.pre", "mlp.post"])] if self.mlp is not None else []
        return ["resid_pre", *attention, *mlp, "resid_post"]

    def forward(self, x: Tensor, view: View = CAUSAL, kv: KV | None = None, tap: Tap | None = None) -> Tensor:
        """The stream, (B, T, C), after both branches."""
        x = touch(tap, "resid_pre", x)
        x = self.res_1(x, lambda read: self.attn(read, view, kv, tap), tap)
        if self.mlp is not None:
            mlp, x = self.mlp, touch(tap, "resid_mid", x)
            x = self.res_2(x, lambda read: mlp(read, tap), tap)
        return touch(tap, "resid_post", x)
