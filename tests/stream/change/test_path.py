"""Path patching: one way from a sender to a receiver, and no other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import induction, periodic
from mainstem.errors import ConfigError
from mainstem.stream.change.intervene import At
from mainstem.stream.change.path import path_patch
from mainstem.stream.metrics import LogitDifference, Loss, TokenLogit
from models import ROWS, Change, T, build, configs, error, few, record, small, tokens

MASK = torch.tensor([[False] * 2 + [True] * 5, [True] * 7])


def pair(config):
    """Clean ids and corrupted ones, (B, T)."""
    clean = tokens(config)
    return clean, (3 * clean + 1) % config.vocab_size


def by_hand(model, clean, corrupt, sender, receiver, metric, frozen_mlps=True, mask=None):
    """The same two passes, with taps of the test's own. Sender and receiver are (point, head or None)."""
    there, here = (record(model, ids, **({} if mask is None else {"mask": mask})) for ids in (clean, corrupt))
    got = {}

    def part(x, head):
        return x if head is None else x[:, :, head]

    def put(value, head):
        def change(x):
            x = x.clone()
            part(x, head)[:] = part(value, head)
            return x

        return change

    def freeze(point):
        def change(x):
            got[point] = x
            return here[point]

        return change

    branches = [p for p in here if p.endswith(("attn_out", "mlp_out"))]
    own = sender[0].replace("attn.z", "attn_out")
    changes = {p: freeze(p) for p in branches if p != own and (frozen_mlps or p.endswith("attn_out"))}
    changes[sender[0]] = put(there[sender[0]], sender[1])
    if sender[1] is not None:  # the other heads keep what they read before, too
        changes[sender[0]] = lambda x: put(there[sender[0]], sender[1])(here[sender[0]])
    if receiver[0] not in changes:
        changes[receiver[0]] = lambda x: got.setdefault(receiver[0], x)
    with torch.no_grad():
        model(corrupt, mask=mask, tap=Change(changes))
        return metric(model(corrupt, mask=mask, tap=Change({receiver[0]: put(got[receiver[0]], receiver[1])})))


SENDERS = {"embed": ("embed", None), "0_mlp_out": ("blocks.0.mlp_out", None), "L0H1": ("blocks.0.attn.z", 1)}
RECEIVERS = {
    "L1H0.q": ("blocks.1.attn.q", 0),
    "L1H1.k": ("blocks.1.attn.k", 1),
    "L1H1.v": ("blocks.1.attn.v", 1),
    "L1H0": ("blocks.1.attn.z", 0),
    "1_attn": ("blocks.1.attn_out", None),
    "1_mlp": ("blocks.1.mlp_out", None),
    "2_mlp": ("blocks.2.mlp_out", None),
    "final": ("resid_final", None),
}


@few
@given(st.data(), st.sampled_from(list(SENDERS)), st.sampled_from(list(RECEIVERS)), st.booleans())
@pytest.mark.parametrize("residual", ROWS)
def test_it_is_two_passes(residual, data, sender, receiver, frozen):
    model = build(data.draw(configs(residual=residual, n_layer=3, d_mlp=16, n_head=2)))
    clean, corrupt = pair(model.config)
    mask = data.draw(st.sampled_from((None, MASK)))
    metric = data.draw(st.sampled_from((LogitDifference(3, 5), Loss(corrupt))))
    found = path_patch(model, clean, corrupt, sender, receiver, metric, freeze_mlps=frozen, mask=mask)
    expected = by_hand(model, clean, corrupt, SENDERS[sender], RECEIVERS[receiver], metric, frozen, mask)
    assert error(found.effects + found.corrupt, expected) < 1e-10
    assert error(found.corrupt, metric(model(corrupt, mask=mask))) < 1e-12
    assert error(found.clean, metric(model(clean, mask=mask))) < 1e-12


@few
@given(configs(residual="none", n_layer=3, n_head=2), st.sampled_from(("L1H1", "0_attn_out", "embed")))
def test_to_the_end_it_is_the_senders_direct_attribution(config, sender):
    """Without norms: the difference of its writes, along the difference of the two tokens' rows of the unembedding."""
    model = build(config)
    clean, corrupt = pair(config)
    there, here = record(model, clean), record(model, corrupt)
    if sender == "L1H1":
        moved = (there["blocks.1.attn.z"] - here["blocks.1.attn.z"])[:, -1, 1]
        moved = moved @ model.blocks[1].attn.c_proj.weight.chunk(2, dim=1)[1].T
    else:
        point = sender.replace("0_", "blocks.0.")
        moved = (there[point] - here[point])[:, -1]
    direction = model.lm_head.weight[3] - model.lm_head.weight[5]
    found = path_patch(model, clean, corrupt, sender, "final", LogitDifference(3, 5))
    assert error(found.effects, moved @ direction) < 1e-10


def test_the_path_of_the_induction_model_is_by_the_key():
    model, clean = induction(), periodic(7, 16, 5)[:, :11]
    corrupt = clean.clone()
    corrupt[0, 5] = 6  # the last token has no earlier occurrence
    metric = TokenLogit(int(clean[0, 6]))

    def share(sender, receivers):
        return path_patch(model, clean, corrupt, sender, receivers, metric).values.item()

    assert share("L0H0", "L1H0.k") > 0.99
    assert share("L0H0", ["L1H0.k", "L1H0.q", "L1H0.v"]) > 0.99
    assert share(At("L0H0", pos=6), "L1H0") > 0.99  # from the position whose token comes next
    assert abs(share(At("L0H0", pos=5), "L1H0")) < 0.01
    for receiver in ("L1H0.q", "L1H0.v", "final"):
        assert share("L0H0", receiver) == 0  # other spans of the stream
    assert abs(share("embed", "L1H0")) < 0.02  # its token reaches L1H0 only through L0H0
    assert share("embed", "L0H0") > 0.99


def test_clean_into_clean_is_the_identity():
    model = build(small())
    ids = tokens(model.config)
    for receiver in RECEIVERS:
        found = path_patch(model, ids, ids, "L0H0", receiver, LogitDifference(3, 5))
        assert found.effects.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("sender", "receiver", "message"),
    [
        ("L1H0", "L0H1.q", r"'blocks\.0\.attn\.q' comes before 'blocks\.1\.attn\.z' in the forward pass"),
        ("L1H0", "L1H1.q", "comes before"),
        ("1_mlp_out", "1_attn", "comes before"),
        ("L0H0.q", "final", r"'blocks\.0\.attn\.q' is not written to the stream"),
        ("L0H0", ("resid_pre", 1), r"'blocks\.1\.resid_pre' is the stream itself"),
        ("L0H0", "3_mlp", "the model has 3"),
        ("L0H0", "finale", "not in this model"),
    ],
)
def test_what_is_no_path_is_refused(sender, receiver, message):
    model = build(small())
    with pytest.raises(ConfigError, match=message):
        path_patch(model, *pair(model.config), sender, receiver, TokenLogit(3))


def test_the_inputs_have_one_shape():
    model = build(small())
    clean, corrupt = pair(model.config)
    with pytest.raises(ConfigError, match=rf"\(2, 6\) and corrupt ids of \(2, {T}\)"):
        path_patch(model, clean[:, 1:], corrupt, "L0H0", "final", TokenLogit(3))
