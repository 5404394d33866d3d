"""What a word reads, by word: against vectors summed one by one."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError
from mainstem.results import plain
from mainstem.stream.analysis.flow import flow, grouped, moved
from mainstem.stream.analysis.token_trace import token_trace
from mainstem.stream.analysis.word_trace import by_word
from mainstem.stream.capture import capture
from mainstem.text.tokenizer import Bytes
from mainstem.text.units import Unit, find_word, words
from models import ROWS, T, build, configs, few, small, tokens

SENTENCE = "고양이가 창밖을 보았다"
SHAPE = {"vocab_size": 257, "n_ctx": 64, "n_layer": 2, "n_head": 3, "d_model": 24}


@torch.no_grad()
def given_plainly(trace, layer, row, key, query):
    """(H, C): what each head moves from one key to one query, as it is added."""
    block = trace.model.blocks[layer]
    attn, norm = block.attn, block.res_1.ln_out
    v, pattern = trace["v", layer][row, key], trace["pattern", layer][row, :, query, key]
    weight = attn.c_proj.weight.view(-1, attn.n_head, attn.d_head)
    vectors = torch.stack([pattern[h] * weight[:, h] @ v[h] for h in range(attn.n_head)])
    if list(norm.parameters()):
        if isinstance(norm, torch.nn.LayerNorm):
            vectors = vectors - vectors.mean(-1, keepdim=True)
        vectors = norm.weight * vectors / trace[f"blocks.{layer}.res_1.ln_out.scale"][row, query]
    return block.res_1.gain(vectors)


@settings(few, max_examples=4)
@given(configs(), st.integers(1, T - 2))
@pytest.mark.parametrize("residual", ["pre", "sandwich", "layerscale"])
def test_a_word_is_read_whole(residual, config, cut):
    """Weights are summed over its tokens, vectors too, before their norm is taken; both are means over the reader's."""
    config = config.replace(residual=residual)
    trace = capture(build(config), tokens(config))
    units = [Unit("a", 0, cut), Unit("b", cut, T)]
    word = Unit("c", cut, T)
    found = by_word(trace, word, 0, units, row=1)
    for index, unit in enumerate(units):
        by_query = [
            sum(given_plainly(trace, 0, 1, key, query) for key in range(unit.first, unit.last))
            for query in range(cut, T)
        ]
        vectors = torch.stack(by_query)  # (q, H, C)
        for h, head in enumerate(found.heads):
            read = head.reads[index]
            assert (read.text, read.first, read.last) == unit
            assert read.length == pytest.approx(vectors[:, h].norm(dim=-1).mean().item(), rel=1e-9)
            weights = trace["pattern", 0][1, h, cut:, unit.first : unit.last].sum(-1)
            assert read.weight == pytest.approx(weights.mean().item(), rel=1e-9)
        together = vectors.sum(1).norm(dim=-1).mean().item()
        assert found.together[index].length == pytest.approx(together, rel=1e-9)
        assert found.together[index].weight == pytest.approx(
            sum(head.reads[index].weight for head in found.heads) / config.n_head
        )


@pytest.mark.parametrize("residual", ROWS)
def test_what_bodark_reads(residual):
    """고양이가, 창밖을 and itself: the words are the sentence, and the weights sum to 1."""
    trace = capture(build(ModelConfig(**SHAPE, residual=residual)), SENTENCE, tokenizer=Bytes())
    ids = trace.ids[0].tolist()
    units = words(Bytes(), ids)
    assert [unit.text for unit in units] == ["고양이가", " 창밖을", " 보았다"]
    assert [unit.first for unit in units[1:]] + [len(ids)] == [unit.last for unit in units]
    for layer in range(2):
        found = by_word(trace, units[2], layer, units)
        by_units = grouped(flow(trace, layer).values[0], units)  # (H, U, U)
        for h, head in enumerate(found.heads):
            assert head.label == f"L{layer}H{h}"
            assert [read.text for read in head.reads] == [unit.text for unit in units]
            assert sum(read.weight for read in head.reads) == pytest.approx(1, abs=1e-12)
            assert [read.weight for read in head.reads] == pytest.approx(by_units[h, 2].tolist(), rel=1e-12)
        assert sum(read.weight for read in found.together) == pytest.approx(1, abs=1e-12)
        for read, bound in zip(found.together, grouped(moved(trace, layer)[0], units)[2].tolist(), strict=True):
            assert read.length <= bound * (1 + 1e-12)  # of a sum, at most the sum of the lengths
        first = by_word(trace, units[0], layer, units).together
        assert [read.weight for read in first] == pytest.approx([1, 0, 0])
        assert [read.length for read in first][1:] == [0, 0]


def test_a_word_within_the_words():
    """What `find_word` finds need not be a unit: here without the space before it; of one token, it is the token's."""
    trace = capture(build(ModelConfig(**SHAPE)), SENTENCE, tokenizer=Bytes())
    ids = trace.ids[0].tolist()
    word = find_word(Bytes(), ids, "보았다")
    assert (word.text, word.last - word.first) == ("보았다", 9)
    assert by_word(trace, word, 1, words(Bytes(), ids)).word == word
    singles = [Unit("", i, i + 1) for i in range(len(ids))]
    token = token_trace(trace, 20, 1)
    for head, found in zip(token.attention.heads, by_word(trace, singles[20], 1, singles).heads, strict=True):
        assert [read.weight for read in found.reads[:21]] == pytest.approx(head.pattern, rel=1e-12)


def test_a_padded_row_is_the_row_alone():
    model = build(ModelConfig(**SHAPE, residual="sandwich"))
    together = capture(model, ["창밖을", SENTENCE], tokenizer=Bytes())
    for row, text in enumerate(["창밖을", SENTENCE]):
        units = words(Bytes(), text.encode())
        found = by_word(together, units[-1], 1, units, row)
        alone = by_word(capture(model, text, tokenizer=Bytes()), units[-1], 1, units)
        for one, other in zip([*found.together, *found.heads[0].reads], [*alone.together, *alone.heads[0].reads],
                              strict=True):  # fmt: skip
            assert (one.weight, one.length) == pytest.approx((other.weight, other.length), rel=1e-9)


def test_a_cut_model_is_read_block_by_block():
    """Without its first block the second one stands first; it reads what it is given there."""
    model = build(ModelConfig(**SHAPE | {"n_layer": 3}))
    del model.blocks[0]
    trace = capture(model, SENTENCE, tokenizer=Bytes())
    units = words(Bytes(), trace.ids[0].tolist())
    found = by_word(trace, units[2], 1, units)
    assert found == by_word(trace, units[2], -1, units)
    by_units = grouped(flow(trace, 1).values[0], units)
    for h, head in enumerate(found.heads):
        assert [read.weight for read in head.reads] == pytest.approx(by_units[h, 2].tolist(), rel=1e-12)
    with pytest.raises(ConfigError, match="there is no block 2; the model has 2"):
        by_word(trace, units[2], 2, units)


def test_a_word_trace_is_json():
    trace = capture(build(small(vocab_size=257)), "a bc", tokenizer=Bytes())
    units = words(Bytes(), b"a bc")
    read = json.loads(json.dumps(plain(by_word(trace, units[1], 0, units)), allow_nan=False))
    assert read["word"] == {"text": " bc", "first": 1, "last": 4}
    assert [word["text"] for word in read["heads"][1]["reads"]] == ["a", " bc"]
    assert read["together"][0].keys() == {"text", "first", "last", "weight", "length"}


def test_what_is_not_there_is_named():
    trace = capture(build(small()), [[1, 2, 3], [4]])
    for word, units in ((Unit("x", 0, 2), []), (Unit("a", 0, 1), [Unit("x", 0, 2)])):
        with pytest.raises(ConfigError, match="units: 'x' is tokens 0 to 2, of 1"):
            by_word(trace, word, 0, units, row=1)
    with pytest.raises(ConfigError, match="row: 5 is out of range"):
        by_word(trace, Unit("x", 0, 2), 0, [], row=5)
