"""A trace: the record of one forward pass, with the questions that can be asked of it."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model import names
from mainstem.model.block import Site
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.tap import Recorder
from mainstem.results import Rows
from mainstem.stream import attribution, decompose
from mainstem.stream.analysis import lens as lenses
from mainstem.stream.analysis.erasure import Erasure, erasure
from mainstem.stream.analysis.flow import Flow, flow, moved, rollout
from mainstem.stream.analysis.token_trace import STRONGEST, TokenTrace, token_trace
from mainstem.stream.analysis.tuned import TunedLens
from mainstem.stream.analysis.word_trace import WordTrace, by_word
from mainstem.stream.analysis.writes import Level, Write, levels, writes
from mainstem.stream.attribution import Token
from mainstem.stream.decompose import Positions, Terms
from mainstem.stream.passage import factor
from mainstem.stream.points import Key, resolve
from mainstem.stream.record import Record, held
from mainstem.text.units import find_word, words

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer


class Trace(Record):
    """What `capture` returns: `trace["resid_post", 3]`, `trace.decompose(by="head")`, `trace.attribution(token)`.

    Args:
        gradients: of the capture's metric, at its points.
        model, ids, mask, values, tokenizer: those of `Record`.
    """

    def __init__(
        self,
        model: GPT,
        ids: Tensor,
        mask: Tensor | None,
        values: Mapping[str, Tensor],
        tokenizer: "Tokenizer | None" = None,
        gradients: Mapping[str, Tensor] | None = None,
    ):
        super().__init__(model, ids, mask, values, tokenizer)
        self.gradients = dict(gradients or {})

    def decompose(self, by: str = "branch", at: Key = "resid_final", pos: Positions = None) -> Terms:
        """The stream as a sum of writes; see `mainstem.stream.decompose`."""
        return decompose.decompose(self, by, at, pos)

    def accumulate(self, by: str = "branch", pos: Positions = None, norm: str | None = None) -> Terms:
        """The running sums of `decompose`."""
        return decompose.accumulate(self, by, pos, norm)

    def attribution(self, token: Token, foil: Token | None = None, by: str = "head", pos: Positions = -1) -> Terms:
        """A logit, less a foil's, as a sum over heads, MLPs (neurons) and biases."""
        return attribution.attribution(self, token, foil, by, pos)

    def sources(self, token: Token, foil: Token | None = None, pos: int = -1) -> Tensor:
        """What each head adds to the logit by reading each position, (L, B, H, T)."""
        return attribution.sources(self, token, foil, pos)

    def lens(
        self,
        token: Token | None = None,
        norm: str = "own",
        points: str | Iterable[Key] | None = None,
        top: int = 5,
        tuned: TunedLens | None = None,
    ) -> lenses.Lens:
        """What the model would say at every depth; `tuned` reads each depth through its own map."""
        if tuned is not None:
            tuned.check(self.model)
        return lenses.lens(self, token, norm, points, top, tuned)

    def project(self, u: Tensor, by: str = "branch", at: Key = "resid_final", pos: Positions = None) -> Terms:
        """The rows of `decompose` along directions, (C,) or (k, C), none of them spread over the width."""
        return decompose.project(self, u, by, at, pos)

    def writes(self) -> Rows[Write]:
        """How much each branch wrote, against the stream that it read."""
        return writes(self)

    def levels(self) -> Rows[Level]:
        """The stream at each point where a branch reads it, and at `resid_final`: its norm, mean and deviation."""
        return levels(self)

    def erasure(self, by: str = "branch", pos: int | None = None) -> Erasure:
        """What later writes take back of earlier ones."""
        return erasure(self, by, pos)

    def flow(self, layer: int, weighting: str = "pattern") -> Flow:
        """What each head moves from token to token; `values` are (B, H, T query, T key)."""
        return flow(self, layer, weighting)

    def moved(self, layer: int) -> Tensor:
        """The length of what all heads of a block together move from key to query, (B, T query, T key)."""
        return moved(self, layer)

    def rollout(self) -> Tensor:
        """How much of each input position is in each position after 0, 1, ... L blocks, (L + 1, B, T, T)."""
        return rollout(self)

    def token(self, pos: int, layer: int, row: int = 0, top: int = STRONGEST) -> TokenTrace:
        """One token through one block, in numbers."""
        return token_trace(self, pos, layer, row, top)

    def word(self, word: str, layer: int, row: int = 0) -> WordTrace:
        """What one word of a text reads from each word in one block. Raises ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(f"word: {word!r} is a text, and the trace has no tokenizer; capture with tokenizer=")
        row, start = self.row_start(row)
        ids = self.ids[row, start:].tolist()
        return by_word(self, find_word(self.tokenizer, ids, word), layer, words(self.tokenizer, ids), row)

    def gradient(self, key: Key) -> Tensor:
        """The metric's gradient at a point. Raises ConfigError where none was kept; a norm's statistics have none."""
        point = resolve(key, self._model)
        if point.endswith((".mean", ".scale")):
            raise ConfigError(f"point: {point!r}: a norm's statistics have no gradient; ask at what the norm reads")
        gradient = held(self.gradients, point, self._model)
        if gradient is None:
            raise ConfigError(f"point: no gradient was kept at {point!r}; capture it with points= and metric=")
        return gradient

    def gradient_parts(self, layer: int, kind: str = "attn") -> tuple[Tensor, Tensor]:
        """The gradient at what a branch reads, (B, T, C), as (what came by the skip, what came through the branch).

        They sum to the gradient at that point. The part by the skip is skip * the gradient at the write; the other
        is the branch's own vector-Jacobian product with it.
        """
        site = self._site(layer, kind)
        at_write = self.gradient(site.write)
        with torch.no_grad():
            by_skip = factor(site.join.skip).pull(at_write)
        with evaluating(self.model), torch.enable_grad():
            read = self[site.reads].detach().requires_grad_()
            (through,) = torch.autograd.grad(self._written(site, read), read, at_write)
        return by_skip, through

    def _written(self, site: Site, read: Tensor) -> Tensor:
        """What the branch writes when the stream is `read`."""
        name = names.split(site.write)[1]
        tap, branch, view = Recorder([name]), site.branch, self.view
        site.join(read, (lambda x: branch(x, view)) if site.kind == "attn" else branch, tap)
        return tap.values[name]

    def _site(self, layer: int, kind: str) -> Site:
        L = len(self.model.blocks)
        for site in self.model.joins():
            if (site.block, site.kind) == (layer + L if layer < 0 else layer, kind):
                return site
        raise ConfigError(f"there is no {kind!r} in block {layer}; blocks go from 0 to {L - 1}, with attn and mlp")

    def row(self, index: int) -> "Trace":
        """One row of the batch, without its padding, as a trace of its own."""
        row, start = self.row_start(index)

        def cut(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            rows = {point: value[row : row + 1] for point, value in values.items()}
            return {
                point: value[:, :, start:, start:] if point.endswith(".pattern") else value[:, start:]
                for point, value in rows.items()
            }

        ids = self.ids[row : row + 1, start:]
        return Trace(self.model, ids, None, cut(self.values), self.tokenizer, cut(self.gradients))
