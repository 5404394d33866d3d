"""One name means one tensor; other people's names are found; what is not there is said to be near something."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import ConfigError
from mainstem.stream.capture import capture
from mainstem.stream.points import answered, resolve, select
from models import build, configs, few, small, tokens

MODEL = build(small())


@pytest.mark.parametrize(
    ("key", "point"),
    [
        ("blocks.1.resid_pre", "blocks.1.resid_pre"),
        (("resid_post", 2), "blocks.2.resid_post"),
        (("resid_post", -1), "blocks.2.resid_post"),
        (("q", 1), "blocks.1.attn.q"),
        (("k", 1, "attn"), "blocks.1.attn.k"),
        (("attn.pattern", 0), "blocks.0.attn.pattern"),
        (("pattern", 0, "a"), "blocks.0.attn.pattern"),
        (("pre", 2, "mlp"), "blocks.2.mlp.pre"),
        (("post", 2), "blocks.2.mlp.post"),
        (("scale", 2, "ln1"), "blocks.2.res_1.ln_in.scale"),
        (("embed",), "embed"),
        ("k2", "blocks.2.attn.k"),
        ("scale1ln2", "blocks.1.res_2.ln_in.scale"),
        ("resid_mid0", "blocks.0.resid_mid"),
        ("hook_embed", "embed"),
        ("pos_embed.hook_out", "pos_embed"),
        ("blocks.1.hook_resid_mid", "blocks.1.resid_mid"),
        ("blocks.1.hook_in", "blocks.1.resid_pre"),
        ("blocks.1.hook_out", "blocks.1.resid_post"),
        ("blocks.1.hook_mlp_out", "blocks.1.mlp_out"),
        ("blocks.1.attn.hook_out", "blocks.1.attn_out"),
        ("blocks.1.attn.hook_z", "blocks.1.attn.z"),
        ("blocks.1.attn.hook_rot_q", "blocks.1.attn.q"),
        ("blocks.1.attn.hook_q", "blocks.1.attn.q"),
        ("blocks.1.attn.hook_pattern", "blocks.1.attn.pattern"),
        ("blocks.1.attn.hook_attn_scores", "blocks.1.attn.scores"),
        ("blocks.1.attn.hook_result", "blocks.1.attn.result"),
        ("blocks.1.mlp.hook_pre", "blocks.1.mlp.pre"),
        ("blocks.1.ln1.hook_scale", "blocks.1.res_1.ln_in.scale"),
        ("blocks.1.ln2.hook_normalized", "blocks.1.res_2.ln_in.normalized"),
        ("ln_final.hook_scale", "ln_f.scale"),
        ("ln_final.hook_normalized", "ln_f.normalized"),
    ],
)
def test_names_of_one_point(key, point):
    assert resolve(key, MODEL) == point


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("blocks.1.resid_pre_", ["'blocks.1.resid_pre'"]),
        (("resid_past", 1), ["'blocks.1.resid_post'"]),
        (("resid_post", 3), ["block 3", "the model has 3"]),
        (("resid_post", "3"), ["not a name"]),
        ("attn", ["not in this model"]),
        (("normalized", 0, "ln3"), ["not in this model"]),
        ("blocks.0.res_1.ln_add.scale", ["ln_in.scale"]),
        ("xyzzy", ["valid: embed", "blocks.{l}.attn_out"]),
    ],
)
def test_near_misses(key, words):
    with pytest.raises(ConfigError) as caught:
        resolve(key, MODEL)
    assert all(word in str(caught.value) for word in words)


def test_with_rotary_positions_their_q_is_not_ours():
    config = build(small(position="rotary"))
    assert resolve("blocks.0.attn.hook_rot_q", config) == "blocks.0.attn.q"
    with pytest.raises(ConfigError, match="before norm and rotation"):
        resolve("blocks.0.attn.hook_q", config)


@few
@given(configs())
def test_our_names_are_themselves_and_every_one_can_be_had(config):
    """Captured, or computed again from the stream that the block read: to the bit the same."""
    model = build(config)
    ids = tokens(config)
    whole, little = capture(model, ids, model.points()), capture(model, ids)
    for name in answered(model):
        assert resolve(name, model) == name
        assert torch.equal(whole[name], little[name])
        assert torch.isfinite(whole[name]).all() or name.endswith("scores")


@few
@given(configs(d_mlp=-1), st.permutations(("resid_post", "attn_out")))
def test_a_short_name_is_that_of_every_block(config, spec):
    model = build(config)
    found = select(spec, model)
    assert len(found) == 2 * config.n_layer
    assert found == [point for point in model.points() if point in found]


def test_patterns():
    assert select("*.attn_out", MODEL) == [f"blocks.{i}.attn_out" for i in range(3)]
    assert select(["blocks.0.resid_*", ("q", 1)], MODEL) == [
        "blocks.0.resid_pre", "blocks.0.resid_mid", "blocks.0.resid_post", "blocks.1.attn.q"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="matches nothing"):
        select("*.attn_in", MODEL)
    with pytest.raises(ConfigError, match="cannot be captured"):
        select([("attn_scores", 0)], MODEL)
