"""Interventions: every name of a target, every change, and what may not be changed; also while a model generates."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import ConfigError
from mainstem.generation.cache import KVCache
from mainstem.generation.decoding import generate_ids
from mainstem.stream.capture import capture
from mainstem.stream.change.intervene import At, Copies, Intervention, add, locate, mean, resample, set_to, zero
from mainstem.stream.change.steering import steering_vector
from mainstem.text.tokenizer import Bytes
from models import UNCUT, B, Change, T, build, configs, error, few, normal, record, small, tokens

GREEDY = {"temperature": 0, "max_new_tokens": 6}


def zeroed(*where):
    """A function that puts zeros in one part of a tensor."""

    def change(x):
        x = x.clone()
        x[where] = 0
        return x

    return change


EVERY = slice(None)
PARTS = [
    (("attn_out", 2), "blocks.2.attn_out", ()),
    ("blocks.2.hook_resid_pre", "blocks.2.resid_pre", ()),
    ("1_mlp_out", "blocks.1.mlp_out", ()),
    ("L1H1", "blocks.1.attn.z", (EVERY, EVERY, 1)),
    ("L1H0.q", "blocks.1.attn.q", (EVERY, EVERY, 0)),
    ("L2H1.pattern", "blocks.2.attn.pattern", (EVERY, 1)),
    ("L2N17", "blocks.2.mlp.post", (EVERY, EVERY, 17)),
    (At("resid_mid1", pos=3), "blocks.1.resid_mid", (EVERY, 3)),
    (At("embed", pos=[1, -1]), "embed", (EVERY, [1, 6])),
    (At(("z", 0), pos=range(2, 5), units=1), "blocks.0.attn.z", (EVERY, slice(2, 5), 1)),
    (At("L0H1", pos=-2), "blocks.0.attn.z", (EVERY, 5, 1)),
    (At(("pattern", 0), pos=4, units=[1]), "blocks.0.attn.pattern", (EVERY, [1], 4)),
    (At(("post", 1, "mlp"), units=(0, 5)), "blocks.1.mlp.post", (EVERY, EVERY, [0, 5])),
]


@pytest.mark.parametrize(("target", "point", "where"), PARTS)
def test_a_target_is_a_part_of_a_point(target, point, where):
    model = build(small())
    ids = tokens(model.config)
    changed = model(ids, tap=Intervention(model, {target: zero()}))
    assert torch.equal(changed, model(ids, tap=Change({point: zeroed(*where)})))
    assert not torch.equal(changed, model(ids))


def test_positions_and_heads_of_a_part_are_all_their_pairs():
    model = build(small(n_head=3))
    x = normal(B, T, 3, 4)
    spot = locate(At(("k", 0), pos=[0, 2, 5], units=[0, 2]), model)
    changed = spot.changed(x, zero())
    expected = x.clone()
    for pos in (0, 2, 5):
        expected[:, pos, [0, 2]] = 0
    assert torch.equal(changed, expected)
    assert torch.equal(spot.part(x), x[:, [0, 2, 5]][:, :, [0, 2]])
    assert torch.equal(x, normal(B, T, 3, 4))  # itself it stays as it is


@few
@given(configs())
def test_to_change_nothing_is_the_identity(config):
    """To the bit: without changes, and with what was there already, at every point that can be changed."""
    model = build(config)
    ids = tokens(config)
    assert torch.equal(model(ids, tap=Intervention(model, {})), model(ids))
    points = [p for p in model.points() if not p.endswith((".mean", ".scale", ".pattern"))]
    same = Intervention(model, {point: resample(capture(model, ids, points)) for point in points})
    assert torch.equal(model(ids, tap=same), model(ids))


@few
@given(st.data())
@pytest.mark.parametrize("residual", UNCUT)
def test_a_block_that_writes_nothing_passes_the_stream_on(residual, data):
    """Law 4, to the bit; of `mix`, in its last block."""
    model = build(data.draw(configs(residual=residual, n_layer=2)))
    ids, block = tokens(model.config), "blocks.1."
    writes = [block + name for name in ("attn_out", "mlp_out") if block + name in model.points()]
    seen = {}
    looks = [(block + name, partial(seen.setdefault, name)) for name in ("resid_pre", "resid_post")]
    model(ids, tap=Intervention(model, [*looks, *((write, zero()) for write in writes)]))
    assert torch.equal(seen["resid_pre"], seen["resid_post"])


def test_changes_are_what_they_say():
    model = build(small())
    ids, other = tokens(model.config), tokens(model.config).flip(0)
    point, v = "blocks.1.attn_out", normal(12)
    there, elsewhere = capture(model, ids), capture(model, other)
    for change, expected in (
        (zero(), torch.zeros_like(there[point])),
        (set_to(0.5), torch.full_like(there[point], 0.5)),
        (set_to(v), v.expand(B, T, 12)),
        (add(v), there[point] + v),
        (add(v.float(), scale=-2.0), there[point] - 2 * v.float()),
        (mean(elsewhere), elsewhere[point].mean((0, 1)).expand(B, T, 12)),
        (mean(elsewhere[point]), elsewhere[point].mean((0, 1)).expand(B, T, 12)),
        (resample(elsewhere), elsewhere[point]),
        (resample(elsewhere[point][:1]), elsewhere[point][:1].expand(B, T, 12)),
        (lambda x: x.flip(1), there[point].flip(1)),
    ):
        bound = Intervention(model, {point: change})
        assert error(bound(point, there[point]), expected) < 1e-15


def test_a_reference_is_read_at_the_target():
    model = build(small())
    trace = capture(model, tokens(model.config).flip(0))
    z = normal(B, T, 2, 6)
    one = Intervention(model, {"L1H1": mean(trace)})("blocks.1.attn.z", z)
    assert torch.equal(one[:, :, 0], z[:, :, 0])
    assert error(one[:, :, 1], trace["z", 1][:, :, 1].mean((0, 1)).expand(B, T, 6)) < 1e-15
    at = Intervention(model, {At("L1H1", pos=[2, 4]): resample(trace)})("blocks.1.attn.z", z)
    assert torch.equal(at[:, [2, 4], 1], trace["z", 1][:, [2, 4], 1])
    assert torch.equal(at[:, 3], z[:, 3])
    pattern = Intervention(model, {"L0H0.pattern": mean(trace)})("blocks.0.attn.pattern", trace["pattern", 0])
    assert error(pattern[0, 0], trace["pattern", 0][:, 0].mean(0)) < 1e-15


def test_a_mean_leaves_padding_out():
    model = build(small())
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    padded = Intervention(model, {("attn_out", 1): mean(capture(model, rows))})
    alone = torch.cat([capture(model, [row])["attn_out", 1][0] for row in rows]).mean(0)
    point = "blocks.1.attn_out"
    assert error(padded(point, normal(B, T, 12)), alone.expand(B, T, 12)) < 1e-12


def test_two_changes_at_one_point_are_made_in_the_order_given():
    model = build(small())
    x, point = normal(B, T, 12), "blocks.0.resid_pre"
    for pairs, expected in (
        ([(point, add(torch.ones(12))), (("resid_pre", 0), lambda x: 3 * x)], 3 * (x + 1)),
        ([(point, lambda x: 3 * x), (point, add(torch.ones(12)))], 3 * x + 1),
    ):
        assert torch.equal(Intervention(model, pairs)(point, x), expected)


@few
@given(configs(n_layer=2))
def test_copies_are_passes_of_their_own(config):
    model = build(config)
    ids = tokens(config)
    taps = [Intervention(model, {key: zero()}) for key in ("L0H0", ("attn_out", 1), At("L1H0.q", pos=2), "embed")]
    together = model(ids.repeat(4, 1), tap=Copies(taps)).unflatten(0, (4, -1))
    for one, tap in zip(together, taps, strict=True):
        assert error(one, model(ids, tap=tap)) < 1e-10


@few
@given(configs())
def test_it_steers_a_cached_generation_as_an_uncached_one(config):
    model = build(config, torch.float32)
    tap = Intervention(model, {("attn_out", 0): add(normal(12), 2.0), "L0H0": zero(), "L0H0.pattern": zero()})
    prompts = [[1, 2, 3], [4]]
    cached = generate_ids(model, prompts, tap=tap, **GREEDY)
    assert cached == generate_ids(model, prompts, tap=tap, use_cache=False, **GREEDY)


TARGETS = [
    At("resid_post1", 1),
    At(("attn_out", 0), [0, 2, 4]),
    At("L1H1.pattern", 3),
    At("L0H0.k", 5),
    At("resid_pre0", 40),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("residual", ["pre", "post"])
def test_a_change_at_a_position_is_the_same_with_a_cache_and_without(residual, target):
    """Made when its position is read; padded rows, positions of the prompt and of what is generated, and none of it."""
    model = build(small(residual, n_ctx=20), torch.float32)
    other = capture(model, tokens(model.config, rows=1, length=20), model.points())
    for change in (zero(), add(1.5), resample(other)):
        if isinstance(target.pos, int) and target.pos > 20 and not callable(change):
            continue  # the other pass has no such position either
        if target.target == "L1H1.pattern" and not callable(change):
            continue  # its keys are as many as the pass has
        tap = Intervention(model, {target: change})
        for prompts in ([[1, 2, 3]], [[1, 2, 3, 4], [5]]):
            cached = generate_ids(model, prompts, tap=tap, max_new_tokens=9, temperature=2.0)
            assert cached == generate_ids(model, prompts, tap=tap, max_new_tokens=9, temperature=2.0, use_cache=False)


def test_a_change_in_a_cached_pass_is_that_of_the_whole_pass():
    """The logits of every position, read one by one: also those before the change, which it cannot reach."""
    model, ids = build(small()), tokens(small(), rows=1)
    tap = Intervention(model, {At("mlp_out0", [2, 4]): zero(), At("L1H0", 3): add(2.0)})
    cache, parts = KVCache(model.config, 1, torch.float64), []
    with torch.no_grad():
        for i in range(T):
            parts.append(model(ids[:, i : i + 1], cache=cache, tap=tap))
        assert error(torch.cat(parts, dim=1), model(ids, tap=tap)) < 1e-12
        assert error(model(ids), model(ids, tap=tap)) > 1e-3


def test_positions_from_the_end_are_those_of_a_whole_pass():
    model = build(small(), torch.float32)
    tap = Intervention(model, {At("resid_post1", -1): zero()})
    with pytest.raises(ConfigError, match=r"-1 counts from the end.* continues a cache of 1; .*use_cache=False"):
        generate_ids(model, [[1]], tap=tap, **GREEDY)
    assert len(generate_ids(model, [[1]], tap=tap, use_cache=False, **GREEDY)[0]) == 6
    with pytest.raises(ConfigError, match="out of range"):
        model(tokens(model.config), tap=Intervention(model, {At("resid_post1", 40): zero()}))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("blocks.1.resid_prr", r"'blocks\.1\.resid_pre'"),
        (("resid_pre", 3), r"block 3; the model has 3"),
        ("L3H0", r"block 3; the model has 3"),
        ("L0H2", r"2 is out of range; 'blocks\.0\.attn\.z' has 2 heads"),
        ("L0N48", r"48 is out of range; 'blocks\.0\.mlp\.post' has 48 neurons"),
        ("L0H1.post", r"not in this model"),
        ("blocks.1.res_1.ln_in.scale", r"statistic of a norm"),
        ("ln_f.mean", r"statistic of a norm"),
        (("scores", 1), r"computed from other points"),
        (At("L0H1", units=0), r"already names a unit"),
        (At(("resid_pre", 0), units=0), r"without heads or neurons"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target, message):
    with pytest.raises(ConfigError, match=message):
        Intervention(build(small()), {target: zero()})


def test_what_does_not_fit_is_refused_with_both_shapes():
    model = build(small())
    ids, trace = tokens(model.config), capture(model, tokens(model.config, length=5))
    for target, change, message in (
        (At("embed", pos=7), zero(), r"7 is out of range; the pass has 7 positions"),
        (("attn_out", 1), resample(trace), r"\(2, 5, 12\) in the other pass and \(2, 7, 12\) in this one"),
        (("attn_out", 1), set_to(torch.ones(5)), r"\(5,\) does not fit \(2, 7, 12\)"),
        ("L0H0", add(torch.ones(3, 6)), r"\(3, 6\) does not fit \(2, 7, 6\)"),
        (("attn_out", 1), lambda x: x[:, :1], r"returned \(2, 1, 12\) for what is \(2, 7, 12\)"),
    ):
        tap = Intervention(model, {target: change})
        with pytest.raises(ConfigError, match=message):
            model(ids, tap=tap)
    with pytest.raises(ConfigError, match=r"does not match 'blocks\.0\.attn\.z', which has 4 axes"):
        Intervention(model, {"L0H0": mean(torch.ones(2, 7, 6))})


def test_a_steering_vector_is_a_difference_of_means_at_the_last_positions():
    model = build(small(vocab_size=256, n_ctx=16))
    more, less = ["yes", "of course"], ["no", "never", "not at all"]
    vector = steering_vector(model, more, less, ("resid_post", 1), tokenizer=Bytes())

    def at_the_end(texts):
        ends = [record(model, torch.tensor([list(text.encode())]))["blocks.1.resid_post"][0, -1] for text in texts]
        return torch.stack(ends).mean(0)

    assert error(vector, at_the_end(more) - at_the_end(less)) < 1e-10
    head = steering_vector(model, [[1, 2]], [[3, 4]], "L0H1")
    ends = [capture(model, [ids])["z", 0][0, -1, 1] for ids in ([1, 2], [3, 4])]
    assert error(head, ends[0] - ends[1]) < 1e-10
    with pytest.raises(ConfigError, match="not a vector"):
        steering_vector(model, [[1]], [[2]], ("pattern", 0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"L0H0": mean}, "must return a tensor"),
        ({"L0H0": lambda x: None}, "must return a tensor"),
        ({"L0H0": 0}, "is not a change"),
        ({At("resid_pre0", pos=[1, 1]): zero()}, "has an index twice"),
        ({At("resid_pre0", pos=[-1, 6]): zero()}, "has an index twice"),
        ({At("resid_pre0", pos=[]): zero()}, "is empty or has"),
    ],
)
def test_what_is_no_change_is_refused(changes, words):
    model = build(small())
    with pytest.raises(ConfigError, match=words):
        model(tokens(small()), tap=Intervention(model, changes))
