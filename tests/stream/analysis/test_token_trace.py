"""One token through one block: each number against the block's modules, run one after the other."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError
from mainstem.model.attention import rotate
from mainstem.model.mlp import ACTIVATIONS
from mainstem.results import plain
from mainstem.stream.analysis.token_trace import token_trace
from mainstem.stream.capture import capture
from mainstem.stream.decompose import decompose
from mainstem.text.tokenizer import Bytes
from mainstem.training.vitals import NEAR_ZERO
from models import ROWS, T, build, configs, few, small, tokens

SENTENCE = "고양이가 창밖을 보았다"
a_few = settings(few, max_examples=4)  # for each row of the table


def about(value):
    return pytest.approx(float(value), rel=1e-9, abs=1e-11)


def is_level(level, x):
    """Mean, deviation and norm of (C,), number by number."""
    values = x.tolist()
    mean = sum(values) / len(values)
    assert level.mean == about(mean)
    assert level.std == about(math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)))
    assert level.norm == about(math.sqrt(sum(v * v for v in values)))


def through(join, returned, part):
    """A part of what a branch returned, as `ln_out` with the whole's scale and the gain make it: (..., C)."""
    norm = join.ln_out
    if list(norm.parameters()):
        if isinstance(norm, torch.nn.LayerNorm):
            part, returned = part - part.mean(-1, keepdim=True), returned - returned.mean()
        part = norm.weight * part / (returned.square().mean() + norm.eps).sqrt()
    return join.gain(part)


def is_join(trace, join, x, returned):
    """The write, its addition and its norms. Returns the write and the stream after it."""
    write = join.gain(join.ln_out(returned))
    total = join.skip(x) + write
    steps = {"ln_in": (x, join.ln_in(x)), "ln_out": (returned, join.ln_out(returned))}
    steps["ln_add"] = (total, join.ln_add(total))
    assert [step.slot for step in trace.norms] == [slot for slot in steps if list(getattr(join, slot).parameters())]
    for step in trace.norms:
        is_level(step.before, steps[step.slot][0])
        is_level(step.after, steps[step.slot][1])
    assert trace.length == about(write.norm())
    assert trace.ratio == about(write.norm() / x.norm())
    assert trace.cosine == about(write @ x / (write.norm() * x.norm()))
    assert trace.checksum < 1e-12
    ones = torch.ones(len(x)).double()
    assert (trace.skip, trace.damp) == (join.skip(ones)[0].item(), join.damp(ones)[0].item())
    return write, join.ln_add(total)


def attention_of(model, block, stream, view):
    """Pattern (H, T, T) and z (T, H, D) of one row, head by head."""
    attn, T = block.attn, len(stream)
    read = block.res_1.damp(block.res_1.ln_in(stream))
    q, k, v = attn.c_attn(read).view(1, T, 3, attn.n_head, attn.d_head).unbind(2)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if view.rotation is not None:
        q, k = rotate(q, *view.rotation), rotate(k, *view.rotation)
    patterns = []
    for head in range(attn.n_head):
        scores = attn.scale * q[0, :, head] @ k[0, :, head].T
        patterns.append(scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1))
    pattern, v = torch.stack(patterns), v[0].transpose(0, 1)
    return pattern, (pattern @ v).transpose(0, 1)


@torch.no_grad()
def is_trace(trace, model, ids, layer, pos):
    """Every number of a trace, from the modules, for a row of ids (T,)."""
    stream, view = model.embed(ids[None])
    for block in model.blocks[:layer]:
        stream = block(stream, view)
    block = model.blocks[layer]
    stream = stream[0]
    is_level(trace.resid_pre, stream[pos])
    pattern, z = attention_of(model, block, stream, view)
    returned = block.attn.c_proj(z.flatten(1))
    write, mid = is_join(trace.attention.join, block.res_1, stream[pos], returned[pos])
    is_attention(trace.attention, model, block, pattern[:, pos], z[pos], write)
    if block.mlp is None:
        assert trace.mlp is trace.resid_mid is None
        is_level(trace.resid_post, mid)
        return
    is_level(trace.resid_mid, mid)
    read = block.res_2.damp(block.res_2.ln_in(mid))
    pre, *up = block.mlp.c_fc(read).split(model.config.d_mlp)
    post = ACTIVATIONS[model.config.activation](pre) * (up[0] if up else 1)
    returned = block.mlp.c_proj(post)
    _, last = is_join(trace.mlp.join, block.res_2, mid, returned)
    is_level(trace.resid_post, last)
    assert trace.mlp.neurons == model.config.d_mlp
    assert trace.mlp.above_zero == sum(value > 0 for value in pre.tolist())
    assert trace.mlp.near_zero == sum(abs(value) < NEAR_ZERO for value in post.tolist())
    by_neuron = through(block.res_2, returned, post[:, None] * block.mlp.c_proj.weight.T).norm(dim=1)
    assert [neuron.length for neuron in trace.mlp.top] == pytest.approx(by_neuron.sort(descending=True)[0][:8].tolist())
    for neuron in trace.mlp.top:
        found = (neuron.pre, neuron.post, neuron.length)
        assert found == (about(pre[neuron.index]), about(post[neuron.index]), about(by_neuron[neuron.index]))


def is_attention(trace, model, block, pattern, z, write):
    """Heads and biases: what each read and wrote; together they are the write."""
    attn, returned = block.attn, block.attn.c_proj(z.flatten())
    D, rows = attn.d_head, {}
    bias = torch.zeros(attn.n_head, D) if attn.c_attn.bias is None else attn.c_attn.bias[-attn.n_head * D :].view(-1, D)
    for head in trace.heads:
        h = int(head.write.label.split("H")[1])
        weight = attn.c_proj.weight[:, h * D : (h + 1) * D]
        rows[head.write.label] = through(block.res_1, returned, weight @ (z[h] - bias[h]))
        assert head.pattern == pytest.approx(pattern[h, : len(head.pattern)].tolist(), rel=1e-9)
        assert sum(head.pattern) == about(1)
        assert head.entropy == about(-sum(p * math.log(p) for p in head.pattern if p))
        assert [source.weight for source in head.top] == sorted(head.pattern, reverse=True)[:8]
        assert all(source.weight == head.pattern[source.pos] for source in head.top)
    if attn.c_proj.bias is not None:
        rows["b_V"] = through(block.res_1, returned, attn.c_proj(bias.flatten()) - attn.c_proj.bias)
        rows["b_O"] = through(block.res_1, returned, attn.c_proj.bias)
    if getattr(block.res_1.ln_out, "bias", None) is not None:
        rows["ln_out.bias"] = block.res_1.gain(block.res_1.ln_out.bias)
    parts = [head.write for head in trace.heads] + trace.biases
    assert [part.label.split("attn.")[-1] for part in parts] == list(rows)
    for part, row in zip(parts, rows.values(), strict=True):
        assert part.length == about(row.norm())
        assert part.share == about(row @ write / (write @ write))
        assert part.cosine == about(row @ write / (row.norm() * write.norm()))
    assert sum(part.share for part in parts) == about(1)
    assert trace.closing_error < 1e-12


@a_few
@given(st.data(), st.integers(0, T - 1))
@pytest.mark.parametrize("residual", ROWS)
def test_every_number_is_the_modules(residual, data, pos):
    """In every row of the table: gated and attention-only too, with and without biases, QK-norm and rotation."""
    model = build(data.draw(configs(residual=residual)))
    ids, layer = tokens(model.config), model.config.n_layer - 1
    trace = token_trace(capture(model, ids), pos, layer, row=1)
    assert (trace.layer, trace.row, trace.pos, trace.ids) == (layer, 1, pos, ids[1].tolist())
    is_trace(trace, model, ids[1], layer, pos)


@pytest.mark.parametrize("residual", ROWS)
def test_a_cut_model_is_traced_block_by_block(residual):
    """Blocks are those that are there, not those that the config speaks of; each keeps its own constants."""
    model = build(small(residual))
    del model.blocks[1]
    ids = tokens(model.config)
    trace = capture(model, ids)
    for layer in (0, 1):
        is_trace(token_trace(trace, -1, layer), model, ids[0], layer, T - 1)
    assert token_trace(trace, -1, -1) == token_trace(trace, -1, 1)
    with pytest.raises(ConfigError, match="there is no block 2; the model has 2"):
        token_trace(trace, -1, 2)


def test_a_model_of_few_digits_is_summed_in_float32():
    """The parts of a write in bfloat16 are of that precision; the numbers about them are not."""
    model = build(small(), torch.bfloat16)
    trace = capture(model, tokens(model.config))
    found = token_trace(trace, -1, 1)
    write, read = (trace[point, 1][0, -1].double() for point in ("attn_out", "resid_pre"))
    assert found.resid_pre.norm == pytest.approx(read.norm().item(), rel=1e-6)
    assert found.attention.join.cosine == pytest.approx((write @ read / (write.norm() * read.norm())).item(), rel=1e-5)
    for head in found.attention.heads:
        assert head.entropy == pytest.approx(-sum(p * math.log(p) for p in head.pattern if p), rel=1e-5)
    assert found.attention.closing_error < 0.02


@pytest.mark.parametrize("residual", ROWS)
def test_the_labels_are_those_of_a_decomposition(residual):
    """And the lengths, where no norm over the sum follows."""
    trace = capture(build(small(residual, d_mlp=0)), tokens(small()))
    found = token_trace(trace, -1, 2)
    parts = [head.write for head in found.attention.heads] + found.attention.biases
    terms = decompose(trace, by="head", pos=-1)
    if found.attention.join.norms[-1:] and found.attention.join.norms[-1].slot == "ln_add":
        assert {part.label for part in parts} < set(terms.labels)
    else:
        assert [part.length for part in parts] == pytest.approx(
            [terms[part.label][0].norm().item() for part in parts], rel=1e-10
        )


@pytest.mark.parametrize("residual", ["pre", "sandwich"])
def test_a_padded_row_is_the_row_alone(residual):
    """Positions and sources are counted without the padding."""
    model = build(small(residual, position="rotary", vocab_size=257))
    trace = capture(model, ["abc", "defghi"], tokenizer=Bytes())
    for row, text in enumerate(["abc", "defghi"]):
        for pos in (0, -1):
            found = token_trace(trace, pos, 1, row - 2)
            alone = token_trace(capture(model, text, tokenizer=Bytes()), pos, 1)
            assert (found.row, found.pos, found.ids) == (row, alone.pos, list(text.encode()))
            assert found.tokens == list(text)
            is_trace(found, model, torch.tensor(found.ids), 1, found.pos)
            for head, other in zip(found.attention.heads, alone.attention.heads, strict=True):
                assert head.pattern == pytest.approx(other.pattern, rel=1e-9)
                assert [source.token for source in head.top] == [source.token for source in other.top]


def test_a_trace_is_json():
    trace = capture(build(small(vocab_size=257)), "abc", tokenizer=Bytes())
    found = token_trace(trace, 2, 0, top=2)
    read = json.loads(json.dumps(plain(found), allow_nan=False))
    assert read == plain(found)
    assert read["attention"]["heads"][1]["write"]["label"] == "L0H1"
    assert len(read["mlp"]["top"]) == len(read["attention"]["heads"][0]["top"]) == 2
    assert len(read["attention"]["heads"][0]["pattern"]) == 3


def test_a_write_of_nothing_is_no_division_by_zero():
    """ReZero at its start, and a stream of zeros."""
    model = build(small("rezero"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = plain(token_trace(capture(model, tokens(model.config)), 3, 1))
    json.dumps(found, allow_nan=False)
    assert found["attention"]["join"]["cosine"] == found["mlp"]["join"]["ratio"] == 0


def test_checksums_are_done_again():
    """A stream that is not what the addition gives is seen."""
    trace = capture(build(small("post")), tokens(small()))
    trace.values["blocks.1.resid_mid"] = trace.values["blocks.1.resid_mid"] * 1.001
    found = token_trace(trace, 3, 1)
    assert found.attention.join.checksum > 1e-4
    assert found.mlp.join.checksum > 1e-4


def test_the_sentence_of_the_readme():
    """Each token of 보았다 through each block; a byte is a token, so the word has ten."""
    shape = {"vocab_size": 257, "n_ctx": 64, "n_layer": 2, "n_head": 3, "d_model": 24}
    trace = capture(build(ModelConfig(**shape)), SENTENCE, tokenizer=Bytes())
    for pos in range(-10, 0):
        for layer in range(2):
            found = token_trace(trace, pos, layer)
            assert found.attention.join.checksum < 1e-12
            assert found.mlp.join.checksum < 1e-12
            assert found.attention.closing_error < 1e-12
            assert all(sum(head.pattern) == about(1) for head in found.attention.heads)
    assert found.tokens[-9:] == [f"{syllable}({i}/3)" for syllable in "보았다" for i in (1, 2, 3)]


def test_what_is_not_there_is_named():
    trace = capture(build(small()), [[1, 2, 3], [4]])
    with pytest.raises(ConfigError, match=r"pos: 1 is out of range; the text has 1 positions"):
        token_trace(trace, 1, 0, row=1)
    with pytest.raises(ConfigError, match=r"row: 2 is out of range; the batch has 2 rows"):
        token_trace(trace, 0, 0, row=2)
    with pytest.raises(ConfigError, match=r"there is no block 3"):
        token_trace(trace, 0, 3)
