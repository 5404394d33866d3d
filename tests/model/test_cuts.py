"""Laws 4 and 5: silencing a block, dropping it, and inserting one that says nothing."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import ROWS, UNCUT, Change, build, configs, error, few, small, tokens


def silenced(model, ids, index):
    """Logits with both writes of one block put to zero."""
    points = [f"blocks.{index}.attn_out", f"blocks.{index}.mlp_out"][: 2 if model.config.d_mlp else 1]
    return model(ids, tap=Change(dict.fromkeys(points, torch.zeros_like)))


def without(model, *indices):
    """A copy without some blocks; the others keep the constants that they were built with."""
    cut = copy.deepcopy(model)
    for index in sorted(indices, reverse=True):
        del cut.blocks[index]
    return cut


def says_nothing(block):
    """A copy of a block whose writes are zero: c_proj, or where a norm follows it, that norm's gain and bias."""
    block = copy.deepcopy(block)
    for join, branch in (("res_1", "attn"), ("res_2", "mlp")):
        if hasattr(block, join):
            ln_out = getattr(block, join).ln_out
            last = ln_out if list(ln_out.parameters()) else getattr(block, branch).c_proj
            for parameter in last.parameters():
                torch.nn.init.zeros_(parameter)
    return block


@few
@given(st.data())
@pytest.mark.parametrize("residual", UNCUT)
def test_silencing_a_block_is_dropping_it(residual, data):
    """Law 4, to the bit, where skip is 1 and no norm follows the addition."""
    model = build(data.draw(configs(residual=residual)))
    ids = tokens(model.config)
    first = 1 if residual == "mix" else 0  # of 3 blocks or fewer, mix has one in post-norm
    for index in range(first, model.config.n_layer):
        assert torch.equal(silenced(model, ids, index), without(model, index)(ids))


@pytest.mark.parametrize("residual", [*(row for row in ROWS if row not in UNCUT), "mix"])
def test_elsewhere_they_are_two_different_cuts(residual):
    """Law 4's other half: a norm over the sum still acts, a stream that is not kept is lost."""
    model = build(small(residual))
    ids = tokens(model.config)
    assert error(silenced(model, ids, 0), without(model, 0)(ids)) > 1e-3


@few
@given(configs())
def test_no_blocks_leave_embedding_and_unembedding(config):
    """Law 5: drop(all) = lm_head(ln_f(wte + wpe))."""
    model = build(config)
    ids = tokens(config)
    x = model.wte(ids) if model.wpe is None else model.wte(ids) + model.wpe.weight[: ids.shape[1]]
    assert torch.equal(without(model, *range(config.n_layer))(ids), model.lm_head(model.ln_f(x)))


@few
@given(st.data(), st.integers(0, 3))
@pytest.mark.parametrize("residual", UNCUT)
def test_a_block_that_says_nothing_is_the_identity(residual, data, place):
    """Law 5: inserted anywhere, it leaves the logits as they were, to the bit."""
    model = build(data.draw(configs(residual=residual, n_layer=3)))
    ids, grown = tokens(model.config), copy.deepcopy(model)
    grown.blocks.insert(place, says_nothing(model.blocks[2]))
    assert torch.equal(grown(ids), model(ids))


@pytest.mark.parametrize("residual", ["post", "deepnorm", "no_skip", "no_skip_bare"])
def test_elsewhere_a_silent_block_is_not_the_identity(residual):
    model = build(small(residual))
    ids, grown = tokens(model.config), copy.deepcopy(model)
    grown.blocks.insert(1, says_nothing(model.blocks[2]))
    assert error(grown(ids), model(ids)) > 1e-3
