"""The strongest contexts are those of a plain search over everything at once, however the windows are batched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import induction, periodic
from mainstem.circuits.contexts import head_contexts, neuron_contexts
from mainstem.errors import ConfigError, DataError
from mainstem.stream.capture import capture
from models import ROWS, build, configs, few, small, tokens

SPLITS = st.sampled_from(([6], [1, 1, 1, 1, 1, 1], [2, 3, 1]))


@few
@given(st.data(), st.sampled_from(ROWS), SPLITS, st.sampled_from((1, 4, 100)))
def test_neurons(data, residual, split, count):
    model = build(data.draw(configs(residual=residual, n_layer=2, d_mlp=5)))
    ids = tokens(model.config, rows=6, length=8)
    found = neuron_contexts(model, ids.split(split), layer=1, neuron=3, top=count, around=2)
    values = capture(model, ids)["blocks.1.mlp.post"][..., 3]  # (6, 8)
    expected = values.flatten().sort(descending=True).values[:count].tolist()
    assert [context.value for context in found] == pytest.approx(expected, abs=1e-12)
    for context in found:
        assert context.value == pytest.approx(values[context.window, context.position].item(), abs=1e-12)
        assert context.source is None
        assert context.start == max(0, context.position - 2)
        assert context.ids == ids[context.window, context.start : context.position + 3].tolist()
        assert context.ids[context.position - context.start] == ids[context.window, context.position]


def written(model, values):
    """What block 1's last head writes of values, (..., H, D) -> (..., C): through c_proj, ln_out and gain, but for
    ln_out's scale and without the values' bias.
    """
    attn, join, last = model.blocks[1].attn, model.blocks[1].res_1, model.config.n_head - 1
    values = values[..., last, :]
    if attn.c_attn.bias is not None:
        values = values - attn.c_attn.bias[-attn.d_head :]
    rows = values @ attn.c_proj.weight[:, -attn.d_head :].T
    if list(join.ln_out.parameters()):
        rows = rows - rows.mean(-1, keepdim=True) if isinstance(join.ln_out, torch.nn.LayerNorm) else rows
        rows = join.ln_out.weight * rows
    return join.gain(rows)


@few
@given(st.data(), st.sampled_from(ROWS), SPLITS, st.sampled_from((1, 4, 100)))
def test_heads(data, residual, split, count):
    """The value is the length of the head's write; the source, where attention times length is largest."""
    model = build(data.draw(configs(residual=residual, n_layer=2)))
    last, ids = model.config.n_head - 1, tokens(model.config, rows=6, length=7)
    found = head_contexts(model, ids.split(split), layer=1, head=last, top=count)
    trace = capture(model, ids)
    values = written(model, trace["z", 1]).norm(dim=-1)
    if list(model.blocks[1].res_1.ln_out.parameters()):
        values = values / trace["blocks.1.res_1.ln_out.scale"][..., 0]
    parts = trace["pattern", 1][:, last] * written(model, trace["v", 1]).norm(dim=-1)[:, None]  # (B, T, T)

    expected = values.flatten().sort(descending=True).values[:count].tolist()
    assert [context.value for context in found] == pytest.approx(expected, abs=1e-10)
    for context in found:
        place = context.window, context.position
        assert context.value == pytest.approx(values[place].item(), abs=1e-10)
        assert context.ids == ids[context.window].tolist()  # `around` covers it
        source = context.source
        assert parts[(*place, source.position)].item() == pytest.approx(parts[place].max().item(), abs=1e-10)
        assert source.token == ids[context.window, source.position]
        assert source.attention == pytest.approx(trace["pattern", 1][place[0], last, place[1], source.position].item())


def test_a_heads_value_is_the_length_of_its_row_of_a_decomposition():
    model = build(small("sandwich", n_layer=2, d_mlp=0))
    ids = tokens(model.config)
    (context,) = head_contexts(model, [ids], layer=1, head=0, top=1)
    row = capture(model, ids).decompose(by="head")["L1H0"]
    assert context.value == pytest.approx(row[context.window, context.position].norm().item(), abs=1e-12)


def test_the_induction_heads_sources():
    """The previous-token head reads from the token before; the induction head from what followed."""
    model, ids = induction(), periodic(7, 16, 5)
    for context in head_contexts(model, [ids], layer=0, head=0, top=10):
        assert context.source.position == max(0, context.position - 1)
    found = head_contexts(model, [ids], layer=1, head=0, top=16)
    later = [context for context in found if 5 < context.position <= 10]
    assert len(later) == 5
    for context in later:
        assert context.source.position == context.position - 4
        assert context.source.token == ids[0, context.position + 1]
        assert context.source.attention > 0.9998


def test_of_equal_places_the_first_ones_are_kept():
    """A text that says the same again and again; windows may be arrays, and come once."""
    model, ids = build(small()), tokens(small(), rows=1)
    again = iter([ids.repeat(3, 1).numpy()] * 2)
    first, second = neuron_contexts(model, again, layer=0, neuron=1, top=2)
    assert (first.value, first.position) == (second.value, second.position)
    assert (first.window, second.window) == (0, 1)


def test_windows_of_other_lengths():
    model, ids = build(small()), tokens(small(), rows=3)
    found = neuron_contexts(model, [ids[:, :4], ids[:1, :2], ids], layer=0, neuron=1, top=100)
    assert len(found) == 3 * 4 + 2 + 3 * 7
    assert {context.window for context in found} == set(range(7))


def test_the_model_keeps_its_mode_and_later_blocks_are_not_run():
    model = build(small(dropout=0.5)).train()
    with torch.no_grad():
        for parameter in model.blocks[2].parameters():
            parameter.fill_(torch.nan)
    first, second = (head_contexts(model, [tokens(small())], layer=1, head=1, top=1) for _ in range(2))
    assert first == second
    assert all(module.training for module in model.modules())


def test_bad_input_is_refused():
    model, ids = build(small()), [tokens(small())]
    with pytest.raises(ConfigError, match="layer: 3 is not in this model, which has 3, from 0"):
        neuron_contexts(model, ids, layer=3, neuron=0)
    with pytest.raises(ConfigError, match="neuron: 48 is not in this model, which has 48"):
        neuron_contexts(model, ids, layer=0, neuron=48)
    with pytest.raises(ConfigError, match="head: 2 is not in this model, which has 2"):
        head_contexts(model, ids, layer=0, head=2)
    with pytest.raises(ConfigError, match="block 0 has no MLP"):
        neuron_contexts(build(small(d_mlp=0)), ids, layer=0, neuron=0)
    with pytest.raises(ConfigError, match="top: 0 positions"):
        head_contexts(model, ids, layer=0, head=0, top=0)
    with pytest.raises(DataError, match="windows: empty"):
        head_contexts(model, iter([]), layer=0, head=0)
    with pytest.raises(DataError, match=r"token id 11 is outside 0\.\.10"):
        head_contexts(model, [torch.tensor([[11]])], layer=0, head=0)
