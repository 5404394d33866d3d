"""The matrices by which each part of a model writes to the residual stream and reads from it.

Row vectors, x @ W. A writer's matrix is (k, C): its k inner units in, the stream out. A reader's is (C, m): the stream
in, its m inner units out. C d_model, D d_head, M d_mlp, V vocabulary, T n_ctx, H heads.

    writer         matrix    |  reader                    matrix
    embed          (V, C)    |  L1H2.Q  L1H2.K  L1H2.V    (C, D)
    pos_embed      (T, C)    |  1_mlp_in                  (C, M)
    L0H3           (D, C)    |  1_mlp.gate  1_mlp.up      (C, M) each, where the MLP is gated
    0_mlp_out      (M, C)    |  unembed                   (C, V)

A norm's gain, LayerNorm's centring and the join's `damp` and `gain` are folded into the matrix; the model itself is
unchanged. Left out are a norm's scale, a positive number for each token (`scales` names the points at which a tap
records it), and biases, which depend on no input.

The places in the stack are its joins, from 0: block 0's attention, block 0's MLP, block 1's attention and so on. A
writer's place is the join that adds it, -1 for the embeddings; a reader's is the join that it reads for, and the number
of joins for the unembedding.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError, nearest
from mainstem.model import names
from mainstem.model.attention import Attention
from mainstem.model.gpt import GPT
from mainstem.model.norms import Empty, LayerNorm, Norm
from mainstem.model.precision import wide

DIRECTION_ONLY = "direction only: QK-norm fixes the length"


@dataclass(frozen=True, eq=False)
class Writer:
    """A part that writes to the stream: its write is its inner units @ matrix, divided by the `scales`."""

    label: str
    place: int
    """The index of the join that adds it; -1 for the embeddings."""
    weight: Tensor
    """The model's weight, (k, C); a view."""
    ln_out: nn.Module = field(default_factory=Empty)
    gain: nn.Module = field(default_factory=nn.Identity)
    scales: tuple[str, ...] = ()
    """The points of the norm scales that are left out: of ln_out, where the row has one."""

    @property
    @torch.no_grad()
    def matrix(self) -> Tensor:
        """The matrix, (k, C), with ln_out and gain folded in; float32 or wider."""
        return self.gain(after(self.ln_out, wide(self.weight.detach())))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the matrix leaves out."""
        return _scale_notes(self.label, self.scales)


@dataclass(frozen=True, eq=False)
class Reader:
    """A part that reads the stream: its inner units are stream @ matrix, divided by the `scales`.

    Queries and keys are those before rotation, which depends on the position (`head_weights.qk`).
    """

    label: str
    place: int
    """The index of the join that it reads for; the number of joins for the unembedding."""
    weight: Tensor
    """The model's weight, (C, m); a view."""
    ln_in: nn.Module
    """The norm before the part: the join's ln_in, or ln_f."""
    scales: tuple[str, ...] = ()
    """The points of the norm scales that are left out: of ln_in or ln_f, where the row has one."""
    damp: nn.Module = field(default_factory=nn.Identity)
    head_norm: nn.Module = field(default_factory=Empty)
    """The norm over a head's queries or keys, with `qk_norm`."""

    @property
    @torch.no_grad()
    def matrix(self) -> Tensor:
        """The matrix, (C, m), with ln_in (ln_f), damp and the norm over the head folded in; float32 or wider."""
        return self.damp(before(self.ln_in, after(self.head_norm, wide(self.weight.detach()))))

    @property
    def centres(self) -> bool:
        """Whether the mean is subtracted from the stream before it is read."""
        return isinstance(self.ln_in, LayerNorm)

    @property
    def direction_only(self) -> bool:
        """Whether a norm over the head fixes the length, so that only the direction is known."""
        return isinstance(self.head_norm, Norm)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the matrix leaves out."""
        direction = f"{self.label}: {DIRECTION_ONLY}"
        return (*_scale_notes(self.label, self.scales), *([direction] if self.direction_only else []))


def _scale_notes(label: str, scales: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{label}: up to 1 / {scale}, a positive number for each token" for scale in scales)


def centred(rows: Tensor) -> Tensor:
    """Rows (..., C) without their means, as LayerNorm reads them."""
    return rows - rows.mean(-1, keepdim=True)


def after(norm: nn.Module, rows: Tensor) -> Tensor:
    """Rows (..., C) after a norm, without its scale and bias: rows @ centring @ diag(gain)."""
    if isinstance(norm, LayerNorm):
        rows = centred(rows)
    return rows * norm.get_parameter("weight") if isinstance(norm, Norm) else rows


def before(norm: nn.Module, columns: Tensor) -> Tensor:
    """Columns (..., C, m) before a norm, without its scale and bias: centring @ diag(gain) @ columns."""
    if isinstance(norm, Norm):
        columns = norm.get_parameter("weight")[:, None] * columns
    return centred(columns.mT).mT if isinstance(norm, LayerNorm) else columns


def _scale(point: str | None) -> tuple[str, ...]:
    return () if point is None else (point,)


def writers(model: GPT) -> dict[str, Writer]:
    """Every writer by its label, in the order of the forward pass."""
    entries = [Writer("embed", -1, model.wte.weight)]
    if model.wpe is not None:
        entries.append(Writer("pos_embed", -1, model.wpe.weight))
    for place, site in enumerate(model.joins()):
        join, branch = site.join, site.branch
        rest = (join.ln_out, join.gain, _scale(site.scale("ln_out")))
        if isinstance(branch, Attention):
            entries += [Writer(names.head(site.block, h), place, part, *rest) for h, part in enumerate(branch.W_O)]
        else:
            entries.append(Writer(site.label, place, branch.c_proj.weight.T, *rest))
    return {writer.label: writer for writer in entries}


def readers(model: GPT) -> dict[str, Reader]:
    """Every reader by its label, in the order of the forward pass."""
    entries, joins = [], model.joins()
    for place, site in enumerate(joins):
        block, join, branch = site.block, site.join, site.branch
        rest = (join.ln_in, _scale(site.scale("ln_in")), join.damp)
        if isinstance(branch, Attention):
            roles = (("Q", branch.W_Q, branch.q_norm), ("K", branch.W_K, branch.k_norm), ("V", branch.W_V, Empty()))
            entries += [
                Reader(names.head(block, h, role), place, weight[h], *rest, head_norm)
                for h in range(branch.n_head)
                for role, weight, head_norm in roles
            ]
        else:
            labels = [names.row(block, name) for name in (("mlp.gate", "mlp.up") if branch.gated else ("mlp_in",))]
            parts = branch.c_fc.weight.chunk(len(labels))  # each (M, C)
            entries += [Reader(label, place, part.T, *rest) for label, part in zip(labels, parts, strict=True)]
    final = "ln_f.scale" if isinstance(model.ln_f, Norm) else None
    entries.append(Reader("unembed", len(joins), model.lm_head.weight.T, model.ln_f, _scale(final)))
    return {reader.label: reader for reader in entries}


def writer(model: GPT, label: str) -> Writer:
    """The writer with a label. Raises ConfigError with the nearest label."""
    entries = writers(model)
    if label not in entries:
        raise ConfigError(f"writer: {label!r} is not in this model; {nearest(label, entries)}")
    return entries[label]


def reader(model: GPT, label: str) -> Reader:
    """The reader with a label. Raises ConfigError with the nearest label."""
    entries = readers(model)
    if label not in entries:
        raise ConfigError(f"reader: {label!r} is not in this model; {nearest(label, entries)}")
    return entries[label]
