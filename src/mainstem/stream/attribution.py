"""Direct logit attribution: a logit, or the difference of two, as the sum of what each write adds to it."""

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model.attention import Attention
from mainstem.stream.decompose import Positions, Terms, positions, project
from mainstem.stream.passage import Passage, final_norm, passages, reading
from mainstem.stream.record import Record
from mainstem.text.units import single_token

Token = int | str | Tensor
"""An id; a text that is one token, if the record has a tokenizer; ids (B,) or (B, T), one a row or a position."""


def token_ids(record: Record, token: Token, what: str = "token") -> Tensor:
    """The ids, broadcastable to (B, T). Raises ConfigError for what is not that, DataError for a text of several."""
    if isinstance(token, str):
        if record.tokenizer is None:
            raise ConfigError(f"{what}: {token!r} is a text, and the trace has no tokenizer; give an id, or tokenizer=")
        token = single_token(record.tokenizer, token)
    ids, V, (B, T) = torch.as_tensor(token, device=record.ids.device), record.model.config.vocab_size, record.ids.shape
    if ids.shape not in ((), (1,), (B,), (1, T), (B, 1), (B, T)) or ids.is_floating_point():
        raise ConfigError(f"{what}: {ids.dtype} of shape {tuple(ids.shape)}; give one id, or whole numbers ({B}, {T})")
    for i in (int(ids.min()), int(ids.max())):
        if not 0 <= i < V:
            raise ConfigError(f"{what}: id {i} is outside 0..{V - 1}")
    return (ids[:, None] if ids.ndim == 1 else ids).long()


def attribution(
    record: Record, token: Token, foil: Token | None = None, by: str = "head", pos: Positions = -1
) -> Terms:
    """The logit of a token, less that of a foil if there is one, by what each write adds to it.

    The last norm keeps the scale that it had, nothing is folded, and the rows sum to the logit: `ln_f.bias` and
    `lm_head.bias` are rows of their own.

    Args:
        record: of one forward pass.
        token: whose logit; see Token.
        foil: what to compare it with.
        by, pos: those of `decompose`.

    Returns terms whose values are (rows, B, T), or (rows, B) for one position; `total` is the model's own logit.
    """
    span = positions(record, pos)
    with torch.no_grad():
        direction, offset = _direction(record, token, foil, span)
        final = final_norm(record, span)
        stream = record["resid_final"][:, span]
        logit = (record.model.ln_f(stream) * direction).sum(-1)  # the other rows of the unembedding are not needed
        direction = direction.expand_as(stream)
        terms = project(record, final.pull(direction), by, pos=span)
        rows = list(zip(terms.labels, terms.values, strict=True))
        if (bias := getattr(final, "bias", None)) is not None:
            rows.append(("ln_f.bias", direction @ bias))
        if offset is not None:
            rows.append(("lm_head.bias", offset.expand(stream.shape[:2])))
        return Terms.of(rows, logit if offset is None else logit + offset).at(pos, axis=-1)


def sources(record: Record, token: Token, foil: Token | None = None, pos: int = -1) -> Tensor:
    """What each head adds to the logit by reading each position: (L, B, H, T). Its sum over T is that of z's write.

    The values' bias is part of it: a head that reads a position reads its value whole.
    """
    span = positions(record, pos)
    with torch.no_grad():
        direction, _ = _direction(record, token, foil, span)
        u = final_norm(record, span).pull(direction.expand_as(record["resid_final"][:, span]))
        u = reading(record, "resid_final").pull(u)
        by_block = []
        for passage in reversed(list(passages(record, positions=span))):
            u, at_write = passage.pull(u)
            if isinstance(passage.site.branch, Attention):
                by_block.append(_by_source(record, passage, passage.site.branch, at_write, span))
        return torch.stack(by_block[::-1])


def _by_source(record: Record, passage: Passage, attn: Attention, at_write: Tensor, span: slice) -> Tensor:
    """(B, H, T) of one block: pattern times value, along a direction of the write, (B, 1, C)."""
    v, pattern = (record[passage.site.point(f"attn.{name}")] for name in ("v", "pattern"))  # v: (B, T, H, D)
    read = torch.einsum("bc,hdc->bhd", passage.pull_returned(at_write)[:, 0], attn.W_O)
    return pattern[:, :, span][:, :, 0] * torch.einsum("bthd,bhd->bht", v, read)


def _direction(record: Record, token: Token, foil: Token | None, span: slice) -> tuple[Tensor, Tensor | None]:
    """Rows of the unembedding, (B or 1, T or 1, C), and of its bias, (B or 1, T or 1)."""
    head = record.model.lm_head
    ids = _at_positions(token_ids(record, token), span)
    weight, bias = head.weight[ids], None if head.bias is None else head.bias[ids]
    if foil is not None:
        other = _at_positions(token_ids(record, foil, "foil"), span)
        weight, bias = weight - head.weight[other], None if bias is None else bias - head.bias[other]
    return (weight if weight.ndim == 3 else weight[None, None]), bias


def _at_positions(ids: Tensor, span: slice) -> Tensor:
    return ids[:, span] if ids.ndim == 2 and ids.shape[1] > 1 else ids
