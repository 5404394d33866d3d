"""The stream as a sum: every write, carried through each later skip and norm, by branch, by head or by neuron.

Two ways to the same terms. Forwards, `decompose` carries each write to a point, (B, T, C). Backwards, `project` pulls a
direction back from that point, and weighs each write along it where it was made: no head's or neuron's write is spread
over the width of the stream, so all the neurons of a block cost one product with their matrix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mainstem.errors import ConfigError, nearest
from mainstem.model import names
from mainstem.model.attention import Attention
from mainstem.model.names import FINAL
from mainstem.model.stack import level
from mainstem.results import SHOWN, Item, Rows, plain, strongest, summary
from mainstem.stream.passage import Passage, entering, final_norm, passages, reading
from mainstem.stream.points import BUDGET, Key, position, resolve
from mainstem.stream.record import Record

UNITS = ("branch", "head", "neuron")
NORMALISATIONS = ("frozen", "own")
Positions = int | slice | None
Row = tuple[str, Tensor]


@dataclass(frozen=True, repr=False)
class Terms:
    """Rows that sum to something.

    `values` is (rows, ...); `labels` names the rows, in the order of the forward pass; `total`, (...), is what they
    should sum to, as the model had it.
    """

    labels: list[str]
    values: Tensor
    total: Tensor
    closing_error: float
    """max |sum - total| / max |total|."""

    @classmethod
    def of(cls, rows: Sequence[Row], total: Tensor) -> "Terms":
        """Stack the rows and measure how they close."""
        values = torch.stack([value for _, value in rows])
        return cls([label for label, _ in rows], values, total, closing_error(values.sum(0), total))

    def at(self, pos: "Positions", axis: int) -> "Terms":
        """Without the total's axis of positions, if one position was asked for."""
        if not isinstance(pos, int):
            return self
        axis %= self.total.ndim
        return Terms(self.labels, self.values.squeeze(axis + 1), self.total.squeeze(axis), self.closing_error)

    def __getitem__(self, label: str) -> Tensor:
        """One row. Raises ConfigError with the nearest label."""
        if label not in self.labels:
            raise ConfigError(f"label: no row {label!r}; {nearest(label, self.labels)}")
        return self.values[self.labels.index(label)]

    def __repr__(self) -> str:
        shape = tuple(self.total.shape)
        whole = f"{self.total.item():.4g}" if self.total.numel() == 1 else f"{shape}; rows by their norms"
        title = f"Terms: {len(self.labels)} rows that sum to {whole}; closing error {self.closing_error:.1e}"
        return summary(title, self.top(SHOWN), len(self.labels))

    def to_dicts(self) -> list[dict[str, Any]]:
        """`label` and `value` of each row: a number where a row is one, else lists."""
        values = self.values.reshape(-1) if self.total.numel() == 1 else self.values
        return [{"label": label, "value": plain(value)} for label, value in zip(self.labels, values, strict=True)]

    def top(self, n: int = 10) -> Rows[Item]:
        """The n rows of largest magnitude: the number itself where a row is one, else the norm of its numbers."""
        rows = self.values.flatten(1)
        sizes = rows[:, 0] if rows.shape[1] == 1 else rows.norm(dim=1)
        return strongest(self.labels, sizes.tolist(), n)


def closing_error(value: Tensor, expected: Tensor) -> float:
    """max |value - expected| / max |expected|."""
    largest = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    return ((value - expected).abs().max() / largest).item()


def decompose(record: Record, by: str = "branch", at: Key = FINAL, pos: Positions = None) -> Terms:
    """The stream at a point as the sum of the writes that made it, each carried to the point.

    Args:
        record: of one forward pass.
        by: `branch`: a row a write; `head`: attention's writes by head; `neuron`: the MLPs' by neuron as well.
        at: a point of the stream.
        pos: a position, a range of them, or None for all.

    Returns terms whose values are (rows, B, T, C), or (rows, B, C) for one position. Biases have rows of their own:
    `0_attn.b_V` is the values' bias as the heads write it, `0_attn.b_O` and `0_mlp.b_out` the projections', and
    `0_attn.ln_out.bias`, `0_attn.ln_add.bias` the norms'.

    Raises ConfigError for an unknown unit or point, a position out of range, and rows that exceed `BUDGET`.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", on the residual stream.
    """
    check_unit(by)
    point, span = resolve(at, record.model), positions(record, pos)
    passed = _joins_before(record, point)
    with torch.no_grad():
        total = record[point][:, span]
        first = entering(record)
        rows = [(label, first.carry(row)) for piece in _embeddings(record, span) for label, row in piece.carried()]
        for passage in passages(record, passed, span):
            pieces = list(written(record, passage, by, span))
            _check_room(sum(len(piece.labels) for piece in pieces) + len(rows), total)
            rows = [(label, passage.carry(row)) for label, row in rows]
            rows += [(label, passage.add(row)) for piece in pieces for label, row in piece.carried()]
            rows += [row for piece in _constant(passage, total) for row in piece.carried()]
        last = reading(record, point)
        rows = [(label, last.carry(row)) for label, row in rows]
        return Terms.of(rows, total).at(pos, axis=1)


def project(record: Record, u: Tensor, by: str = "branch", at: Key = FINAL, pos: Positions = None) -> Terms:
    """The rows of `decompose`, each measured along directions, without being carried or spread over the width.

    Args:
        record, by, at, pos: those of `decompose`.
        u: directions at the point: (C,) or (k, C), or for each position (..., B, T, C).

    Returns terms whose values are (rows, B, T), after rows k or whatever led u's shape, without T for one position; the
    total is <stream, u>.
    """
    check_unit(by)
    point, span = resolve(at, record.model), positions(record, pos)
    passed = _joins_before(record, point)
    with torch.no_grad():
        stream = record[point][:, span]
        u = u if u.ndim >= 3 else u[..., None, None, :]
        u = u.expand(*u.shape[:-3], *stream.shape)  # (..., B, T, C)
        total = (stream * u).sum(-1)
        rows: list[Row] = []
        u = reading(record, point).pull(u)
        for passage in reversed(list(passages(record, passed, span))):
            pulled = passage.pull(u)
            pieces = written(record, passage, by, span)
            rows = [
                *(row for piece in pieces for row in piece.along(pulled.write)),
                *(row for piece in _constant(passage, stream) for row in piece.along(u)),
                *rows,
            ]
            u = pulled.stream
        u = entering(record).pull(u)
        rows = [row for piece in _embeddings(record, span) for row in piece.along(u)] + rows
        return Terms.of(rows, total).at(pos, axis=-1)


def accumulate(record: Record, by: str = "branch", pos: Positions = None, norm: str | None = None) -> Terms:
    """The running sums of `decompose`: row i is what `resid_final` would be with the writes up to i alone.

    Args:
        record, by, pos: those of `decompose`.
        norm: what `ln_f` makes of each sum: `frozen` or `own`, as in `normalised`; None: the sums as they are.
    """
    terms = decompose(record, by, pos=pos)
    sums, total = terms.values.cumsum(0), terms.total
    if norm is not None:
        sums, total = (normalised(record, x, norm, pos) for x in (sums, total))
    return Terms(terms.labels, sums, total, closing_error(sums[-1], total))


def normalised(record: Record, x: Tensor, norm: str, pos: Positions = None) -> Tensor:
    """What `ln_f` makes of x, (..., B, T, C), or (..., B, C) at one position: what the unembedding reads.

    `own`: as the norm does, with x's own scale, for the lens. `frozen`: with the scale that resid_final had at that
    position, for attribution: then the norm is affine, and the bias is added to each x.
    """
    check_normalisation(norm)
    with torch.no_grad():
        if norm == "own":
            return record.model.ln_f(x)
        final = final_norm(record, positions(record, pos))
        y = final.carry(x[..., None, :]).squeeze(-2) if isinstance(pos, int) else final.carry(x)
        bias = getattr(final, "bias", None)
        return y if bias is None else y + bias


def check_unit(by: str) -> None:
    """Raise ConfigError for a unit that is not one of UNITS."""
    if by not in UNITS:
        raise ConfigError(f"by: unknown unit {by!r}; {nearest(by, UNITS)}")


def check_normalisation(norm: str) -> None:
    """Raise ConfigError for a normalisation that is not one of NORMALISATIONS."""
    if norm not in NORMALISATIONS:
        raise ConfigError(f"norm: unknown value {norm!r}; {nearest(norm, NORMALISATIONS)}")


def positions(record: Record, pos: Positions) -> slice:
    """The positions as a range. Raises ConfigError for one that the text does not have."""
    if not isinstance(pos, int | slice | None):
        raise ConfigError(f"pos: {pos!r} is not a position; give a number, a slice, or None for all")
    if not isinstance(pos, int):
        span, T = slice(None) if pos is None else pos, record.ids.shape[1]
        if not range(T)[span]:
            raise ConfigError(f"pos: {span} holds none of the {T} positions of the text")
        return span
    at = position(pos, record.ids.shape[1])
    return slice(at, at + 1)


def _joins_before(record: Record, point: str) -> int:
    """How many joins the stream has passed at the point. Raises ConfigError for a point that is not of the stream."""
    passed = level(record.model, point)
    if passed is None:
        raise ConfigError(f"at: {point!r} is not a point of the stream; give 'resid_final' or ('resid_mid', 0)")
    return passed


def _check_room(rows: int, total: Tensor) -> None:
    needed = rows * total.numel() * total.element_size()
    if needed > BUDGET:
        raise ConfigError(
            f"by: {rows:,} rows of {tuple(total.shape)} take {needed / 1e9:,.1f} GB; "
            "choose a position with pos=, or measure them along directions with `project`"
        )


@dataclass(frozen=True)
class _Whole:
    """A row as it is, (B, T, C)."""

    label: str
    value: Tensor

    @property
    def labels(self) -> list[str]:
        return [self.label]

    def carried(self) -> list[Row]:
        return [(self.label, self.value)]

    def along(self, u: Tensor) -> list[Row]:
        return [(self.label, (self.value * u).sum(-1))]


@dataclass(frozen=True)
class _Parts:
    """Rows of one write: activations (B, T, G, k), and what each of them writes, (G, k, C), before norm and gain."""

    labels: list[str]
    activations: Tensor
    directions: Tensor
    passage: Passage

    def carried(self) -> list[Row]:
        rows = torch.einsum("btgk,gkc->gbtc", self.activations, self.directions)
        return list(zip(self.labels, self.passage.returned(rows), strict=True))

    def along(self, u: Tensor) -> list[Row]:
        u = self.passage.pull_returned(u)  # (..., B, T, C)
        read = (u @ self.directions.flatten(0, 1).T).unflatten(-1, self.directions.shape[:2])  # (..., B, T, G, k)
        return list(zip(self.labels, (read * self.activations).sum(-1).unbind(-1), strict=True))


def _embeddings(record: Record, span: slice) -> Iterator[_Whole]:
    for name in ("embed", "pos_embed") if record.model.wpe is not None else ("embed",):
        yield _Whole(name, record[name][:, span])


def _constant(passage: Passage, like: Tensor) -> Iterator[_Whole]:
    """What the join adds by itself: the bias of the norm over the sum."""
    if passage.constant is not None:
        label = names.row(passage.site.block, f"{passage.site.kind}.ln_add.bias")
        yield _Whole(label, passage.constant.expand_as(like))


def written(record: Record, passage: Passage, by: str, span: slice) -> Iterator[_Whole | _Parts]:
    """One write as pieces that sum to it: itself; or its heads or neurons, and its biases.

    A piece has `labels`, `carried()`, its rows as they are added, (B, T, C), and `along(u)`, their products with u.
    """
    site, branch = passage.site, passage.site.branch
    write = record[site.write][:, span]
    if by == "branch" or (by == "head" and site.kind == "mlp"):
        yield _Whole(site.label, write)
        return
    one = torch.ones_like(write[:, :, None, :1])  # (B, T, 1, 1)

    def bias(name: str, vector: Tensor) -> _Parts:
        return _Parts([names.row(site.block, name)], one, vector[None, None], passage)

    if isinstance(branch, Attention):
        z, b_V = record[site.point("attn.z")][:, span], branch.b_V  # (B, T, H, D), (H, D)
        labels = [names.head(site.block, head) for head in range(branch.n_head)]
        yield _Parts(labels, z if b_V is None else z - b_V, branch.W_O, passage)
        if b_V is not None:  # every pattern sums to 1, so what a head writes of it is the same everywhere
            yield bias("attn.b_V", torch.einsum("hd,hdc->c", b_V, branch.W_O))
    else:
        post = record[site.point("mlp.post")][:, span, :, None]  # (B, T, M, 1)
        labels = [names.neuron(site.block, neuron) for neuron in range(post.shape[2])]
        yield _Parts(labels, post, branch.c_proj.weight.T[:, None], passage)
    if branch.c_proj.bias is not None:
        yield bias("attn.b_O" if site.kind == "attn" else "mlp.b_out", branch.c_proj.bias)
    if (constant := getattr(passage.out, "bias", None)) is not None:
        label = names.row(site.block, f"{site.kind}.ln_out.bias")
        yield _Whole(label, passage.gain.carry(constant).expand_as(write))
