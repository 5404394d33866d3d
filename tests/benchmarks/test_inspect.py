"""What is compared is the same on both sides; ratios have the right side up; and what is missing is said."""

import sys

import pytest
import torch
from hypothesis import given

from benchmarks import inspect, memory, naive, processes
from benchmarks.inspect import FIGURES, OURS, PEER, POINTS, apart, measure, stream_and_writes
from benchmarks.memory import taken
from benchmarks.peer import PACKAGE, find, unlike_gpt2
from benchmarks.processes import NotCompared, alone, done
from benchmarks.subject import Subject
from mainstem.circuits.composition import composition
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.tap import Recorder
from mainstem.presets import PRESETS
from mainstem.stream.capture import capture
from mainstem.stream.metrics import LogitDifference
from mainstem.stream.points import select
from models import Change, build, configs, error, few, small, tokens

SUBJECT = Subject("tiny", tokens=12, grid_tokens=5)
WITH_PEER = ("composition_speedup", "head_attribution_ratio")
LINUX = sys.platform == "linux"


NOW = [0.0]
"""The seconds of a clock that each look at it moves by a thousandth, and a slow peer by far more."""


def tick(seconds=1e-3):
    NOW[0] += seconds
    return NOW[0]


@pytest.fixture
def quick(monkeypatch, in_this_process):
    """No process of its own for a side, and no peer, whether or not it is installed."""
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.model_bridge.sources", None)
    monkeypatch.setitem(sys.modules, PACKAGE, None)


class Slow:
    """A peer that has our answers, and takes its time."""

    version = "1.0"

    def __init__(self, model, wrong=0.0):
        self.model, self.wrong = model, wrong

    def cache(self, ids):
        return {"ids": ids}

    def composition(self):
        tick(0.2)
        return {mode: scores.nan_to_num() + self.wrong for mode, scores in composition(self.model).scores.items()}

    def head_attribution(self, cache, targets):
        tick(0.2)
        why = capture(self.model, cache["ids"]).attribution(targets, by="head", pos=None)
        rows = [values for label, values in zip(why.labels, why.values, strict=True) if "H" in label]
        return torch.stack(rows) + self.wrong


@pytest.mark.slow
def test_without_the_peer_its_figures_are_none_and_the_rest_is_there(quick):
    calls = []
    found = measure(SUBJECT, 2, progress=lambda *at: calls.append(at))
    assert list(found)[: len(FIGURES) + 1] == [*(figure.name for figure in FIGURES), "memory_ratio"]
    for figure in FIGURES:
        value, behind = found[figure.name], found["timings"][figure.name]
        if figure.name in WITH_PEER:
            assert value is behind is None
            continue
        low, high = behind["ratio_quartiles"]
        assert 0 < low <= value <= high
        assert list(behind["seconds"]) == list(behind["quartiles"]) == [figure.of, figure.over]
        assert all(0 < low <= behind["seconds"][side] <= high for side, (low, high) in behind["quartiles"].items())
        assert behind["rounds"] == 2
        assert behind["difference"] < 1e-5
    assert found["memory"][OURS]["held"] > 0
    assert found["memory"][PEER] is found["memory_ratio"] is found["peer"] is found["logits_difference"] is None
    assert "pip install 'mainstem[bench]'" in found["notes"][0]
    assert found["shape"].items() >= {"preset": "tiny", "tokens": 12, "grid_tokens": 5, "n_layer": 2}.items()
    assert (found["torch"], found["threads"]) == (torch.__version__, torch.get_num_threads())
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][:2] == (2 + 6 * len(FIGURES),) * 2


@pytest.mark.slow
def test_a_slow_peer_makes_us_look_fast(quick, monkeypatch):
    """Which side is over which: a speed-up above 1, a ratio below 1."""
    monkeypatch.setattr(inspect, "find", lambda model, ids: (Slow(model), 1e-7))
    monkeypatch.setattr(processes.time, "perf_counter", tick)
    found = measure(SUBJECT, 1)
    assert found["composition_speedup"] > 1 > found["head_attribution_ratio"]
    assert all(found["timings"][name]["difference"] < 1e-6 for name in WITH_PEER)
    assert (found["peer"], found["logits_difference"]) == ("TransformerLens 1.0", 1e-7)
    assert found["memory"][PEER]["held"] > 0
    assert found["notes"] == []


def test_a_peer_with_other_answers_is_seen(monkeypatch):
    monkeypatch.setattr(inspect, "find", lambda model, ids: (Slow(model, wrong=1.0), 0.0))
    ours, theirs = (build(**vars(SUBJECT)) for build in (inspect.ours, inspect.theirs))
    for figure in FIGURES:
        if figure.needs_peer:
            (work,) = set(figure.works)
            assert apart(*(done(works[work], (), True).value for works in (ours, theirs))) > 0.5


@few
@given(configs())
def test_the_points_are_the_stream_and_every_write(config):
    model = GPT(config)
    found = stream_and_writes(model)
    assert found == select([point for point in POINTS if point in {name.split(".")[-1] for name in found}], model)
    assert set(found) >= {place.write for place in model.joins()} | {"embed", "resid_final"}
    assert not [point for point in found if "attn." in point or "mlp." in point or point.endswith(("mean", "scale"))]


@few
@given(configs(n_layer=2))
def test_the_plain_grid_is_one_patch_a_pass(config):
    model = build(config)
    clean, corrupt = tokens(config, rows=2).split(1)
    metric = LogitDifference(0, 1)
    tap = Recorder([f"blocks.{layer}.resid_pre" for layer in range(2)])
    with torch.no_grad():
        model(clean, tap=tap)
        baseline = metric(model(corrupt))
        expected = torch.empty(2, clean.shape[1], dtype=torch.float64)
        for layer in range(2):
            for position in range(clean.shape[1]):
                point = f"blocks.{layer}.resid_pre"

                def patched(x, point=point, position=position):
                    x = x.clone()
                    x[:, position] = tap.values[point][:, position]
                    return x

                expected[layer, position] = metric(model(corrupt, tap=Change({point: patched}))) - baseline
    for room in (1, 20, 1000):
        assert error(naive.patch_grid(model, clean, corrupt, metric, room), expected) < 1e-10


def test_memory_is_the_peak_and_what_is_left():
    """40 MB that are let go count in the peak; a second name of what is left counts nowhere."""

    def work():
        left = torch.ones(5_000_000)
        (torch.ones(10_000_000) * 2).sum()
        return [left, left[:10], left.view(-1, 5)]

    found = taken(work)
    assert found.held == 20_000_000
    assert found.peak is None if not LINUX else 55e6 < found.peak < 120e6


def test_the_look_has_a_process_of_its_own():
    found = memory.Taken(**alone("benchmarks.inspect:ours", "memory", ours=True, **vars(SUBJECT)))
    config, T = SUBJECT.config, SUBJECT.tokens
    L, C = config.n_layer, config.d_model
    numbers = T * C * (2 + (2 * L + 1) + 2 * L + L) + T * 2 * (2 * L + 1)  # embeddings, stream, writes, z; statistics
    rows = 2 + L * (config.n_head + 2 + 1) + 1  # with b_V, b_O, and ln_f's bias
    assert found.held == 4 * (numbers + T * (rows + 1))
    assert found.peak is None if not LINUX else found.peak > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preset": "gtp2"}, "did you mean 'gpt2'?"),
        ({"tokens": 1}, "tokens: 1 is not possible; give 2 to 64, the context of tiny"),
        ({"grid_tokens": 65}, "grid_tokens: 65 is not possible; give 2 to 64"),
    ],
)
def test_a_subject_that_cannot_be(changes, said):
    with pytest.raises(ConfigError) as caught:
        Subject(**{"preset": "tiny", "tokens": 8, "grid_tokens": 8} | changes)
    assert said in str(caught.value)


def test_no_round_is_an_error(quick):
    with pytest.raises(ConfigError, match="rounds: 0 is not possible"):
        measure(SUBJECT, 0)


def test_the_subject_is_the_same_at_every_call():
    """Each process builds its own."""
    ids, targets = SUBJECT.text()
    assert ids[:, 1:].equal(targets[:, :-1])
    assert ids.equal(SUBJECT.text()[0])
    assert all(a.equal(b) for a, b in zip(SUBJECT.model().parameters(), SUBJECT.model().parameters(), strict=True))
    assert not any(text.equal(ids) for text in SUBJECT.pair())
    assert not Subject("mini", 8, 8).config.attn_dropout


def test_which_models_the_peer_can_hold():
    known = {name: unlike_gpt2(preset.model) for name, preset in PRESETS.items()}
    assert known == {**dict.fromkeys(known), "mini": "lm_head_bias", "swift": "position"}
    others = {
        "residual": "post", "norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "qk_norm": True,
        "d_head": 4, "attn_scale": 0.5, "d_mlp": 0, "lm_head_bias": True,
    }  # fmt: skip
    for field, value in others.items():
        config = small(**{field: value})
        assert unlike_gpt2(config) == field
        with pytest.raises(NotCompared, match="is not GPT-2's form;"):
            find(GPT(config), tokens(config))
    held = {"bias": False, "attn_scale": 1.0, "attn_scale_by_depth": True, "activation": "relu2"}
    assert [unlike_gpt2(small(**{field: value})) for field, value in held.items()] == [None] * len(held)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False, "activation": "gelu", "n_head": 3, "d_mlp": 20},
        {"attn_scale_by_depth": True, "activation": "relu2"},
    ],
)
def test_the_peer_holds_our_model(changes):
    """Stirred weights: no gain is 1, and no bias 0 but those that reach the values, which are counted differently."""
    pytest.importorskip(PACKAGE)
    model = build(small(**changes), torch.float32)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.c_attn.bias.chunk(3)[2].zero_()
            block.res_1.ln_in.bias.zero_()
    ids = tokens(model.config)
    peer, difference = find(model, ids)
    assert 0 <= difference < 1e-5
    scores = composition(model).scores
    for mode, theirs in peer.composition().items():
        assert error(theirs, scores[mode].nan_to_num()) < 1e-4
    why = capture(model, ids).attribution(ids, by="head", pos=None)
    heads = why.values[[row for row, label in enumerate(why.labels) if "H" in label]]
    cache = peer.cache(ids)
    for _ in range(2):
        assert error(peer.head_attribution(cache, ids), heads) < 1e-4
    assert not [name for name in cache if name.endswith("hook_result")]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_peer_that_scales_as_it_likes_is_not_compared():
    """GPT-2 may leave q.k unscaled; TransformerLens scales it all the same, which its logits show."""
    pytest.importorskip(PACKAGE)
    model = build(small(attn_scale=1.0), torch.float32)
    with pytest.raises(NotCompared, match="its logits differ from ours by"):
        find(model, tokens(model.config))
