"""Law 1: sums close, for every row, carried through every later skip and norm; and each row is what it says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import ConfigError
from mainstem.stream import decompose as rooms
from mainstem.stream.capture import capture
from mainstem.stream.decompose import UNITS, closing_error
from models import ROWS, Change, build, configs, error, few, normal, small, tokens

PRECISIONS = st.sampled_from([(torch.float64, 1e-10), (torch.float32, 1e-4)])


def trace_of(config, dtype=torch.float64, **options):
    model = build(config, dtype)
    return capture(model, tokens(model.config), **options)


def through(rows, norm, scale):
    """The rows of a sum, carried through the norm over it, written out plainly; its bias is one more row."""
    if not list(norm.parameters()):
        return rows
    if isinstance(norm, torch.nn.LayerNorm):
        rows = [row - row.mean(-1, keepdim=True) for row in rows]
    rows = [norm.weight * row / scale for row in rows]
    bias = getattr(norm, "bias", None)
    return rows if bias is None else [*rows, bias.expand_as(rows[0])]


def plain_branches(trace):
    """resid_final as its writes and norm biases, in the order of the forward pass."""
    model, names = trace.model, ["embed", "pos_embed"] if trace.model.wpe is not None else ["embed"]
    rows = [trace[name] for name in names]
    for index, block in enumerate(model.blocks):
        for branch, name in (("attn_out", "res_1"), ("mlp_out", "res_2")):
            if hasattr(block, name):
                join, point = getattr(block, name), f"blocks.{index}.{name}.ln_add.scale"
                rows = [join.skip(row) for row in rows] + [trace[branch, index]]
                rows = through(rows, join.ln_add, trace.values.get(point))
    return rows


@few
@given(st.data(), PRECISIONS)
@pytest.mark.parametrize("residual", ROWS)
def test_sums_close(residual, data, precision):
    """By branch, head and neuron, the rows sum to the stream; every result carries its closing error."""
    dtype, tolerance = precision
    trace = trace_of(data.draw(configs(residual=residual)), dtype)
    for by in UNITS:
        terms = trace.decompose(by=by)
        assert terms.closing_error <= tolerance
        assert closing_error(terms.values.sum(0), trace["resid_final"]) == terms.closing_error


@few
@given(configs())
def test_branches_are_those_of_the_plain_sum(config):
    trace = trace_of(config)
    terms = trace.decompose()
    expected = plain_branches(trace)
    assert len(expected) == len(terms.labels)
    for value, plain in zip(terms.values, expected, strict=True):
        assert (value - plain).abs().max() <= 1e-10 * max(1.0, trace["resid_final"].abs().max())


@few
@given(configs(d_mlp=-1), st.sampled_from(("resid_pre", "resid_mid", "resid_post")), st.integers(0, 2))
def test_any_point_is_a_sum(config, name, layer):
    trace = trace_of(config)
    layer %= config.n_layer
    terms = trace.decompose(by="head", at=(name, layer), pos=3)
    assert terms.closing_error < 1e-10
    assert torch.equal(terms.total, trace[name, layer][:, 3])
    assert terms.values.shape == (len(terms.labels), 2, config.d_model)


@few
@given(configs(), st.sampled_from(UNITS))
def test_along_a_direction_is_the_same_rows(config, by):
    """`project` never spreads a row over the width, and finds what `decompose` finds along the directions."""
    trace = trace_of(config)
    directions = normal(3, config.d_model)
    forwards, backwards = trace.decompose(by=by), rooms.project(trace, directions, by)
    assert forwards.labels == backwards.labels
    expected = torch.einsum("rbtc,kc->rkbt", forwards.values, directions)
    assert (backwards.values - expected).abs().max() < 1e-10 * expected.abs().max()
    assert backwards.closing_error < 1e-9
    one = rooms.project(trace, directions[0], by, pos=-1)
    assert error(one.values, backwards.values[:, 0, :, -1]) < 1e-10


@few
@given(st.data(), st.sampled_from(("pre", "post", "sandwich", "deepnorm")))
def test_heads_hold_no_bias(data, residual):
    """A head whose values and pattern see nothing writes nothing: biases have rows of their own."""
    config = data.draw(configs(n_layer=2, bias=True, residual=residual))
    model = build(config)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.c_attn.weight.chunk(3)[2].zero_()  # the values are their bias
    terms = capture(model, tokens(config)).decompose(by="head")
    heads = [label for label in terms.labels if label.startswith("L")]
    assert len(heads) == 2 * config.n_head
    assert max(terms[label].abs().max() for label in heads) < 1e-10 * terms.total.abs().max()
    assert terms["1_attn.b_V"].abs().max() > 0


@few
@given(configs(n_layer=2, n_head=3), st.sampled_from((0, 1, 2)))
def test_a_heads_row_is_of_that_heads_weights(config, head):
    """A head without an output projection writes nothing, and no other head's row is nothing."""
    model = build(config)
    with torch.no_grad():
        model.blocks[1].attn.c_proj.weight.chunk(3, dim=1)[head].zero_()
    terms = capture(model, tokens(config)).decompose(by="head")
    silent = {label for label in terms.labels if label.startswith("L1H") and not terms[label].any()}
    assert silent == {f"L1H{head}"}


@few
@given(st.data(), st.sampled_from(("pre", "none", "rezero", "layerscale", "lns")))
def test_a_neuron_silenced_is_its_row_gone(data, residual):
    """In the last MLP, what a neuron adds to the stream is what is missing without it."""
    config = data.draw(configs(residual=residual, d_mlp=8, n_layer=2))
    model = build(config)
    ids = tokens(config)
    trace = capture(model, ids)
    row = trace.decompose(by="neuron")["L1N3"]

    def silence(post):
        post = post.clone()
        post[..., 3] = 0
        return post

    with torch.no_grad():
        without = model.stream(ids, tap=Change({"blocks.1.mlp.post": silence}))
    expected = trace["resid_final"] - without
    assert (row - expected).abs().max() < 1e-10 * max(1.0, expected.abs().max())


@few
@given(configs(), st.sampled_from((None, "own", "frozen")))
def test_running_sums_end_in_the_whole(config, norm):
    trace = trace_of(config)
    sums = trace.accumulate(norm=norm)
    assert sums.closing_error < 1e-10
    expected = trace["resid_final"] if norm is None else trace.model.ln_f(trace["resid_final"])
    assert error(sums.values[-1], expected) < 1e-10


def test_own_and_frozen_differ_before_the_end():
    """One normalisation for attribution, another for the lens: TransformerLens's lens once used the last scale at every
    depth, and early layers looked uniform."""
    trace = trace_of(small("pre"))
    own, frozen = (trace.accumulate(norm=norm).values[0] for norm in ("own", "frozen"))
    assert error(own, frozen) > 0.1
    assert error(own, trace.model.ln_f(trace["embed"])) < 1e-12


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (lambda trace: trace.decompose(by="heads"), ["by", "'heads'", "'head'"]),
        (lambda trace: trace.decompose(at="resid_finale"), ["'resid_final'"]),
        (lambda trace: trace.decompose(at=("attn_out", 0)), ["not a point of the stream"]),
        (lambda trace: trace.decompose(pos=7), ["7", "out of range", "7 positions"]),
        (lambda trace: trace.decompose(pos=slice(100, 200)), ["100", "none of the 7"]),
        (lambda trace: trace.decompose()["0_atn_out"], ["'0_attn_out'"]),
        (lambda trace: trace.accumulate(norm="mine"), ["'mine'", "own"]),
        (lambda trace: trace.decompose().top(0), ["n: 0 rows", "at least 1"]),
    ],
)
def test_errors_name_near_misses(question, words):
    trace = trace_of(small("pre"))
    with pytest.raises(ConfigError) as caught:
        question(trace)
    assert all(word in str(caught.value) for word in words)


def test_a_table_too_large_is_refused(monkeypatch):
    trace = trace_of(small("pre"))
    monkeypatch.setattr(rooms, "BUDGET", 10_000)
    with pytest.raises(ConfigError, match="choose a position"):
        trace.decompose(by="neuron")
    monkeypatch.setattr(rooms, "BUDGET", 1_000_000)
    trace.decompose(by="neuron", pos=-1)


def test_changed_weights_are_refused():
    """A trace answers from the model's weights, so it must not outlive them."""
    trace = trace_of(small("pre"))
    optimizer = torch.optim.AdamW(trace.model.parameters(), fused=True)
    trace.model(trace.ids).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="changed"):
        trace.decompose()


def test_changes_that_torch_does_not_count_are_seen():
    """A fused step moves weights without counting; here it moves neither the embeddings nor the head."""
    trace = trace_of(small("pre", tie_embeddings=False))
    model = trace.model
    model(trace.ids).sum().backward()
    torch.optim.AdamW(model.blocks.parameters(), fused=True).step()
    with pytest.raises(ConfigError, match="changed"):
        trace.decompose()


def test_a_diverged_model_can_be_opened():
    """A NaN is not a change: the record still answers."""
    model = build(small("pre"))
    with torch.no_grad():
        model.wte.weight[0, 0] = float("nan")
    trace = capture(model, torch.ones(1, 3, dtype=torch.long))
    assert trace.decompose().closing_error < 1e-10
