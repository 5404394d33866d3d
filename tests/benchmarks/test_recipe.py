"""The reference recipe is nanoGPT's, and its model is a GPT-2."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.reference import Model, Recipe, Reference
from mainstem.config import ModelConfig
from mainstem.model.gpt import GPT
from models import error

SMALL = Recipe(layers=2, heads=2, width=16, context=8, batch=4, iterations=40, warmup=4)
TOKENS = np.arange(400, dtype=np.uint16) % 7
NAMES = {".res_1.ln_in.": ".ln_1.", ".res_2.ln_in.": ".ln_2.", ".mlp.": "."}


def their_name(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def test_its_logits_are_those_of_our_model_with_the_same_weights():
    theirs = Model(SMALL, 11, seed=3)
    config = ModelConfig(vocab_size=11, n_ctx=8, n_layer=2, n_head=2, d_model=16, activation="gelu", bias=False)
    ours, weights = GPT(config), dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(weights.pop(their_name(name)).mul_(3))
    assert not weights
    ids = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    assert error(theirs(ids), ours(ids)) < 1e-5


def test_its_shape_is_the_published_one():
    model = Model(Recipe(), 65, seed=1)
    blocks = sum(weight.numel() for weight in model.blocks.parameters())
    assert blocks == 4 * (12 * 128**2 + 2 * 128)
    assert sum(weight.numel() for weight in model.parameters()) == blocks + (65 + 64 + 1) * 128
    assert model.blocks[0].c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[3].attn.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)


def test_its_rate_rises_and_falls_by_a_cosine():
    recipe = Recipe()
    rates = [recipe.rate(i) for i in range(recipe.iterations)]
    assert rates[0] == pytest.approx(1e-3 / 101)
    assert rates[100] == max(rates) == recipe.lr
    assert rates[1050] == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-4)
    assert rates[100:] == sorted(rates[100:], reverse=True)


def test_it_learns():
    side = Reference(replace(SMALL, lr=1e-2, min_lr=1e-3), TOKENS, 7, seed=1)
    x, y = torch.from_numpy(TOKENS[:64].astype(np.int64)).view(8, 8), torch.from_numpy(TOKENS[1:65].astype(np.int64))

    def loss():
        return torch.nn.functional.cross_entropy(side.model(x).flatten(0, 1), y).item()

    before = loss()
    assert before == pytest.approx(math.log(7), abs=0.1)
    for i in range(side.steps):
        side.step(i)
    assert loss() < before / 2


def test_its_windows_are_drawn_by_the_seed_and_followed_by_the_next_token():
    one, same, other = (Reference(SMALL, TOKENS, 7, seed).batch() for seed in (1, 1, 2))
    assert all(a.equal(b) for a, b in zip(one, same, strict=True))
    assert not one[0].equal(other[0])
    assert one[0].shape == one[1].shape == (4, 8)
    assert one[1].equal((one[0] + 1) % 7)


def test_matrices_decay_and_norms_do_not():
    groups = Reference(SMALL, TOKENS, 7, seed=1).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [{weight.ndim for weight in group["params"]} for group in groups] == [{2}, {1}]
