"""What leaves a model's function alone leaves its circuits alone: the order of heads, scales, and bases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.circuits.composition import MODES, composition
from mainstem.circuits.head_weights import ov, qk
from mainstem.circuits.overlap import overlap
from mainstem.circuits.spectra import spectra
from models import UNCUT, build, configs, error, few, small, tokens

ROWS = tuple(row for row in UNCUT if row != "mix")
residuals = st.sampled_from(ROWS)


def turn(width, seed=0):
    """An orthogonal matrix."""
    drawn = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(drawn).Q


def parts(model, index):
    """Views of a block's c_attn weight, (3, H, D, C) of q, k and v, and of its c_proj weight, (C, H, D)."""
    attn = model.blocks[index].attn
    shape = (attn.n_head, attn.d_head)
    return attn.c_attn.weight.unflatten(0, (3, *shape)), attn.c_proj.weight.unflatten(1, shape)


def tables(model):
    """Every number that the room has about a model's heads."""
    composed, overlapped, spectral = composition(model), overlap(model), spectra(model)
    return {
        **{f"scores {mode}": composed.scores[mode].nan_to_num() for mode in MODES},
        **{f"rank corrected {mode}": composed.rank_corrected[mode].nan_to_num() for mode in MODES},
        "kernel": overlapped.kernel,
        "OV": spectral.ov_singular_values,
        "QK": spectral.qk_singular_values,
        "copying": spectral.copying,
    }


def assert_same(model, change):
    """Neither the logits nor any table is other than before."""
    ids = tokens(model.config)
    before, logits = tables(model), model(ids)
    with torch.no_grad():
        change(model)
    after = tables(model)
    assert error(model(ids), logits) < 1e-9
    for name, table in before.items():
        assert error(after[name], table) < 1e-7 if name == "copying" else error(after[name], table) < 1e-9, name


@few
@given(st.data(), residuals)
def test_scaling_values_up_and_outputs_down_changes_nothing(data, residual):
    def change(model):
        for index in range(len(model.blocks)):
            inward, outward = parts(model, index)
            inward[2] *= 3
            outward /= 3
            bias = model.blocks[index].attn.c_attn.bias
            if bias is not None:
                bias.chunk(3)[2].mul_(3)

    assert_same(build(data.draw(configs(residual=residual, n_layer=2))), change)


@few
@given(st.data(), residuals)
def test_the_basis_inside_a_head_is_nobodys_matter(data, residual):
    """Queries and keys turned alike, values and outputs turned alike; rotary positions and QK-norm have a basis."""
    config = data.draw(configs(residual=residual, n_layer=2, qk_norm=False, position="learned"))
    inner, outer = turn(config.resolved().d_head), turn(config.resolved().d_head, seed=1)

    def change(model):
        for index, block in enumerate(model.blocks):
            inward, outward = parts(model, index)
            basis = torch.stack((inner, inner, outer))[:, None]  # (3, 1, D, D)
            inward.copy_(basis @ inward)
            outward.copy_(outward @ outer.T)
            if block.attn.c_attn.bias is not None:
                bias = block.attn.c_attn.bias.unflatten(0, inward.shape[:3])[..., None]
                bias.copy_(basis @ bias)

    model = build(config)
    products = ov(model, 1, 0).dense(), qk(model, 1, 0).dense()
    assert_same(model, change)
    assert error(ov(model, 1, 0).dense(), products[0]) < 1e-10
    assert error(qk(model, 1, 0).dense(), products[1]) < 1e-10


@few
@given(st.sampled_from(("pre", "none", "sandwich", "reordered", "rezero")), st.booleans(), st.sampled_from((0, 48)))
def test_the_basis_of_the_stream_is_nobodys_matter(residual, rotary, d_mlp):
    """With RMSNorm of gain 1, or no norm at all: everything that reads or writes is turned."""
    position = "rotary" if rotary else "learned"
    model = build(small(residual, norm="rmsnorm", bias=False, position=position, d_mlp=d_mlp, tie_embeddings=False))
    basis = turn(12)

    def change(model):
        for name, parameter in model.named_parameters():
            if "ln_" not in name and "gain" not in name:
                writes = name.endswith("c_proj.weight")  # (C, k); all others, and the embeddings, are (k, C)
                parameter.copy_(basis.T @ parameter if writes else parameter @ basis)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" in name:
                parameter.fill_(1)
    assert_same(model, change)


@few
@given(st.data(), residuals)
def test_heads_in_another_order_are_the_same_heads(data, residual):
    model = build(data.draw(configs(residual=residual, n_layer=2, n_head=3)))
    before, order = tables(model), torch.tensor([2, 0, 1])
    with torch.no_grad():
        for index, block in enumerate(model.blocks):
            inward, outward = parts(model, index)
            inward.copy_(inward[:, order])
            outward.copy_(outward[:, order])
            if block.attn.c_attn.bias is not None:
                bias = block.attn.c_attn.bias.unflatten(0, inward.shape[:3])
                bias.copy_(bias[:, order])
    after = tables(model)
    heads = torch.cat((order, 3 + order))
    spaces = torch.cat([6 * role + heads for role in range(4)])
    for name, table in before.items():
        moved = spaces if name == "kernel" else heads
        table = table[moved] if name in ("OV", "QK", "copying") else table[moved][:, moved]
        assert error(after[name], table) < 1e-7, name


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_a_rotary_head_has_a_basis(position):
    """Queries and keys turned alike: nothing without rotary positions, another QK with them."""
    model = build(small("none", position=position, n_layer=1))
    before = qk(model, 0, 0).dense()
    with torch.no_grad():
        inward, _ = parts(model, 0)
        inward[:2] = turn(6) @ inward[:2]
    assert (error(qk(model, 0, 0).dense(), before) > 1e-3) == (position == "rotary")
