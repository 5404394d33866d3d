"""The logit lens: at every depth, the distribution that the model would give if the stream ended there.

The stream at a depth is normalised by `ln_f` and unembedded, as the last depth is (nostalgebraist 2020, "interpreting
GPT: the logit lens"). A tuned lens (`mainstem.stream.analysis.tuned`) maps the stream before that.

Depths are the points of the stream, each tensor once: the `resid_pre` of block l is labelled `{l}_pre`, its `resid_mid`
`{l}_mid`, and `resid_final` `final`. What block l leaves is what block l + 1 reads, so a `resid_post` goes by the name
of the `resid_pre` or `resid_final` after it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model import names
from mainstem.model.gpt import GPT
from mainstem.model.names import FINAL
from mainstem.model.stack import level, levels
from mainstem.results import SHOWN, Item, Rows, strongest, summary
from mainstem.stream.attribution import Token, token_ids
from mainstem.stream.decompose import check_normalisation, normalised, positions
from mainstem.stream.distributions import divergence, log_probabilities
from mainstem.stream.points import Key, resolve, select
from mainstem.stream.record import Record
from mainstem.text.units import pieces, shown

AT_ONCE = 1 << 24
"""Logits that are held at once; more positions than fit are read one part after the other."""

Map = Callable[[Tensor, str], Tensor]
"""The stream (..., C) and its point -> what is read instead of it, (..., C). A TunedLens is one."""


def depths(model: GPT) -> list[str]:
    """Every point of the stream in the order of the forward pass, each tensor once; `resid_final` is the last."""
    return [first for first, *_ in levels(model)]


def depth(key: Key, model: GPT) -> str:
    """The name among `depths` of a point by any name. Raises ConfigError for one that is not of the stream."""
    point = resolve(key, model)
    passed = level(model, point)
    if passed is None:
        raise ConfigError(f"points: {point!r} is not a point of the stream; give 'resid_final' or ('resid_mid', 0)")
    return depths(model)[passed]


def label(point: str) -> str:
    """What one of `depths` is called in a result: `0_pre`, `0_mid`, `final`."""
    block, name = names.split(point)
    name = name.removeprefix("resid_")
    return name if block is None else names.row(block, name)


def at_once(each: int) -> int:
    """How many positions are unembedded together where each has so many logits."""
    return max(1, AT_ONCE // each)


@dataclass(frozen=True, eq=False, repr=False)
class Lens:
    """What the lens shows at P depths of B texts of T positions; at padding the values mean nothing."""

    points: list[str]
    """Our names of the depths, in the order of the forward pass."""
    labels: list[str]
    token: Tensor
    """The ids that are followed, (B, T)."""
    top_ids: Tensor
    """The most probable tokens, (P, B, T, top)."""
    top_probability: Tensor
    """The probabilities of `top_ids`, (P, B, T, top)."""
    entropy: Tensor
    """The entropy of the depth's distribution in nats, (P, B, T)."""
    kl: Tensor
    """KL(the model's own distribution || the depth's) in nats, (P, B, T)."""
    rank: Tensor
    """The followed token's rank, (P, B, T), from 1; of equal logits the lower id goes first, as in argmax."""
    probability: Tensor
    """The followed token's probability, (P, B, T)."""
    logit: Tensor
    """The followed token's logit, (P, B, T)."""
    won: Tensor
    """The first depth, (B, T), from which the followed token has rank 1 to the end: its index; P if there is none."""
    cross_entropy: Tensor
    """Mean cross-entropy of the actual next tokens in nats, (P,), without padding; NaN if no token has a next."""
    record: Record
    norm: str
    tuned: Map | None

    def logits(self, point: Key) -> Tensor:
        """All logits at one depth, (B, T, V); at `resid_final` they are the model's own."""
        with torch.no_grad():
            record, point = self.record, depth(point, self.record.model)
            if point == FINAL:
                return record.model.unembed(record[FINAL])
            return _unembedded(record, record[point], point, self.norm, self.tuned, slice(None))

    def __repr__(self) -> str:
        B, T = self.token.shape
        token = self._token(int(self.token[0, -1]))
        followed = f"the probability of {repr(shown(token['text'])) if 'text' in token else token['id']} after row 0"
        return summary(
            f"Lens: {len(self.points)} depths of {B} x {T} tokens; {followed}", self.top(SHOWN), len(self.points)
        )

    def top(self, n: int = 10, row: int = 0, pos: int = -1) -> Rows[Item]:
        """The n depths at which the followed token is most probable, at one position of one text."""
        rows = self.to_dicts(row, pos)
        return strongest(
            self.labels, [depth["probability"] for depth in rows], n, "depths: the probability of the token"
        )

    def _token(self, i: int) -> dict[str, Any]:
        """A token as plain values: its id, and its text where the record has a tokenizer."""
        tokenizer = self.record.tokenizer
        return {"id": i} if tokenizer is None else {"id": i, "text": pieces(tokenizer, [i])[0]}

    def to_dicts(self, row: int = 0, pos: int = -1) -> list[dict[str, Any]]:
        """Each depth at one position of one text: `label`, `point`, the followed `token` with its `rank`, `probability`
        and `logit`, the `entropy` and `kl` of the depth, and its `top` tokens.

        Raises ConfigError for a row or position that is not there, or is padding.
        """
        row, first = self.record.row_start(row)
        at = positions(self.record, pos).start
        if at < first:
            raise ConfigError(f"pos: {pos} of row {row} is padding; choose a later one, or count from -1, backwards")

        rows = []
        for index, point in enumerate(self.points):
            cell = (index, row, at)
            top = zip(self.top_ids[cell].tolist(), self.top_probability[cell].tolist(), strict=True)
            rows.append(
                {
                    "label": self.labels[index],
                    "point": point,
                    "token": self._token(int(self.token[row, at])),
                    "rank": int(self.rank[cell]),
                    "probability": self.probability[cell].item(),
                    "logit": self.logit[cell].item(),
                    "entropy": self.entropy[cell].item(),
                    "kl": self.kl[cell].item(),
                    "top": [self._token(i) | {"probability": p} for i, p in top],
                }
            )
        return rows


def lens(
    record: Record,
    token: Token | None = None,
    norm: str = "own",
    points: str | Iterable[Key] | None = None,
    top: int = 5,
    tuned: Map | None = None,
) -> Lens:
    """Read the stream at each depth as if it were the last.

    Logits of every depth are never held together: the depths are read one by one, over parts of the text where it is
    long.

    Args:
        record: of one forward pass.
        token: what to follow; see `attribution.Token`. None: at each position the token that the model ranks first.
        norm: `own`: `ln_f` with the depth's own statistics; `frozen`: with the scale that it had at `resid_final`.
            At `resid_final` the two are one.
        points: names and patterns as `points.select` takes them; None: every depth.
        top: how many of the most probable tokens to keep.
        tuned: a tuned lens for the same model.

    Raises ConfigError for an unknown norm, a point that is not of the stream, no point, a `top` below 1, and what
    `token_ids` refuses.
    """
    model = record.model
    B, T = record.ids.shape
    check_normalisation(norm)
    if top < 1:
        raise ConfigError(f"top: {top} is not possible; it must be at least 1")
    chosen = depths(model) if points is None else _chosen(points, model)
    followed = None if token is None else token_ids(record, token).expand_as(record.ids)
    following = record.ids.long().roll(-1, dims=1)
    with torch.no_grad():
        streams = {point: record[point] for point in {*chosen, FINAL}}
        parts: list[list[dict[str, Tensor]]] = []  # by part of the text, by depth
        for span in _spans(T, B * model.config.vocab_size):
            own = model.unembed(streams[FINAL][:, span])  # (B, t, V)
            final = log_probabilities(own)
            at = own.argmax(-1) if followed is None else followed[:, span]
            views = []
            for point in chosen:
                logits = own
                if point != FINAL:
                    logits = _unembedded(record, streams[point][:, span], point, norm, tuned, span)
                views.append(_view(logits, final, at, following[:, span], min(top, model.config.vocab_size)))
            parts.append(views)
        seen = {
            name: torch.cat([torch.stack([view[name] for view in views]) for views in parts], dim=2)
            for name in parts[0][0]
        }
        return Lens(
            points=chosen,
            labels=[label(point) for point in chosen],
            token=seen.pop("token")[0],
            won=len(chosen) - (seen["rank"] == 1).flip(0).cumprod(0).sum(0),
            cross_entropy=seen.pop("surprisal")[:, _has_next(record)].mean(1),
            record=record,
            norm=norm,
            tuned=tuned,
            **seen,
        )


def _chosen(points: str | Iterable[Key], model: GPT) -> list[str]:
    """Some of `depths`, in their order."""
    chosen = {depth(point, model) for point in select(points, model)}
    if not chosen:
        raise ConfigError("points: none is named; give at least one, or None for every depth")
    return [point for point in depths(model) if point in chosen]


def _view(logits: Tensor, final: Tensor, token: Tensor, following: Tensor, top: int) -> dict[str, Tensor]:
    """What is kept of one depth, (B, T, ...), from its logits and the final log-probabilities, (B, T, V)."""
    log_p = log_probabilities(logits)
    top_ids, logit = logits.topk(top).indices, _at(logits, token)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > logit[..., None]) | ((logits == logit[..., None]) & (ids < token[..., None]))
    return {
        "token": token,
        "top_ids": top_ids,
        "top_probability": log_p.gather(-1, top_ids).exp(),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "kl": divergence(final, log_p),
        "rank": 1 + before.sum(-1),
        "probability": _at(log_p, token).exp(),
        "logit": logit,
        "surprisal": -_at(log_p, following),
    }


def _unembedded(record: Record, x: Tensor, point: str, norm: str, tuned: Map | None, span: slice) -> Tensor:
    """The logits, (B, t, V), of the stream x, (B, t, C), at a depth before the last."""
    if tuned is not None:
        x = tuned(x, point)
    return record.model.lm_head(normalised(record, x, norm, span))


def _at(values: Tensor, ids: Tensor) -> Tensor:
    """values[..., ids], (B, T)."""
    return values.gather(-1, ids[..., None])[..., 0]


def _spans(length: int, each: int) -> Iterator[slice]:
    """Ranges that are together all of `length` positions, each of which has `each` logits."""
    step = at_once(each)
    return (slice(start, start + step) for start in range(0, length, step))


def _has_next(record: Record) -> Tensor:
    """(B, T) bool: where a token and the one after it are no padding."""
    real = torch.ones_like(record.ids, dtype=torch.bool) if record.mask is None else record.mask.bool()
    after = real.roll(-1, dims=1)
    after[:, -1] = False
    return real & after
