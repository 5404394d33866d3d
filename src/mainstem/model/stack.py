"""The stack as the list of its joins: where each branch stands, what it reads and where it writes."""

from collections.abc import Iterator
from typing import NamedTuple

from mainstem.model.attention import Attention
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.model.mlp import MLP
from mainstem.model.sublayer import Join


class Place(NamedTuple):
    """One join in the stack, with what stands in it."""

    layer: int
    kind: str
    """`attn` or `mlp`."""
    join: Join
    branch: Attention | MLP

    @property
    def name(self) -> str:
        """Of the join's module: `blocks.0.res_1`."""
        return f"blocks.{self.layer}.{'res_1' if self.kind == 'attn' else 'res_2'}"

    @property
    def reads(self) -> str:
        """The point of the stream that the branch reads."""
        return f"blocks.{self.layer}.{'resid_pre' if self.kind == 'attn' else 'resid_mid'}"

    @property
    def write(self) -> str:
        """The point of what is added."""
        return f"blocks.{self.layer}.{self.kind}_out"

    @property
    def label(self) -> str:
        """What its write is called in a result: `0_attn_out`."""
        return f"{self.layer}_{self.kind}_out"


def places(model: GPT) -> Iterator[Place]:
    """Every join of a model, in the order of the forward pass; a block without an MLP has one, any other two."""
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        yield Place(layer, "attn", block.res_1, block.attn)
        if block.mlp is not None:
            yield Place(layer, "mlp", block.res_2, block.mlp)
