"""What each part of a model writes to the residual stream and reads from it, as matrices of the live model.

Row vectors, x @ W. A writer's matrix is (k, C): its k inner units in, the stream out. A reader's is (C, m): the stream
in, its m inner units out. C d_model, D d_head, M d_mlp, V vocabulary, T n_ctx, H heads.

    writer         matrix    |  reader                    matrix
    embed          (V, C)    |  L1H2.Q  L1H2.K  L1H2.V    (C, D)
    pos_embed      (T, C)    |  1_mlp_in                  (C, M)
    L0H3           (D, C)    |  1_mlp.gate  1_mlp.up      (C, M) each, where the MLP is gated
    0_mlp_out      (M, C)    |  unembed                   (C, V)

What stands between the weights and the stream is folded into the matrix, and never into the model: a norm's gain and
LayerNorm's centring, the join's `damp` and `gain`. What no weight knows is left out: a norm's scale, a positive number
for each token (`scales` names the points at which a tap records it), and biases, which depend on no input.

The places in the stack are its joins, from 0: block 0's attention, block 0's MLP, block 1's attention and so on. A
writer's place is the join that adds it, -1 for the embeddings; a reader's is the join that it reads for, and the number
of joins for the unembedding.
"""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mainstem.circuits.factors import Factored
from mainstem.errors import ConfigError, nearest
from mainstem.model.attention import Attention, rotate, rotation
from mainstem.model.gpt import GPT
from mainstem.model.norms import Empty, LayerNorm, Norm
from mainstem.model.stack import places
from mainstem.model.sublayer import Constant


@dataclass(frozen=True, eq=False)
class Writer:
    """A part that adds to the stream: what is added is its inner units @ matrix, divided by the `scales`."""

    label: str
    place: int
    """The index of the join that adds it; -1 for the embeddings."""
    weight: Tensor
    """(k, C), as the model has it; a view."""
    ln_out: nn.Module = field(default_factory=Empty)
    gain: nn.Module = field(default_factory=nn.Identity)
    scales: tuple[str, ...] = ()
    """The points of the norm scales that are left out: ln_out's, where the row has one."""

    @property
    @torch.no_grad()
    def matrix(self) -> Tensor:
        """(k, C), with ln_out and gain folded; float32 or wider."""
        return self.gain(after(self.ln_out, _wide(self.weight)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the matrix leaves open, in words."""
        return _scale_notes(self.label, self.scales)


@dataclass(frozen=True, eq=False)
class Reader:
    """A part that reads the stream: its inner units are stream @ matrix, divided by the `scales`.

    Queries and keys are those before rotation, which depends on the position (see `qk`).
    """

    label: str
    place: int
    """The index of the join that it reads for; the number of joins for the unembedding."""
    weight: Tensor
    """(C, m), as the model has it; a view."""
    ln_in: nn.Module
    """The join's, or ln_f."""
    scales: tuple[str, ...] = ()
    """The points of the norm scales that are left out: ln_in's or ln_f's, where the row has one."""
    damp: nn.Module = field(default_factory=nn.Identity)
    head_norm: nn.Module = field(default_factory=Empty)
    """The norm over a head's queries or keys, with `qk_norm`."""

    @property
    @torch.no_grad()
    def matrix(self) -> Tensor:
        """(C, m), with ln_in (ln_f), damp and the norm over the head folded; float32 or wider."""
        return self.damp(before(self.ln_in, after(self.head_norm, _wide(self.weight))))

    @property
    def centres(self) -> bool:
        """Whether the stream's mean is taken away before it is read."""
        return isinstance(self.ln_in, LayerNorm)

    @property
    def direction_only(self) -> bool:
        """Whether a norm over the head fixes the length of what is read, so that only its direction is known."""
        return isinstance(self.head_norm, Norm)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the matrix leaves open, in words."""
        direction = f"{self.label}: direction only, for QK-norm fixes the length of what is read"
        return (*_scale_notes(self.label, self.scales), *([direction] if self.direction_only else []))


def _scale_notes(label: str, scales: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{label}: up to 1 / {scale}, a positive number for each token" for scale in scales)


def _wide(weight: Tensor) -> Tensor:
    """Half precision has neither QR nor the digits."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def centred(rows: Tensor) -> Tensor:
    """Rows (..., C) without their means, as LayerNorm reads them."""
    return rows - rows.mean(-1, keepdim=True)


def after(norm: nn.Module, rows: Tensor) -> Tensor:
    """Rows (..., C) as the norm returns them, without its scale and bias: rows @ centring @ diag(gain)."""
    if isinstance(norm, LayerNorm):
        rows = centred(rows)
    return rows * norm.get_parameter("weight") if isinstance(norm, Norm) else rows


def before(norm: nn.Module, columns: Tensor) -> Tensor:
    """Columns (..., C, m) that read what the norm returns, as they read its input: centring @ diag(gain) @ columns."""
    if isinstance(norm, Norm):
        columns = norm.get_parameter("weight")[:, None] * columns
    return centred(columns.mT).mT if isinstance(norm, LayerNorm) else columns


def _scales(prefix: str, norm: nn.Module) -> tuple[str, ...]:
    return (f"{prefix}{norm.point}.scale",) if isinstance(norm, Norm) else ()


def writers(model: GPT) -> dict[str, Writer]:
    """Every writer by its label, in the order of the forward pass."""
    found = [Writer("embed", -1, model.wte.weight)]
    if model.wpe is not None:
        found.append(Writer("pos_embed", -1, model.wpe.weight))
    for place, (block, _, join, branch) in enumerate(places(model)):
        rest = (join.ln_out, join.gain, _scales(f"blocks.{block}.", join.ln_out))
        if isinstance(branch, Attention):
            parts = branch.c_proj.weight.chunk(branch.n_head, dim=1)  # each (C, D)
            found += [Writer(f"L{block}H{h}", place, part.T, *rest) for h, part in enumerate(parts)]
        else:
            found.append(Writer(f"{block}_mlp_out", place, branch.c_proj.weight.T, *rest))
    return {writer.label: writer for writer in found}


def readers(model: GPT) -> dict[str, Reader]:
    """Every reader by its label, in the order of the forward pass."""
    found, stack = [], list(places(model))
    for place, (block, _, join, branch) in enumerate(stack):
        rest = (join.ln_in, _scales(f"blocks.{block}.", join.ln_in), join.damp)
        if isinstance(branch, Attention):
            views = branch.c_attn.weight.unflatten(0, (3, branch.n_head, branch.d_head))  # (3, H, D, C)
            roles = (("Q", branch.q_norm), ("K", branch.k_norm), ("V", Empty()))
            found += [
                Reader(f"L{block}H{h}.{role}", place, views[part, h].T, *rest, head_norm)
                for h in range(branch.n_head)
                for part, (role, head_norm) in enumerate(roles)
            ]
        else:
            names = (f"{block}_mlp.gate", f"{block}_mlp.up") if branch.gated else (f"{block}_mlp_in",)
            parts = branch.c_fc.weight.chunk(len(names))  # each (M, C)
            found += [Reader(name, place, part.T, *rest) for name, part in zip(names, parts, strict=True)]
    found.append(Reader("unembed", len(stack), model.lm_head.weight.T, model.ln_f, _scales("", model.ln_f)))
    return {reader.label: reader for reader in found}


def writer(model: GPT, label: str) -> Writer:
    """The writer of that label. Raises ConfigError with the nearest one."""
    found = writers(model)
    if label not in found:
        raise ConfigError(f"writer: {label!r} is not in this model; {nearest(label, found)}")
    return found[label]


def reader(model: GPT, label: str) -> Reader:
    """The reader of that label. Raises ConfigError with the nearest one."""
    found = readers(model)
    if label not in found:
        raise ConfigError(f"reader: {label!r} is not in this model; {nearest(label, found)}")
    return found[label]


def check_path(model: GPT, writer: Writer, reader: Reader) -> float:
    """The number by which the stream multiplies a write until the reader reads it: the product of the skips between.

    Raises ConfigError, with the reason, where no fixed matrix leads from one to the other: the reader does not come
    after the writer, a norm over the sum (`ln_add`) lies between, or a skip of 0 does.
    """
    route = f"{writer.label} -> {reader.label}"
    if reader.place <= writer.place:
        raise ConfigError(f"{route}: no virtual weights, for {reader.label} reads before {writer.label} has written")
    product = 1.0
    for place, at in enumerate(itertools.islice(places(model), reader.place)):
        join, name = at.join, at.name
        if place > writer.place:
            product *= join.skip.value if isinstance(join.skip, Constant) else 1.0
            if product == 0:
                raise ConfigError(f"{route}: no virtual weights, for {name}.skip is 0 and ends what was in the stream")
        if place >= writer.place and isinstance(join.ln_add, Norm):
            raise ConfigError(
                f"{route}: no virtual weights, for {name}.ln_add, a norm over the stream itself, lies between; "
                "rows without ln_add have them (pre, sandwich, reordered, none and others)"
            )
    return product


def at_offset(model: GPT, queries: Tensor, offset: int | None) -> Tensor:
    """W_Q (..., C, D) as it meets the keys `offset` positions before it: W_Q R(offset), where positions are rotary.

    R(a) R(b)^T = R(a - b), so that the product depends on the distance alone (Su et al. 2021, section 3.2.1). None is 1
    with rotary positions, and without them the queries as they are. Raises ConfigError for an offset below 0, and for
    one where positions are not rotary.
    """
    config = model.config
    if config.position != "rotary":
        if offset is not None:
            raise ConfigError(
                f"offset: {offset} has no meaning here; rotary queries turn with the distance to the key, and this "
                f"model's position is {config.position}"
            )
        return queries
    offset = 1 if offset is None else offset
    if offset < 0:
        raise ConfigError(f"offset: {offset} is a key after the query; a causal model reads keys at 0 or more")
    positions = torch.tensor([[offset]], device=queries.device)
    cos, sin = rotation(positions, config.d_head, config.rope_base, queries.dtype)  # (1, 1, 1, D / 2)
    return rotate(queries, cos.flatten(), sin.flatten())


def ov(model: GPT, layer: int, head: int) -> Factored:
    """W_V W_O of a head, (C, C) of rank D: what it writes for what it reads. Elhage et al. 2021, "OV circuit"."""
    label = f"L{layer}H{head}"
    return Factored(reader(model, f"{label}.V").matrix, writer(model, label).matrix)


def qk(model: GPT, layer: int, head: int, offset: int | None = None) -> Factored:
    """W_Q W_K^T of a head, (C, C) of rank D: x_query @ QK @ x_key is what attends. Elhage et al. 2021, "QK circuit".

    The factor `attn_scale` is not in it. With rotary positions it is W_Q R(offset) W_K^T, for a key `offset` positions
    before the query; None is 1. Raises ConfigError as `at_offset` does, and for a head that the model does not have.
    """
    label = f"L{layer}H{head}"
    queries = at_offset(model, reader(model, f"{label}.Q").matrix, offset)
    return Factored(queries, reader(model, f"{label}.K").matrix.mT)


@dataclass(frozen=True, eq=False)
class Heads:
    """The matrices of all heads, stacked, block by block: n = L H of them."""

    labels: list[str]
    W_Q: Tensor
    """(n, C, D), turned by the offset where positions are rotary."""
    W_K: Tensor
    """(n, C, D)."""
    W_V: Tensor
    """(n, C, D)."""
    W_O: Tensor
    """(n, D, C), centred where nothing reads the stream's mean."""
    width: int
    """The dimensions of the stream that are read: C, and C - 1 where nothing reads its mean."""


def heads(model: GPT, offset: int | None = None) -> Heads:
    """Every head of the model. Raises ConfigError for a model without heads, and for an offset as `at_offset` does.

    Where every reader centres, as with LayerNorm in `pre`, the mean of a write reaches nobody, and is taken away here.
    """
    written, read = writers(model), readers(model)
    labels = [label for label in written if f"{label}.V" in read]
    if not labels:
        raise ConfigError("a model without blocks has no heads; give one with n_layer at least 1")
    # (n, D, C) in memory, as the model has them, and as QR and products with the stream take them fastest
    W_Q, W_K, W_V = (torch.stack([read[f"{label}.{role}"].matrix.T for label in labels]).mT for role in "QKV")
    W_O, width = torch.stack([written[label].matrix for label in labels]), model.config.d_model
    if all(reader.centres for reader in read.values()):
        W_O, width = centred(W_O), width - 1
    return Heads(labels, at_offset(model, W_Q, offset), W_K, W_V, W_O, width)
