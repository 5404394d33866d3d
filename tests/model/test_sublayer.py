"""The one equation, row by row, around branches of our own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mainstem.config import NORMS
from mainstem.errors import ConfigError
from mainstem.model.sublayer import Sublayer
from models import ROWS, build, error, few, normal, record, small, stir, tokens
from reference import PreNormSublayer, TransformerSublayer, norm_of, reference_join


@pytest.mark.parametrize(("residual", "Plain"), [("post", TransformerSublayer), ("pre", PreNormSublayer)])
def test_sublayer_is_the_documents_to_the_bit(residual, Plain):
    """In evaluation, and in training under one seed."""
    ours = Sublayer(nn.Linear(64, 64), 64, residual=residual, dropout=0.1)
    plain = Plain(ours.branch, 64, dropout=0.1)
    x = normal(2, 10, 64).float()

    assert torch.equal(ours.eval()(x), plain.eval()(x))
    outputs = []
    for module in (ours.train(), plain.train()):
        torch.manual_seed(3)
        outputs.append(module(x))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], ours.eval()(x))


@few
@given(st.sampled_from(NORMS), st.booleans(), st.booleans(), st.integers(1, 9), st.data())
@pytest.mark.parametrize("residual", ROWS)
def test_every_row_is_what_its_source_writes(residual, norm, bias, training, depth, data):
    """The table against `reference_join`, at any place in any stack; in training under one seed."""
    place = {"index": data.draw(st.integers(0, depth - 1)), "depth": depth}
    ours = Sublayer(nn.Linear(6, 6), 6, residual=residual, dropout=0.3, norm=norm, bias=bias, **place)
    stir(ours)
    ours.train(training)
    slots = {slot: getattr(ours.join, slot) for slot in ("ln_in", "ln_out", "ln_add")}
    norms = {slot: norm_of(module) for slot, module in slots.items() if list(module.parameters())}
    gain = getattr(ours.join.gain, "weight", None)
    drop = nn.Dropout(0.3).train(training)
    x = normal(2, 3, 6)

    torch.manual_seed(3)
    value = ours(x)
    torch.manual_seed(3)
    expected = reference_join(residual, ours.branch, x, norms=norms, gain=gain, drop=drop, **place)
    assert error(value, expected) < 1e-14


@pytest.mark.parametrize("residual", ROWS)
def test_a_branch_of_another_shape_is_refused(residual):
    """The message names both shapes."""
    with pytest.raises(ConfigError, match=r"\(2, 10, 64\).*\(2, 10, 32\)"):
        Sublayer(nn.Linear(64, 32), 64, residual=residual)(normal(2, 10, 64).float())


def test_a_place_outside_the_stack_is_refused():
    with pytest.raises(ConfigError, match=r"index: 4 .* depth 4; choose 0 to 3"):
        Sublayer(nn.Linear(8, 8), 8, residual="lns", index=4, depth=4)


@pytest.mark.parametrize("residual", [row for row in ROWS if row not in ("post", "deepnorm")])
def test_what_is_tapped_is_what_is_added(residual):
    """Also with dropout on: each later stream is the earlier one, times skip, plus the write, to the bit."""
    model = build(small(residual, dropout=0.3)).train()
    points = record(model, tokens(model.config))
    for index, block in enumerate(model.blocks):
        here = f"blocks.{index}."
        if residual == "mix" and index == 0:
            continue  # a norm follows its additions
        after_attention = block.res_1.skip(points[here + "resid_pre"]) + points[here + "attn_out"]
        after_mlp = block.res_2.skip(points[here + "resid_mid"]) + points[here + "mlp_out"]
        assert torch.equal(points[here + "resid_mid"], after_attention)
        assert torch.equal(points[here + "resid_post"], after_mlp)


def test_what_the_output_projections_read_is_tapped_after_dropout():
    model = build(small(attn_dropout=0.5, mlp_dropout=0.5)).train()
    points = record(model, tokens(model.config))
    for index, block in enumerate(model.blocks):
        here = f"blocks.{index}."
        assert torch.equal(block.attn.c_proj(points[here + "attn.z"].flatten(-2)), points[here + "attn_out"])
        assert torch.equal(block.mlp.c_proj(points[here + "mlp.post"]), points[here + "mlp_out"])
