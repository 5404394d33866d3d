"""The compute floor is the products of a step, and all of them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.floors import compute_floor, compute_flops
from benchmarks.train import SHAPES, measure, model_of, our_step, their_step
from mainstem.errors import ConfigError
from models import build, small


def products(work):
    """Floating-point operations of the matrix products that work does."""
    with FlopCounterMode(display=False) as counter:
        work()
    every = counter.get_flop_counts()["Global"]
    return sum(count for op, count in every.items() if "mm" in str(op))


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"activation": "swiglu"}, {"d_mlp": 0}])
def test_it_does_what_a_step_does(changes):
    model = build(small(n_layer=2, n_head=2, **changes), torch.float32)
    ids = torch.zeros(3, 8, dtype=torch.long)
    floor = products(compute_floor(model, 3, 8))
    assert floor == compute_flops(model, 3, 8)
    assert floor == products(lambda: model(ids).sum().backward())


def test_a_step_learns():
    model, x, y = model_of("small")
    step, before = our_step(model, x, y), [p.clone() for p in model.parameters()]
    step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_the_peers_step_is_that_of_the_same_model():
    pytest.importorskip("transformers", reason="transformers is an optional peer")
    model, x, _ = model_of("small")
    their_step(model, x)()


def test_the_shapes_are_the_published_ones():
    assert SHAPES["andrea"] == (12, 12, 768, 256, 4, 8449)
    with pytest.raises(ConfigError, match="'small'"):
        model_of("smal")


@pytest.mark.slow
def test_the_figures_are_there(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", (1, 2, 16, 8, 2, 11))
    found = measure("small", rounds=1)
    assert found["step_over_floor"] > 0
    assert (found["step_over_transformers"] is None) == bool(found["notes"])
