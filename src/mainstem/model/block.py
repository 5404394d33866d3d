"""A block: attention, then an MLP, each joined to the residual stream."""

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
    """One join of a model, with its branch, its block and its points."""

    block: int
    kind: str
    """`attn` or `mlp`."""
    join: Join
    branch: Attention | MLP
    reads: str
    """The point of the stream that the branch reads."""
    write: str
    """The point of the branch's write."""
    after: str
    """The point of the stream after the addition."""

    @property
    def label(self) -> str:
        """The label of the write in results: `0_attn_out`."""
        return write(self.block, self.kind)

    def point(self, name: str) -> str:
        """The full name of a point of this block: `attn.z` -> `blocks.0.attn.z`."""
        return point(name, self.block)

    def scale(self, slot: str) -> str | None:
        """The point of the scale of the norm in `ln_in`, `ln_out` or `ln_add`; None where the slot is empty."""
        norm = getattr(self.join, slot)
        return self.point(f"{norm.point}.scale") if isinstance(norm, Norm) else None


class Block(nn.Module):
    """One block with two joins: resid_pre -> attn_out -> resid_mid -> mlp_out -> resid_post.

    The constants depend on `index`, which the block does not store.
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
        """Draw the weights of both branches; `name` is the block's name."""
        self.attn.init_weights(init, f"{name}.attn")
        if self.mlp is not None:
            self.mlp.init_weights(init, f"{name}.mlp")

    def joins(self, index: int) -> list[Site]:
        """The joins in the order of the forward pass, for the block at `index`."""
        attn = (index, "attn", self.res_1, self.attn, point("resid_pre", index), point("attn_out", index))
        if self.mlp is None:
            return [Site(*attn, point("resid_post", index))]
        mlp = (index, "mlp", self.res_2, self.mlp, point("resid_mid", index), point("mlp_out", index))
        return [Site(*attn, point("resid_mid", index)), Site(*mlp, point("resid_post", index))]

    def points(self) -> list[str]:
        """The points of the block without its prefix, in the order of the forward pass."""
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
