"""Law 11: the weights that a model starts from have the standard deviations of their rows' sources."""

import math

import pytest
import torch

from mainstem.config import INITS
from mainstem.model.gpt import GPT
from models import ROWS, small

C, M, L = 96, 384, 5
LARGE = {"n_layer": L, "n_head": 4, "d_model": C, "vocab_size": 512, "n_ctx": 128, "bias": True}


def std(weight):
    return weight.std().item()


def base(init, fan_in, fan_out):
    return {"gpt2": 0.02, "xavier": math.sqrt(2 / (fan_in + fan_out)), "width": 1 / math.sqrt(C)}[init]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("residual", ROWS)
def test_standard_deviations_are_the_formulas(residual, init):
    """q and k plain; v and both MLP matrices with DeepNorm's beta; output projections with GPT-2's 1/sqrt(2 L) under
    `gpt2`, which DeepNorm and LayerNorm Scaling leave out.
    """
    model = GPT(small(residual, init=init, **LARGE))
    beta = (8 * L) ** -0.25 if residual == "deepnorm" else 1
    scaled = init == "gpt2" and residual not in ("deepnorm", "lns")
    out = beta / math.sqrt(2 * L) if scaled else beta
    for block in model.blocks:
        q, k, v = block.attn.c_attn.weight.split(C)
        assert std(q) == pytest.approx(base(init, C, C), rel=0.05)
        assert std(k) == pytest.approx(base(init, C, C), rel=0.05)
        assert std(v) == pytest.approx(beta * base(init, C, C), rel=0.05)
        assert std(block.attn.c_proj.weight) == pytest.approx(out * base(init, C, C), rel=0.05)
        assert std(block.mlp.c_fc.weight) == pytest.approx(beta * base(init, C, M), rel=0.05)
        assert std(block.mlp.c_proj.weight) == pytest.approx(out * base(init, M, C), rel=0.05)
    embedding = 0.02 if init == "gpt2" else 1 / math.sqrt(C)
    assert std(model.wte.weight) == pytest.approx(embedding, rel=0.05)
    assert std(model.wpe.weight) == pytest.approx(embedding, rel=0.05)


def test_auto_is_what_the_source_uses():
    for residual in ROWS:
        init = "xavier" if residual in ("post", "deepnorm") else "gpt2"
        auto, named = GPT(small(residual)), GPT(small(residual, init=init))
        assert torch.equal(auto.blocks[1].mlp.c_proj.weight, named.blocks[1].mlp.c_proj.weight)


def test_both_halves_of_a_gated_mlp_have_their_own_fans():
    weight = GPT(small("post", activation="swiglu", d_mlp=M, **LARGE)).blocks[0].mlp.c_fc.weight
    for half in weight.chunk(2):
        assert std(half) == pytest.approx(base("xavier", C, M), rel=0.05)


def test_an_untied_head_is_a_matrix_of_its_own():
    model = GPT(small(init="xavier", tie_embeddings=False, **LARGE))
    assert std(model.lm_head.weight) == pytest.approx(base("xavier", C, 512), rel=0.05)


@pytest.mark.parametrize("residual", ROWS)
def test_biases_start_at_0_norms_at_1_gains_at_their_rows_value(residual):
    gains = {"rezero": 0.0, "layerscale": 0.1}
    for name, parameter in GPT(small(residual, lm_head_bias=True, qk_norm=True)).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif name.endswith("gain.weight"):
            assert torch.equal(parameter, torch.full_like(parameter, gains[residual])), name
        elif parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_weights_follow_from_the_seed_alone():
    """Neither from the caller's random state, nor do they move it."""
    state = torch.random.get_rng_state()
    one = GPT(small(), seed=4).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(12)
    same, other = GPT(small(), seed=4).state_dict(), GPT(small(), seed=5).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["wte.weight"], other["wte.weight"])
    torch.random.set_rng_state(state)


def parts(model):
    """Every weight that is drawn, by name; q, k and v apart, and the halves of a gated c_fc."""
    found = {}
    for name, weight in model.named_parameters():
        sizes = None
        if name.endswith("c_attn.weight"):
            sizes = dict(zip("qkv", weight.chunk(3), strict=True))
        found |= {f"{name}.{part}": rows for part, rows in sizes.items()} if sizes else {name: weight}
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 30}, {"d_mlp": 20}, {"activation": "swiglu", "d_mlp": 48}, {"position": "rotary"},
        {"residual": "sandwich"}, {"residual": "reordered"}, {"tie_embeddings": False}, {"bias": False},
        {"n_ctx": 20}, {"qk_norm": True}, {"norm": "rmsnorm"},
    ],
    ids=str,
)  # fmt: skip
def test_two_models_that_differ_in_one_part_start_equal_in_all_others(change):
    one, other = parts(GPT(small())), parts(GPT(small(**change)))
    shared = [name for name in one.keys() & other.keys() if one[name].shape == other[name].shape]
    assert len(shared) > 5
    assert all(torch.equal(one[name], other[name]) for name in shared)


def test_blocks_start_alike_in_a_deeper_model():
    """The same draws, by the scale that the depth asks for."""
    shallow, deep = parts(GPT(small(n_layer=2))), parts(GPT(small(n_layer=8)))
    for name, weight in shallow.items():
        scale = 2.0 if name.endswith("c_proj.weight") else 1.0  # 1 / sqrt(2 L)
        torch.testing.assert_close(deep[name] * scale, weight)


def test_every_weight_has_draws_of_its_own():
    flat = [weight.flatten()[:50] for weight in parts(GPT(small(tie_embeddings=False))).values() if weight.dim() == 2]
    unit = torch.stack([row / row.norm() for row in flat])
    assert (unit @ unit.T - torch.eye(len(unit))).abs().max() < 0.7


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("residual", ROWS)
def test_a_model_made_of_shapes_alone_is_filled_later(residual, tied):
    """On the meta device, then `to_empty`, then `init_weights`: the bytes of the ordinary way, the tie intact."""
    config = small(residual, tie_embeddings=tied, lm_head_bias=True, qk_norm=True)
    plain = GPT(config, seed=3)
    with torch.device("meta"):
        model = GPT(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.fill_(float("nan"))
    model.init_weights(3)
    assert (model.lm_head.weight is model.wte.weight) == tied
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_tie_survives_conversions():
    model = GPT(small())
    for converted in (model.double(), model.to("meta"), model.to_empty(device="cpu")):
        assert converted.lm_head.weight is converted.wte.weight


def test_a_rezero_gain_is_shared_by_a_blocks_two_joins_and_a_layerscale_gain_is_not():
    for residual, shared in (("rezero", True), ("layerscale", False)):
        block = GPT(small(residual)).blocks[0]
        assert (block.res_1.gain.weight is block.res_2.gain.weight) == shared


def test_a_rezero_model_starts_as_no_blocks_at_all():
    model, ids = GPT(small("rezero")), torch.arange(7)[None]
    assert torch.equal(model.stream(ids), model.wte(ids) + model.wpe.weight[:7])
