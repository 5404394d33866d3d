"""Law 7, below generation: reading with a cache is reading without one, and a padded row is a row alone."""

import pytest
import torch

from mainstem.errors import ConfigError
from mainstem.generation.cache import KVCache
from mainstem.model.tap import Recorder
from models import normal

VARIANTS = {
    "pre-tied": {"tie_embeddings": True},
    "post-rotary": {"residual": "post", "position": "rotary"},
    "sandwich-rmsnorm-nowhere": {"residual": "sandwich", "norm": "rmsnorm", "position": "none"},
    "deepnorm-head-bias": {"residual": "deepnorm", "lm_head_bias": True},
    "rezero-rotary-rmsnorm": {"residual": "rezero", "norm": "rmsnorm", "position": "rotary"},
    "mix-swiglu": {"residual": "mix", "activation": "swiglu", "bias": False},
    "no_skip": {"residual": "no_skip"},
    "qk_norm-rotary": {"qk_norm": True, "position": "rotary", "d_head": 6},
    "attention-only": {"d_mlp": 0, "position": "none"},
    "one-head-scaled": {"n_head": 1, "attn_scale": 0.7},
    "zero-layer": {"n_layer": 0},
}
VARIANT = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
PRECISION = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])


def close(a, b, tolerance):
    assert a.shape == b.shape
    return (a - b).norm() <= tolerance * b.norm()


def some_ids(rows, length, vocab=97):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(3))


@VARIANT
@PRECISION
@torch.no_grad()
def test_token_by_token_is_the_full_forward(lively, fields, dtype, tolerance):
    model = lively(dtype, **fields)
    ids = some_ids(2, 12)  # (B, n_ctx)
    full = model(ids)  # (B, T, V)
    cache = KVCache(model.config, 2, dtype)
    steps = [model(part, cache=cache) for part in ids.split([5, 1, 1, 3, 1, 1], dim=1)]
    assert cache.length == 12
    assert close(torch.cat(steps, 1), full, tolerance)
    assert torch.equal(torch.cat(steps, 1).argmax(-1), full.argmax(-1))
    assert not close(full[:, :1].expand_as(full), full, 0.05)  # a model that says one thing would agree too


@VARIANT
@torch.no_grad()
def test_left_padded_rows_are_rows_alone(lively, fields):
    """Logits and every capture of lengths 1, 7 and 31, at the prefill and at two cached steps."""
    model = lively(**fields | {"n_ctx": 33})
    lengths = (1, 7, 31)
    ids = some_ids(3, 33)  # each row's own ids stand at its right
    mask = torch.arange(33) >= 31 - torch.tensor(lengths)[:, None]
    cache, recorders = KVCache(model.config, 3, torch.float64), []
    for first, last in ((0, 31), (31, 32), (32, 33)):
        recorders.append(Recorder([*model.points()]))
        logits = model(ids[:, first:last], mask=mask[:, :last], cache=cache, tap=recorders[-1])
        for row, length in enumerate(lengths):
            alone = Recorder(model.points())
            wanted = model(ids[row : row + 1, 31 - length : last], tap=alone)
            read = min(length, last - first)  # positions of this row in this call
            assert close(logits[row, -read:], wanted[0, -read:], 1e-10)
            assert alone.values.keys() == recorders[-1].values.keys()
            for point, value in alone.values.items():
                batched = recorders[-1].values[point][row]
                if point.endswith("pattern"):  # (H, T query, T key)
                    seen = value.shape[-1]
                    assert close(batched[:, -read:, -seen:], value[0, :, -read:], 1e-10), point
                    assert (batched[:, -read:, :-seen] == 0).all(), point
                else:
                    assert close(batched[-read:], value[0, -read:], 1e-10), point


def test_nothing_is_copied_or_allocated_after_the_start(lively):
    model = lively()
    cache = KVCache(model.config, 1, torch.float64)
    whole = cache[1].keys.data_ptr()
    for step in (1, 2, 3):
        k = step * normal(1, 2, 2, 8)
        keys, values = cache[1].append(k, k + 1)
        cache.advance(2)
        assert keys.data_ptr() == whole
        assert torch.equal(keys[:, :, -2:], k)
        assert torch.equal(values[:, :, -2:], k + 1)
    assert keys.shape == (1, 2, 6, 8)
    assert not torch.equal(cache[0].keys, cache[1].keys)


def test_a_cache_can_be_cleared_for_fewer_rows(lively):
    model = lively()
    cache = KVCache(model.config, 3, torch.float64)
    ids = some_ids(3, 9)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.clear(2)
        assert cache.length == 0
        assert close(model(ids[1:], cache=cache), model(ids[1:]), 1e-10)


def test_a_full_cache_says_so(lively):
    model = lively()
    cache = KVCache(model.config, 1, torch.float64, size=4)
    with torch.no_grad():
        model(some_ids(1, 4), cache=cache)
    with pytest.raises(ConfigError, match="5 positions do not fit a cache of 4"):
        cache.advance(1)
