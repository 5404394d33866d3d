"""Composition scores: the dense formula, chance, the limit that spectra set, and known answers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.linalg import matrix_norm

from known import eraser, induction
from mainstem.circuits import chunks
from mainstem.circuits.composition import MODES, composition, random_scores
from mainstem.circuits.head_weights import ov, qk
from mainstem.circuits.weights import centred
from mainstem.errors import ConfigError
from models import UNCUT, build, configs, error, few, normal, small

ROWS = tuple(row for row in UNCUT if row != "mix")


def dense_score(model, writes, reads, mode, centre):
    """|OV_1 X| / (|OV_1| |X|), by the (C, C) matrices."""

    def written(index, head):
        product = ov(model, index, head).dense()
        return centred(product) if centre else product

    first = written(*writes)
    second = {"Q": qk(model, *reads).dense(), "K": qk(model, *reads).dense().T, "V": written(*reads)}[mode]
    limit = (torch.linalg.svdvals(first).square() * torch.linalg.svdvals(second).square()).sum().sqrt()
    norms = matrix_norm(first) * matrix_norm(second)
    return matrix_norm(first @ second) / norms, limit / norms


@few
@given(st.data(), st.sampled_from(ROWS), st.sampled_from((1, 500, 1 << 22)))
def test_scores_and_limits_are_the_dense_ones(data, residual, chunk):
    model = build(data.draw(configs(residual=residual, n_layer=3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", chunk)
        found = composition(model)
    H, centre = model.config.n_head, found.width < model.config.d_model
    for writes in range(3 * H):
        for reads in range(3 * H):
            for mode in MODES:
                score = found.scores[mode][writes, reads]
                if writes // H >= reads // H:
                    assert score.isnan()
                    continue
                dense, limit = dense_score(model, divmod(writes, H), divmod(reads, H), mode, centre)
                assert error(score, dense) < 1e-10
                assert error(found.limits[mode][writes, reads], limit) < 1e-10
                assert found.rank_corrected[mode][writes, reads] <= 1 + 1e-10


@pytest.mark.parametrize(("width", "d_head", "count"), [(64, 16, 16), (128, 32, 12), (256, 32, 8), (768, 64, 4)])
def test_random_heads_score_one_over_the_root_of_the_width(width, d_head, count):
    """And not sqrt(h) / d, which the norm of the factors in turn, |W_K^T OV W_Q|, would give."""
    scores = random_scores(width, d_head, count=count)
    assert scores.mean().item() == pytest.approx(width**-0.5, rel=0.05)

    generator = torch.Generator().manual_seed(0)
    W_Q, W_K, W_V, W_O = torch.randn(4, 20, width, d_head, generator=generator, dtype=torch.float64)
    cyclic = matrix_norm((W_K.mT @ W_V) @ (W_O.mT @ W_Q))
    norms = matrix_norm(W_V @ W_O.mT) * matrix_norm(W_Q @ W_K.mT)
    assert (cyclic / norms).mean().item() == pytest.approx(math.sqrt(d_head) / width, rel=0.05)


@pytest.mark.parametrize(("norm", "width"), [("layernorm", 63), ("rmsnorm", 64)])
def test_an_untrained_model_is_within_chance(norm, width):
    found = composition(build(small(norm=norm, d_model=64, n_head=8, n_layer=3, init="width"), by=0.0))
    assert found.chance == width**-0.5
    assert found.mean == pytest.approx(found.chance, rel=0.05)
    z = torch.stack([found.z[mode] for mode in MODES])
    z = z[~z.isnan()]
    assert len(z) == 3 * 3 * 64  # three modes, three pairs of blocks
    assert abs(z.mean()) < 0.3
    assert 0.7 < z.std() < 1.4


def test_the_random_heads_follow_from_the_seed():
    model = build(small())
    assert composition(model, seed=3).mean == composition(model, seed=3).mean != composition(model, seed=4).mean


def test_a_perfect_match_is_one():
    """Two orthonormal heads, the second reading just what the first writes: 1 / sqrt(D), all that rank D allows."""
    model = build(small("none", bias=False))
    basis = torch.linalg.qr(normal(12, 12)).Q[:6]
    with torch.no_grad():
        for block in model.blocks:
            for view in block.attn.c_attn.weight.chunk(6):  # two heads of q, k and v
                view.copy_(basis)
            for view in block.attn.c_proj.weight.chunk(2, dim=1):
                view.copy_(basis.T)
    found = composition(model)
    for mode in MODES:
        scores, corrected = found.scores[mode][:2, 2:], found.rank_corrected[mode][:2, 2:]
        assert error(scores, torch.full((2, 4), 6**-0.5, dtype=torch.float64)) < 1e-10
        assert error(corrected, torch.ones(2, 4)) < 1e-10


def test_the_induction_model():
    found = composition(induction(V=7))
    assert found.scores["K"][0, 1].item() == pytest.approx(7**-0.5, abs=1e-14)
    assert found.scores["Q"][0, 1] == found.scores["V"][0, 1] == 0
    assert found.rank_corrected["K"][0, 1].item() == pytest.approx(1)
    assert found.top(1)[0][:3] == ("L0H0", "L1H0", "K")
    assert composition(eraser()).top(1)[0].mode == "V"


def test_the_top_is_sorted_and_holds_every_path_once():
    found = composition(build(small()))
    pairs = found.top(1000)
    assert len(pairs) == 3 * 3 * 4 == len({pair[:3] for pair in pairs})
    assert [pair.score for pair in pairs] == sorted((pair.score for pair in pairs), reverse=True)
    first = pairs[0]
    at = found.labels.index(first.writes), found.labels.index(first.reads)
    assert first[3:] == tuple(t[first.mode][at].item() for t in (found.scores, found.z, found.rank_corrected))
    assert {pair.mode for pair in found.top(5, modes="K")} == {"K"}
    for modes in ("KX", "k", ""):
        with pytest.raises(ConfigError, match=f"modes: '{modes}' is not possible; give some of Q, K and V"):
            found.top(modes=modes)


def test_a_head_that_writes_nothing_has_no_score():
    """Rezero before its first step."""
    model = build(small("rezero"), by=0.0)
    found = composition(model)
    assert all(scores.isnan().all() for scores in found.scores.values())
    assert found.top() == []
    with torch.no_grad():
        model.blocks[0].res_1.gain.weight.fill_(1)
    pairs = composition(model).top(100)  # block 0 writes, and the queries and keys of later blocks read
    assert {(pair.writes[:2], pair.mode) for pair in pairs} == {("L0", "Q"), ("L0", "K")}
    assert all(pair.rank_corrected > 0 for pair in pairs)


@pytest.mark.parametrize(
    ("residual", "changes", "reason"),
    [
        ("post", {}, r"blocks\.0\.res_1\.ln_add, a norm over the stream itself"),
        ("deepnorm", {}, r"blocks\.0\.res_1\.ln_add"),
        ("no_skip", {}, r"L0H0 -> L1H0\.V: no virtual weights, for blocks\.0\.res_2\.skip is 0"),
        ("pre", {"n_layer": 1}, "a model of one block has no composition"),
        ("pre", {"n_layer": 0}, "has no heads"),
    ],
)
def test_without_any_path_the_reason_is_said(residual, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        composition(build(small(residual, **changes)))


@pytest.mark.parametrize(
    ("residual", "changes", "paths"),
    [("mix", {"n_layer": 4}, {(1, 2), (1, 3), (2, 3)}), ("no_skip", {"d_mlp": 0}, {(0, 1), (1, 2)})],
)
def test_some_paths_may_be_missing(residual, changes, paths):
    """mix: the first block of four is post. Without MLPs and skips, a block reads the one before it."""
    model = build(small(residual, **changes))
    found, depth = composition(model), len(model.blocks)
    assert {(i, j) for i in range(depth) for j in range(i + 1, depth)} - paths == found.reasons.keys()
    assert len(found.notes) == len(set(found.reasons.values()))  # one line a cause
    for cause in found.reasons.values():
        many = list(found.reasons.values()).count(cause)
        assert f"{many} of {depth * (depth - 1) // 2} pairs of blocks lack a path, for {cause}" in found.notes
    blocks = found.scores["V"].unflatten(0, (depth, 2)).unflatten(2, (depth, 2)).transpose(1, 2)
    for i in range(depth):
        for j in range(depth):
            assert bool(blocks[i, j].isnan().any()) == bool(blocks[i, j].isnan().all()) == ((i, j) not in paths)


def test_rotary_scores_depend_on_the_offset_and_others_have_none():
    rotary = build(small(position="rotary"))
    near, far = composition(rotary), composition(rotary, offset=5)
    assert error(near.scores["Q"][:2, 2:], far.scores["Q"][:2, 2:]) > 1e-3
    assert error(near.scores["V"][:2, 2:], far.scores["V"][:2, 2:]) == 0
    assert torch.equal(near.scores["K"].nan_to_num(), composition(rotary, offset=1).scores["K"].nan_to_num())
    assert (near.offset, far.offset, composition(build(small())).offset) == (1, 5, None)
    assert [note[:14] for note in far.notes] == ["QK at offset 5"]
    with pytest.raises(ConfigError, match="offset: 1 is not supported"):
        composition(build(small()), offset=1)


def test_what_qk_norm_leaves_open_is_said():
    assert composition(build(small())).notes == ()
    (note,) = composition(build(small(qk_norm=True))).notes
    assert note.startswith("QK: direction only")
