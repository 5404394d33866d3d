"""The parts of an attention branch's weights by head, and its scale."""

import pytest
import torch
from hypothesis import given

from mainstem.model.attention import Attention
from models import build, configs, error, few, normal, small, stir, tokens


def attention(**changes):
    attn = Attention(small(d_head=5, **changes))
    stir(attn)
    return attn


@torch.no_grad()
def test_the_output_by_head_is_the_projection():
    attn, z = attention(), normal(3, 2, 5)
    assert attn.W_O.shape == (2, 5, 12)
    by_head = sum(z[:, head] @ attn.W_O[head] for head in range(2))
    assert error(by_head + attn.c_proj.bias, attn.c_proj(z.flatten(1))) < 1e-12


@torch.no_grad()
def test_the_values_bias_is_the_values_of_nothing():
    attn = attention()
    values = attn.c_attn(torch.zeros(12).double()).unflatten(0, (3, 2, 5))[2]
    assert torch.equal(attn.b_V, values)
    assert values.abs().min() > 0
    assert attention(bias=False).b_V is None


@torch.no_grad()
def test_the_projections_by_head_are_what_qkv_computes():
    """q, k, v of every head are x @ W + b, by the views that the field names."""
    attn, x = attention(), normal(3, 4, 12)
    for role, computed in zip("QKV", attn.qkv(x), strict=True):
        W, b = getattr(attn, f"W_{role}"), getattr(attn, f"b_{role}")
        assert W.shape == (2, 12, 5)
        assert error(torch.einsum("btc,hcd->bthd", x, W) + b, computed) < 1e-12
    assert attention(bias=False).b_Q is None


@pytest.mark.parametrize("part", ["W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"])
def test_they_are_views(part):
    """No copy is made of weights that may be large."""
    attn = attention()
    whole = attn.c_proj.weight if part == "W_O" else attn.c_attn.weight if part[0] == "W" else attn.c_attn.bias
    assert getattr(attn, part).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_muons_matrices_are_the_projections():
    """q, k and v are matrices of their own, whose rows lie one above the other."""
    attn = attention()
    assert sum(attn.rows) == len(attn.c_attn.weight)
    q, k, v = attn.c_attn.weight.split(attn.rows)
    for rows, W in ((q, attn.W_Q), (k, attn.W_K), (v, attn.W_V)):
        assert torch.equal(rows.unflatten(0, (2, 5)).mT, W)


def test_a_blocks_scale_is_that_of_the_place_it_was_built_for():
    model, plain = build(small(attn_scale=0.6, attn_scale_by_depth=True)), build(small(attn_scale=0.6))
    ids = tokens(model.config)
    assert error(plain(ids), model(ids)) > 1e-3
    assert [block.attn.scale for block in model.blocks] == [0.6, 0.6 / 2, 0.6 / 3]
    del model.blocks[0]
    assert [block.attn.scale for block in model.blocks] == [0.6 / 2, 0.6 / 3]
    assert [block.attn.scale for block in plain.blocks] == [0.6] * 3


@few
@given(configs(attn_scale_by_depth=True, n_layer=3, qk_norm=False))
@torch.no_grad()
def test_scaling_by_depth_is_queries_that_are_as_many_times_shorter(config):
    model, plain = build(config), build(config.replace(attn_scale_by_depth=False))
    for index, block in enumerate(plain.blocks):
        for part in block.attn.c_attn.parameters():
            part.chunk(3)[0].div_(index + 1)
    ids = tokens(config)
    assert error(plain(ids), model(ids)) < 1e-12
