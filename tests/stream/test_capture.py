"""Capture: what was chosen, within a budget, of any batch, during generation, with gradients."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import ConfigError, DataError
from mainstem.stream.capture import capture, capture_generation, estimate
from mainstem.text.tokenizer import Bytes
from models import build, configs, error, few, normal, record, small, tokens


@few
@given(configs())
def test_it_is_what_the_tap_records(config):
    """And watching changes nothing: the logits are the model's own, to the bit."""
    model = build(config)
    ids = tokens(config)
    expected = record(model, ids)
    trace = capture(model, ids, model.points())
    assert all(torch.equal(trace[point], expected[point]) for point in model.points())
    assert torch.equal(trace.logits, expected["logits"])
    assert torch.equal(capture(model, ids).logits, model(ids))


def test_only_what_was_chosen_is_kept():
    model = build(small())
    trace = capture(model, tokens(small()), ["resid_post", ("q", 1)])
    posts = [f"blocks.{i}.resid_post" for i in range(3)]
    assert list(trace.values) == [posts[0], "blocks.1.attn.q", *posts[1:]]
    assert ("resid_pre", 1) in trace
    assert ("k", 1) not in trace
    assert torch.equal(trace["k", 1], record(model, tokens(small()))["blocks.1.attn.k"])
    with pytest.raises(ConfigError, match="'resid_pre', 0"):
        trace["k", 0]
    with pytest.raises(ConfigError, match="not captured"):
        trace["embed"]


@few
@given(configs(), st.sampled_from((torch.float32, torch.float64)))
def test_the_estimate_is_what_it_takes(config, dtype):
    model = build(config, dtype)
    for points in (model.points(), ["blocks.0.resid_pre", "resid_final"]):
        trace = capture(model, tokens(config), points)
        assert estimate(model, points, 2, 7) == sum(t.numel() * t.element_size() for t in unique(trace.values.values()))


def unique(tensors):
    return {(t.data_ptr(), t.shape): t for t in tensors}.values()


def test_past_the_budget_nothing_is_run():
    model = build(small())
    with pytest.raises(ConfigError, match="the budget is"):
        capture(model, tokens(small()), budget=1000)
    capture(model, tokens(small()), ["resid_final"], budget=2 * 7 * 12 * 8)


def test_a_model_in_training_is_watched_in_evaluation_and_goes_on_training():
    model = build(small(dropout=0.5))
    expected = capture(model, tokens(small())).logits
    model.train()
    model.blocks[0].eval()
    trace = capture(model, tokens(small()))
    assert model.training
    assert not model.blocks[0].training
    assert torch.equal(trace.logits, expected)
    assert error(trace["mlp.post", 1], capture(model.eval(), tokens(small()))["mlp.post", 1]) == 0


@few
@given(configs())
def test_padded_rows_are_single_runs(config):
    """Rows of any lengths: each row, without its padding, is the capture of that row alone."""
    model = build(config)
    rows = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    trace = capture(model, rows)
    for index, row in enumerate(rows):
        alone, cut = capture(model, [row]), trace.row(index)
        assert torch.equal(cut.ids, alone.ids)
        for point in model.points():
            assert (cut[point] - alone[point]).abs().max() < 1e-10 * (1 + alone[point].abs().max())
        assert cut.decompose(by="head").closing_error < 1e-10


@few
@given(configs())
def test_cached_generation_is_the_full_forward(config):
    """What is kept while the model talks, token by token, is what one pass over the text would leave."""
    model = build(config)
    trace = capture_generation(model, None, [1, 2, 3], model.points(), max_new_tokens=5)
    assert trace.ids.shape == (1, 7)
    whole = capture(model, trace.ids, model.points())
    for point in model.points():
        assert (trace[point] - whole[point]).abs().max() < 1e-10 * (1 + whole[point].abs().max())
    assert error(trace.logits, whole.logits) < 1e-9


def test_generation_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="n_ctx 8"):
        capture_generation(build(small()), None, [1, 2, 3], max_new_tokens=7)


@few
@given(configs(activation="gelu"))
def test_gradients_at_the_points_are_finite_differences(config):
    """Law 12: and the part by the skip and the part through the branch sum to the gradient at what the branch reads."""
    model = build(config, by=0.1)
    ids = tokens(config)

    def metric(logits):
        return logits[:, -1].log_softmax(-1)[:, 3]

    trace = capture(model, ids, metric=metric)
    direction = normal(*trace["resid_pre", -1].shape)
    last = config.n_layer - 1

    def moved(step):
        x = model.through(trace["resid_pre", -1] + step * direction, trace.view, first=last)
        return metric(model.unembed(x)).sum()

    with torch.no_grad():
        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    expected = (trace.gradient(("resid_pre", -1)) * direction).sum()
    assert abs(slope - expected) < 1e-5 * (1 + expected.abs())
    for layer in range(config.n_layer):
        for kind, read in (("attn", "resid_pre"), ("mlp", "resid_mid"))[: 2 if config.d_mlp else 1]:
            by_skip, through = trace.gradient_parts(layer, kind)
            whole = trace.gradient((read, layer))
            assert (by_skip + through - whole).abs().max() < 1e-10 * (1 + whole.abs().max())


def test_gradients_reach_patterns_and_frozen_parameters():
    model = build(small()).requires_grad_(False)
    trace = capture(model, tokens(small()), ["pattern", "embed", "pos_embed"], metric=lambda logits: logits[:, -1, 3])
    assert trace.gradient(("pattern", 0)).abs().max() > 0
    assert torch.equal(trace.gradient("embed"), trace.gradient("pos_embed"))
    with pytest.raises(ConfigError, match="metric="):
        trace.gradient(("resid_mid", 0))


@pytest.mark.parametrize(
    ("ids", "error_type", "words"),
    [
        ([[1, 2], []], DataError, ["no tokens"]),
        ([[1, 11]], DataError, ["11", "0..10"]),
        (torch.tensor([[1, 2, 99]]), DataError, ["99"]),
        ("text", DataError, ["`tokenizer`"]),
        ([[1] * 9], ConfigError, ["n_ctx 8"]),
        (torch.zeros(1, 0, dtype=torch.long), DataError, ["(1, 0)", "at least one"]),
        (torch.zeros(1, 2), DataError, ["float32", "whole numbers"]),
        (torch.tensor([1, 2]), DataError, ["(2,)"]),
    ],
)
def test_ids_that_are_not_ids(ids, error_type, words):
    with pytest.raises(error_type) as caught:
        capture(build(small()), ids)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(1, 7), "give the same shape"),
        (torch.tensor([[1] * 7, [1] * 5 + [0] * 2]), "on the left"),
        (torch.tensor([[1] * 7, [0, 1, 0, 1, 1, 1, 1]]), "on the left"),
    ],
)
def test_padding_that_would_be_misread_is_refused(mask, words):
    with pytest.raises(ConfigError, match=words):
        capture(build(small()), tokens(small()), mask=mask)


def test_blocks_are_those_of_the_model_not_of_its_config():
    """Of a cut model, and of one with a block more, every question is answered from the blocks that are there."""
    cut, grown = build(small()), build(small())
    del cut.blocks[1]
    grown.blocks.append(build(small()).blocks[0])
    for model, count in ((cut, 2), (grown, 4)):
        trace = capture(model, tokens(small()), metric=lambda logits: logits[:, -1, 3])
        assert trace.decompose(by="neuron").closing_error < 1e-10
        assert trace.attribution(3).closing_error < 1e-10
        assert len(trace.lens().points) == 2 * count + 1
        assert torch.equal(trace.lens().logits("resid_final"), model(trace.ids))
        assert sum(trace.gradient_parts(-1, "mlp")).allclose(trace.gradient(("resid_mid", count - 1)))
        with pytest.raises(ConfigError, match=f"block {count}"):
            trace["resid_post", count]
        with pytest.raises(ConfigError, match=f"0 to {count - 1}"):
            trace.gradient_parts(21)


def test_a_gradient_goes_by_both_names_of_its_point():
    trace = capture(build(small()), tokens(small()), [("resid_pre", 1), "resid_final"], metric=lambda x: x[:, -1, 3])
    assert torch.equal(trace.gradient(("resid_post", 0)), trace.gradient(("resid_pre", 1)))
    assert torch.equal(trace.gradient(("resid_post", -1)), trace.gradient("resid_final"))
    with pytest.raises(ConfigError, match="statistics"):
        trace.gradient("ln_f.scale")


def test_gradients_need_room_for_what_is_inside():
    model = build(small())
    once, both = (estimate(model, ["resid_final"], 2, 7, gradients=gradients) for gradients in (False, True))
    inside = [point for point in model.points() if "pattern" not in point]
    assert both == 2 * once + estimate(model, inside, 2, 7) + 2 * 2 * 7 * 11 * 8  # and the logits, with their gradient


@few
@given(configs())
def test_scores_are_what_the_pattern_is_the_softmax_of(config):
    """Also where a padded row's queries see less; and heads' results sum to the branch's output without its bias."""
    model = build(config)
    trace = capture(model, [[1, 2, 3, 4, 5], [7, 8]])
    for index, block in enumerate(model.blocks):
        assert (trace["attn.scores", index].softmax(-1) - trace["attn.pattern", index]).abs().max() < 1e-12
        returned = block.attn.c_proj(trace["attn.z", index].flatten(-2))
        bias = 0 if block.attn.c_proj.bias is None else block.attn.c_proj.bias
        assert error(trace["attn.result", index].sum(2) + bias, returned) < 1e-12


def test_several_threads_capture_one_model():
    """Nothing of one pass is in another: each trace is that of its ids alone."""
    model = build(small("sandwich"))
    batches = [tokens(model.config, rows=1, length=length) for length in (2, 3, 5, 7)]
    alone = [capture(model, ids, model.points()) for ids in batches]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda ids: capture(model, ids, model.points()), batches * 8))
    for trace, expected in zip(found, alone * 8, strict=True):
        assert all(torch.equal(trace[point], expected[point]) for point in model.points())
        assert torch.equal(trace.logits, expected.logits)


def test_no_keyword_is_swallowed():
    with pytest.raises(TypeError):
        capture(build(small()), tokens(small()), names=["embed"])


def test_texts():
    model = build(small(vocab_size=257))
    trace = capture(model, ["ab", "cde"], tokenizer=Bytes())
    assert trace.ids.tolist() == [[0, 97, 98], [99, 100, 101]]
    assert trace.mask.tolist() == [[False, True, True], [True, True, True]]
    assert "2 x 3 tokens" in repr(trace)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda logits: logits, "(2, 7, 11)"),
        (lambda logits: 1.0, "float"),
        (lambda logits: logits.detach()[:, -1, 3], "no gradient"),
    ],
)
def test_what_is_no_metric_is_refused(metric, words):
    with pytest.raises(ConfigError) as caught:
        capture(build(small()), tokens(small()), metric=metric)
    assert words in str(caught.value)


@pytest.mark.parametrize("ids", [[1, 2], [[1.7, 2.2]], None, torch.ones(1, 2, dtype=torch.bool), [["a"]]])
def test_what_is_no_row_of_ids_is_refused(ids):
    with pytest.raises(DataError):
        capture(build(small()), ids)


def test_small_whole_numbers_are_ids():
    model, ids = build(small()), tokens(small())
    assert torch.equal(capture(model, ids.to(torch.uint8)).logits, model(ids))


def test_a_copy_of_a_trace_answers():
    """It holds a copy of the model, whose writes are counted anew."""
    trace = copy.deepcopy(capture(build(small()), tokens(small())))
    assert trace.decompose(by="head").closing_error < 1e-10
    with torch.no_grad():
        trace.model.wte.weight.zero_()
    with pytest.raises(ConfigError, match="changed"):
        trace.decompose()


def test_within_inference_mode():
    model, ids = build(small()), tokens(small())
    with torch.inference_mode():
        trace = capture(model, ids)
        graded = capture(model, ids, metric=lambda logits: logits[:, -1, 3])
        inside = build(small())  # its parameters are inference tensors
        assert capture(inside, ids).decompose().closing_error < 1e-10
    assert torch.equal(trace.logits, model(ids))
    assert graded.gradient("resid_final").abs().max() > 0


def test_a_generation_gives_the_last_norm_too():
    model = build(small())
    trace = capture_generation(model, None, [1, 2, 3], ["ln_f.scale"], max_new_tokens=4)
    assert error(trace["ln_f.scale"], capture(model, trace.ids)["ln_f.scale"]) < 1e-10


@pytest.mark.parametrize("key", [3, None, ["resid_post", 0], ()])
def test_what_is_no_name_is_refused(key):
    trace = capture(build(small()), tokens(small()))
    assert key not in trace
    with pytest.raises(ConfigError):
        trace[key]
