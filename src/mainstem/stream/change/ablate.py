"""Ablation: the change of a metric when one unit at a time is replaced by zero, its mean, or another pass's value."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError, nearest
from mainstem.model import names
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.norms import Empty
from mainstem.results import SHOWN, Item, Rows, strongest, summary
from mainstem.stream.change.intervene import Change, Intervention, Referred, locate, mean, resample, zero
from mainstem.stream.change.rerun import Rerun, choose_blocks, recorded
from mainstem.stream.ids import Ids, padded
from mainstem.stream.metrics import Metric, with_ids
from mainstem.stream.record import Record

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

UNITS = ("branch", "head", "neuron")
WAYS = ("zero", "mean", "resample")

ANOTHER_CUT = (
    "this model normalises or scales the stream at a join, so a zero ablation of a write does not remove the whole join"
)
"""The note of a result whose zero ablations differ from removing the branch together with its join."""


@dataclass(frozen=True, eq=False, repr=False)
class Effects:
    """The effect of ablating each unit on a metric, of B rows."""

    labels: list[str]
    """The units, `0_attn_out`, `L0H3` or `L0N17`, in the order of the forward pass."""
    values: Tensor
    """The metric with the unit ablated less the baseline, (units, B)."""
    baseline: Tensor
    """The metric of the unchanged model, (B,)."""
    how: str
    note: str = ""
    """A note on how to read the numbers, or ""."""

    @property
    def mean(self) -> Tensor:
        """The mean effect over the rows, (units,)."""
        return self.values.mean(-1)

    def __getitem__(self, label: str) -> Tensor:
        """The effects of one unit, (B,). Raises ConfigError with the nearest label."""
        if label not in self.labels:
            raise ConfigError(f"label: no unit {label!r}; {nearest(label, self.labels)}")
        return self.values[self.labels.index(label)]

    def __repr__(self) -> str:
        base = (
            f"the whole model's metric is {self.baseline.mean().item():.4g} (rows of the batch: {len(self.baseline)})"
        )
        title = f"Effects: {self.how} ablation of {len(self.labels)} units, one at a time; {base}"
        return summary(title, self.top(SHOWN), len(self.labels))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values, one a unit: `label`, and `value`, the mean effect over the rows."""
        return Rows(map(Item, self.labels, self.mean.tolist())).to_dicts()

    def top(self, n: int = 10) -> Rows[Item]:
        """The n units with the largest mean effects, by magnitude."""
        return strongest(self.labels, self.mean.tolist(), n)


def ablation(
    model: GPT,
    ids: Ids,
    metric: Metric,
    by: str = "head",
    how: str = "mean",
    reference: Record | Ids | None = None,
    *,
    mask: Tensor | None = None,
    tokenizer: "Tokenizer | None" = None,
    layers: Sequence[int] | None = None,
    should_stop: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Effects:
    """The metric with one unit at a time ablated at all positions, less the metric of the unchanged model.

        effects = ms.ablation(model, "O Romeo", ms.TokenLogProb(" thou"), by="head", tokenizer=tokenizer)
        effects.top(5)  # the heads with the largest effects on this log-probability

    Blocks before an ablated one are not run again, and units are run in batches.

    Args:
        model: any GPT.
        ids: (B, T); or rows of ids, or texts, of any lengths.
        metric: logits (B, T, V) -> (B,); see `metrics`.
        by: `branch`: each write to the stream; `head`: each head's `z`; `neuron`: each of the MLPs' `post`.
        how: `zero`; `mean`, over the reference's rows and positions; `resample`, the reference's value there.
        reference: a record, ids or texts. For `mean` the default is `ids`; for `resample` it must have their length,
            and as many rows or one.
        mask: (B, T) bool, false at padding; also of a reference of ids of that shape.
        tokenizer: for texts, of the inputs and of the metric's tokens.
        layers: the blocks whose units are ablated; default all; required for `neuron`.
        should_stop: called between passes; it may raise.
        progress: called with the number of units done and of all units.

    Raises ConfigError for unknown units and ways, blocks out of range, `resample` without a reference, and a metric
    that does not return a number for each row.
    """
    for name, value, valid in (("by", by, UNITS), ("how", how, WAYS)):
        if value not in valid:
            raise ConfigError(f"{name}: unknown value {value!r}; {nearest(value, valid)}")
    if how == "resample" and reference is None:
        raise ConfigError("reference: resample needs another pass; give its ids, or a record of it")
    if by == "neuron" and layers is None:
        raise ConfigError("layers: the neurons of all blocks are too many to ablate; give blocks, [3]")
    chosen = choose_blocks(layers, model)
    targets = [(layer, label) for layer in chosen for label in _labels(model, by, layer)]
    if not targets:
        raise ConfigError(f"by: the blocks {chosen} have no {by} to ablate")
    points = {locate(label, model).point for _, label in targets}
    with torch.no_grad(), evaluating(model):
        rows, padding = padded(model, ids, mask, tokenizer)
        base = Rerun(model, rows, with_ids(metric, tokenizer), padding, points)
        other = base.record if reference is None else reference
        if not isinstance(other, Record):
            alike = isinstance(other, Tensor) and mask is not None and other.shape == mask.shape
            rows, padding = padded(model, other, mask if alike else None, tokenizer)
            other = recorded(model, rows, points, padding)
        changed: dict[str, Change | Referred] = {"zero": zero(), "mean": mean(other), "resample": resample(other)}
        changes = [(layer, Intervention(model, {label: changed[how]})) for layer, label in targets]
        ablated = base.under(changes, should_stop=should_stop, progress=progress)
    joins = [site.join for site in model.joins() if site.block in chosen]
    another = how == "zero" and by == "branch" and not all(map(_drops, joins))
    labels, note = [label for _, label in targets], ANOTHER_CUT if another else ""
    return Effects(labels, ablated - base.baseline, base.baseline, how, note)


def _labels(model: GPT, by: str, layer: int) -> Iterator[str]:
    config = model.config
    if by == "branch":
        yield from (site.label for site in model.joins() if site.block == layer)
    elif by == "head":
        yield from (names.head(layer, head) for head in range(config.n_head))
    else:
        yield from (names.neuron(layer, neuron) for neuron in range(config.d_mlp))


def _drops(join: nn.Module) -> bool:
    """Whether a write of zeros leaves the stream unchanged."""
    return isinstance(join.ln_add, Empty) and isinstance(join.skip, nn.Identity)
