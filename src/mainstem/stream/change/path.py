"""Path patching: the direct effect of one write on a later branch, with all other paths frozen.

There are two passes of the corrupted input. In the first, the sender has its clean value and every later branch its
corrupted write, so the receivers differ only by the direct path from the sender. In the second, the receivers have
these values, and nothing is frozen (Wang et al. 2022; Goldowsky-Dill et al. 2023). Norms recompute their scales.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.names import FINAL, parse_label, split
from mainstem.model.stack import join_index
from mainstem.stream.change.intervene import At, Change, Intervention, Referred, Target, locate, resample, set_to
from mainstem.stream.change.patch import Patched
from mainstem.stream.change.rerun import recorded
from mainstem.stream.ids import Ids, paired
from mainstem.stream.metrics import Metric, measured, with_ids

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

_SENDERS = ("embed", "attn.z", "attn_out", "mlp.post", "mlp_out")


def path_patch(
    model: GPT,
    clean: Ids,
    corrupt: Ids,
    sender: Target,
    receivers: Target | list[Target],
    metric: Metric,
    *,
    freeze_mlps: bool = True,
    mask: Tensor | None = None,
    tokenizer: "Tokenizer | None" = None,
) -> Patched:
    """Patch the direct path from a sender to receivers; `effects` is (B,).

    Args:
        model: any GPT.
        clean, corrupt: ids, (B, T) both; or rows of ids, or texts, with equally many tokens in each pair of rows.
        sender: a head `L0H1`, a neuron `L0N17`, a branch `0_mlp_out`, or `embed`; or `At` some positions of one.
        receivers: one or a list: an input of a head, `L1H2.q`, `.k` or `.v`, or all three, `L1H2`; a branch, `1_mlp` or
            `1_attn`; or `final`, the input of `ln_f`. A receiving branch is patched at its write.
        metric: logits (B, T, V) -> (B,); see `metrics`.
        freeze_mlps: whether MLPs are frozen; False counts paths through them as direct, as Wang et al. do.
        mask: (B, T) bool, false at padding, of both.
        tokenizer: for texts, of the inputs and of the metric's tokens.

    Raises ConfigError for inputs of unequal shapes, unknown senders and receivers, and a receiver that comes before the
    sender.
    """
    clean, corrupt, mask = paired(model, clean, corrupt, mask, tokenizer)
    metric = with_ids(metric, tokenizer)
    every = [_receiver(each, model) for each in (receivers if isinstance(receivers, list) else [receivers])]
    point = _sender(sender, every, model)
    frozen = [
        site.write
        for index, site in enumerate(model.joins())
        if index > join_index(model, point) and (site.kind == "attn" or freeze_mlps)
    ]
    source = recorded(model, clean, [point, "resid_final"], mask)
    base = recorded(model, corrupt, [*frozen, "resid_final"], mask)
    received: dict[int, Tensor] = {}
    changes: list[tuple[Target, Change | Referred]] = [
        *((receiver, _keep(received, i)) for i, receiver in enumerate(every)),  # before its own write is frozen
        *((write, resample(base)) for write in frozen),
        (sender, resample(source)),
    ]
    with torch.no_grad(), evaluating(model):
        model.stream(corrupt, mask=mask, tap=Intervention(model, changes))
        second = Intervention(model, [(receiver, set_to(received[i])) for i, receiver in enumerate(every)])
        finals = (source["resid_final"], base["resid_final"], model.stream(corrupt, mask=mask, tap=second))
        before, without, patched = (measured(model, final, metric) for final in finals)
    return Patched(patched - without, before, without)


def _keep(received: dict[int, Tensor], i: int) -> Change:
    def change(x: Tensor) -> Tensor:
        received[i] = x
        return x

    return change


def _receiver(target: Target, model: GPT) -> Target:
    """The target at which a receiver is patched. Raises ConfigError for the stream between branches."""
    at = target if isinstance(target, At) else At(target)
    branch = isinstance(at.target, str) and parse_label(at.target).name in ("attn", "mlp")
    key = FINAL if at.target == "final" else f"{at.target}_out" if branch else at.target
    point = locate(key, model).point
    if split(point)[1].startswith(("resid_pre", "resid_mid", "resid_post", "embed", "pos_embed")):
        raise ConfigError(f"receiver: {point!r} is the stream itself; give 'L1H2.q', '1_mlp', '1_attn' or 'final'")
    return At(key, at.pos, at.units)


def _sender(target: Target, receivers: list[Target], model: GPT) -> str:
    """The point of a sender. Raises ConfigError for one that does not write to the stream before every receiver."""
    point = locate(target, model).point
    if not point.endswith(_SENDERS):
        raise ConfigError(f"sender: {point!r} is not written to the stream; give 'L0H1', '0_mlp_out' or 'embed'")
    for receiver in receivers:
        reads = locate(receiver, model).point
        if join_index(model, reads) <= join_index(model, point):
            raise ConfigError(f"receiver: {reads!r} comes before {point!r} in the forward pass; give a later receiver")
    return point
