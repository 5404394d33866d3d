"""The parts of an attention branch's weights by head."""

import pytest
import torch

from mainstem.model.attention import Attention
from models import error, normal, small, stir


def attention(**changes):
    attn = Attention(small(d_head=5, **changes))
    stir(attn)
    return attn


@torch.no_grad()
def test_the_output_by_head_is_the_projection():
    attn, z = attention(), normal(3, 2, 5)
    assert attn.output.shape == (2, 5, 12)
    by_head = sum(z[:, head] @ attn.output[head] for head in range(2))
    assert error(by_head + attn.c_proj.bias, attn.c_proj(z.flatten(1))) < 1e-12


@torch.no_grad()
def test_the_values_bias_is_the_values_of_nothing():
    attn = attention()
    values = attn.c_attn(torch.zeros(12).double()).unflatten(0, (3, 2, 5))[2]
    assert torch.equal(attn.value_bias, values)
    assert values.abs().min() > 0
    assert attention(bias=False).value_bias is None


@pytest.mark.parametrize("part", ["output", "value_bias"])
def test_they_are_views(part):
    """No copy is made of weights that may be large."""
    attn = attention()
    whole = attn.c_proj.weight if part == "output" else attn.c_attn.bias
    assert getattr(attn, part).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
