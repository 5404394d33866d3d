"""Overlap of subspaces: the kernel by projections, random moments, principal angles, and known answers."""

import math

import pytest
import torch
from hypothesis import given

from known import induction
from mainstem.circuits.head_weights import heads
from mainstem.circuits.overlap import overlap, random_moments, subspaces
from mainstem.errors import ConfigError
from models import build, configs, error, few, small


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@few
@given(configs())
def test_the_kernel_is_the_trace_of_two_projections(config):
    model = build(config)
    found, every = overlap(model), heads(model)
    matrices = [W for stack in (every.W_Q, every.W_K, every.W_V, every.W_O.mT) for W in stack]  # each (C, D)
    projections = [W @ torch.linalg.pinv(W, rtol=1e-8) for W in matrices]
    kernel = torch.stack([torch.stack([(P * Q).sum() for Q in projections]) for P in projections])
    assert found.kernel.shape == (4 * len(every.labels), 4 * len(every.labels))
    assert error(found.kernel, kernel) < 1e-8
    assert error(found.ranks.double(), torch.stack([P.trace() for P in projections])) < 1e-8
    assert error(found.kernel.diagonal(), found.ranks.double()) < 1e-10
    assert torch.equal(found.kernel, found.kernel.T)


def test_labels_and_rows_name_the_subspaces():
    found = overlap(build(small()))
    assert found.labels[:2] == ["L0H0.Q", "L0H1.Q"]
    for role in "QKVO":
        assert {label[-1] for label in found.labels[found.span(role)]} == {role}
    with pytest.raises(ConfigError, match="role: unknown value 'q'"):
        found.span("q")
    with pytest.raises(ConfigError, match=r"subspace: 'L0H0\.X' is not in this model; did you mean 'L0H0\.[QKVO]'"):
        found.angles("L0H0.X", "L0H0.O")


@pytest.mark.parametrize(("p", "q", "d"), [(3, 5, 12), (4, 4, 16), (1, 1, 3)])
def test_random_moments_are_those_of_random_subspaces(p, q, d):
    first, _ = subspaces(normal(20000, p, d))
    second, _ = subspaces(normal(20000, q, d, seed=1))
    kernel = (first @ second.mT).square().sum((1, 2))
    mean, variance = random_moments(p, q, d)
    assert kernel.mean().item() == pytest.approx(mean.item(), rel=0.02)
    assert kernel.var().item() == pytest.approx(variance.item(), rel=0.05)


def test_an_untrained_model_is_within_chance():
    """RMSNorm, so that all directions are alike; of different heads and roles."""
    found = overlap(build(small(norm="rmsnorm", d_model=64, n_head=4, init="width"), by=0.0))
    z = found.z[torch.ones_like(found.z).triu(1).bool()]
    assert abs(z.mean()) < 0.1
    assert 0.9 < z.std() < 1.1
    assert error(found.mean, torch.full_like(found.mean, 16 * 16 / 64)) < 1e-12
    assert error(found.chance, torch.full_like(found.mean, 16 / 64)) < 1e-12


def test_twins_overlap_wholly_and_strangers_not_at_all():
    model = build(small("none", bias=False))
    first, second = model.blocks[0].attn, model.blocks[1].attn
    with torch.no_grad():
        second.c_attn.weight.copy_(first.c_attn.weight * 3)
        second.c_proj.weight.copy_(first.c_proj.weight)
        basis = torch.linalg.qr(normal(12, 12)).Q
        queries, keys = first.c_attn.weight[:6], first.c_attn.weight[12:18]  # of L0H0
        queries.copy_(normal(6, 6) @ basis[:6])
        keys.copy_(normal(6, 6) @ basis[6:])
    found = overlap(model)
    at = {label: index for index, label in enumerate(found.labels)}
    assert found.share[at["L0H1.V"], at["L1H1.V"]].item() == pytest.approx(1)
    assert found.share[at["L0H1.O"], at["L1H1.O"]].item() == pytest.approx(1)
    assert found.angles("L0H1.V", "L1H1.V").max() < 1e-12
    assert found.kernel[at["L0H0.Q"], at["L0H0.K"]] < 1e-24
    assert error(found.angles("L0H0.Q", "L0H0.K"), torch.full((6,), math.pi / 2, dtype=torch.float64)) < 1e-12
    twins = [pair for pair in found.top(6) if pair.first[2:] == pair.second[2:]]  # but q and k of L0H0, changed after
    assert [pair.share for pair in twins] == [pytest.approx(1)] * 6
    assert found.top(1)[0].z == found.z.triu(1).max()


def test_principal_angles_are_exact_near_both_ends():
    """A plane that is turned by a known angle; also 1e-9, whose cosine is 1 in float64."""
    for angle in (1e-9, 0.3, 1.2, math.pi / 2 - 1e-9):
        rows = torch.zeros(2, 2, 12, dtype=torch.float64)
        rows[0, 0, 0] = rows[0, 1, 1] = 1
        rows[1, 0, 0] = 1
        rows[1, 1, 1], rows[1, 1, 2] = math.cos(angle), math.sin(angle)
        model = build(small("none", bias=False, d_head=2))
        with torch.no_grad():
            model.blocks[0].attn.c_attn.weight[:2] = normal(2, 2) @ rows[0]  # queries of L0H0
            model.blocks[0].attn.c_attn.weight[4:6] = normal(2, 2) @ rows[1]  # its keys
        found = overlap(model)
        angles = found.angles("L0H0.Q", "L0H0.K")
        assert angles[0] < 1e-14
        assert angles[1].item() == pytest.approx(angle, rel=1e-6)
        assert error(found.angles("L0H0.K", "L0H0.Q"), angles) < 1e-12


def test_ranks_do_not_depend_on_the_dtype():
    """A head of rank 2 in float32 has rounding in its other directions; in float64 it still has rank 2."""
    model = build(small("none", bias=False), torch.float32)
    with torch.no_grad():
        narrow = normal(6, 2).float() @ normal(2, 12, seed=1).float()
        model.blocks[0].attn.c_attn.weight[:6] = narrow
        model.blocks[1].attn.c_attn.weight[:6] = 0
    single, double = overlap(model), overlap(model.double())
    assert torch.equal(single.ranks, double.ranks)
    at = {label: single.ranks[index].item() for index, label in enumerate(single.labels)}
    assert (at["L0H0.Q"], at["L1H0.Q"], at["L0H1.Q"]) == (2, 0, 6)
    assert error(single.kernel, double.kernel) < 1e-5
    empty = double.labels.index("L1H0.Q")
    assert double.share[empty].isnan().all()
    assert double.z[empty].isnan().all()
    assert double.chance[empty].isnan().all()
    assert len(double.angles("L0H0.Q", "L0H1.Q")) == 2
    assert len(double.angles("L0H0.Q", "L1H0.Q")) == 0
    assert not any("L1H0.Q" in pair for pair in double.top(10000))


def test_the_induction_model():
    """V directions are written by the first head and read by the second one's keys alone."""
    found = overlap(induction(V=7))
    at = {label: index for index, label in enumerate(found.labels)}
    assert found.kernel[at["L0H0.O"], at["L1H0.K"]].item() == pytest.approx(7)
    assert found.share[at["L0H0.O"], at["L1H0.K"]].item() == pytest.approx(1)
    assert found.angles("L0H0.O", "L1H0.K").max() < 1e-12
    assert found.kernel[at["L0H0.O"], at["L1H0.Q"]] == found.kernel[at["L0H0.O"], at["L1H0.V"]] == 0
    assert found.chance[at["L0H0.O"], at["L1H0.Q"]].item() == pytest.approx(7 / found.width)  # where they share nothing
