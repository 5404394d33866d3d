"""Skip-trigrams from the weights: what the model says in the contexts that they describe."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logits_by_path import contributions

from known import AT, BAY, IN, KEEP, MIND, skip_trigram
from mainstem.circuits import chunks
from mainstem.circuits import skip_trigrams as trigrams
from mainstem.circuits.head_weights import ov, qk
from mainstem.circuits.skip_trigrams import skip_trigrams
from mainstem.circuits.weights import reader, writer
from mainstem.errors import ConfigError
from models import ROWS, build, configs, error, few, record, small, tokens

CHUNKS = st.sampled_from((1, 30, 1 << 22))
BARE = ("none", "rezero", "no_skip_bare")


@few
@given(st.data(), st.sampled_from(ROWS))
def test_a_skip_trigram_is_what_the_model_says(data, residual):
    """One head and no positions: the contexts can be typed. Whatever norms, biases and gains a row has are in it.

    Without the source they have all other tokens and the destination, with it one more.
    """
    V = 5
    config = data.draw(configs(residual=residual, n_layer=1, n_head=1, d_mlp=0, position="none", vocab_size=V))
    model = build(config)

    def said(source, destination, *present):
        others = [token for token in range(V) if token != source]
        return model(torch.tensor([[*present, *others, destination]]))[0, -1].softmax(-1)

    before, after = (skip_trigrams(model, top=V**3, context=n).trigrams for n in (V, V + 1))
    assert len(before) == len(after) == V**3
    for row in before:
        assert row.before == pytest.approx(said(row.source, row.destination)[row.out].item(), abs=1e-12)
    for row in after:
        assert row.after == pytest.approx(said(row.source, row.destination, row.source)[row.out].item(), abs=1e-12)
    assert [row.gain for row in after] == sorted((row.gain for row in after), reverse=True)


def dense_skip_trigrams(model, context, offset):
    """{(source, destination, out, head): (gain, qk, ov)} of a model without norms and biases, by the whole tables."""
    H, V = model.config.n_head, model.config.vocab_size
    W_E, W_U = writer(model, "embed").matrix, reader(model, "unembed").matrix
    copies = [W_E @ ov(model, 0, head).dense() @ W_U for head in range(H)]  # [source, out]
    scores = [model.config.attn_scale * W_E @ qk(model, 0, head, offset).dense() @ W_E.T for head in range(H)]
    seen = [score - score.exp().mean(1, keepdim=True).log() for score in scores]  # [destination, source]

    def adds(head, destination, source, reads):
        """The logits that a head adds, (V,), from the tokens of the context with their shares of the attention."""
        weights = seen[head][destination].exp()
        share = (context - 1 - reads) * weights / (V - 1)
        share[source] = reads * weights[source]
        share[destination] += weights[destination]
        return share @ copies[head] / share.sum()

    found = {}
    for destination in range(V):
        for head, source in itertools.product(range(H), range(V)):
            base = W_E[destination] @ W_U + sum(adds(h, destination, source, reads=False) for h in range(H))
            logits = base - adds(head, destination, source, reads=False) + adds(head, destination, source, reads=True)
            gain = logits.softmax(-1) - base.softmax(-1)
            effect = copies[head][source] - copies[head].mean(0)
            effect = effect - effect.mean()
            for out in range(V):
                value = gain[out], seen[head][destination, source], effect[out]
                found[source, destination, out, f"L0H{head}"] = [v.item() for v in value]
    return found


@few
@given(st.sampled_from((None, 0, 4)), st.integers(2, 3), st.sampled_from((2, 3, 40)), CHUNKS)
def test_skip_trigrams_are_those_of_the_dense_tables(offset, n_head, context, chunk):
    """With all pairs as candidates, the ranking is the exhaustive one."""
    position = "none" if offset is None else "rotary"
    config = small("none", n_layer=1, d_mlp=0, bias=False, position=position, n_head=n_head, d_head=4, vocab_size=5)
    model = build(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", chunk)
        found = skip_trigrams(model, top=20, context=context, offset=offset)
    expected = dense_skip_trigrams(model, context, offset)
    best = sorted(expected.values(), reverse=True)[:20]
    assert [row.gain for row in found.trigrams] == pytest.approx([gain for gain, *_ in best], abs=1e-12)
    for row in found.trigrams:
        assert [row.gain, row.qk, row.ov] == pytest.approx(expected[row[:4]], abs=1e-10)


def test_keep_in_mind_and_keep_at_bay():
    """And the bug: the head cannot but know "keep ... in bay", which nobody says."""
    found = [row[:3] for row in skip_trigrams(skip_trigram(), top=4).trigrams]
    assert set(found[:2]) == {(KEEP, IN, MIND), (KEEP, AT, BAY)}
    assert set(found[2:]) == {(KEEP, IN, BAY), (KEEP, AT, MIND)}


@few
@given(configs(position="rotary", n_layer=1), st.integers(0, 6))
def test_queries_and_keys_are_those_of_the_model_so_far_apart(config, offset):
    """After QK-norm, then rotation; the products depend on the distance alone."""
    model, ids = build(config), tokens(config)
    points, block = record(model, ids), trigrams._SingleBlock(model, 0, 5, offset)
    q, k = points["blocks.0.attn.q"], points["blocks.0.attn.k"]  # (B, T, H, D)
    products = (q[:, offset:] * k[:, : 7 - offset]).sum(-1)
    assert error((block.q[ids][:, offset:] * block.k[ids][:, : 7 - offset]).sum(-1), products) < 1e-10


def test_few_candidates_are_the_best_ones(monkeypatch):
    """A tenth of the pairs holds the strongest triple, and far more of the others than a tenth."""
    model = build(small("none", n_layer=1, d_mlp=0, vocab_size=30, position="none"))
    monkeypatch.setattr(trigrams, "CANDIDATES", 1)
    few_pairs = skip_trigrams(model, top=90).trigrams
    monkeypatch.setattr(trigrams, "CANDIDATES", 900)
    every_pair = skip_trigrams(model, top=90).trigrams
    assert few_pairs[0] == every_pair[0]
    assert len({row[:4] for row in few_pairs} & {row[:4] for row in every_pair}) > 36


def test_what_a_reading_leaves_out_is_said():
    assert skip_trigrams(build(small("none", n_layer=1, d_mlp=0, position="none")), top=1).notes == ()
    found = skip_trigrams(build(small("sandwich", position="rotary")), layer=1, top=1, offset=3)
    assert found.offset == 3
    assert found.notes == (
        "QK at offset 3: the distance from the destination to every token",
        "MLPs are left out",
        "blocks other than block 1 are left out",
        "ov: up to the scales of res_1.ln_out, ln_f, positive numbers",
    )
    assert skip_trigrams(build(small()), top=1).notes[0].startswith("position embeddings are left out")


def test_the_model_is_left_as_it_was():
    model = build(small("pre", dropout=0.5)).train()
    first, second = skip_trigrams(model, top=3), skip_trigrams(model, top=3)
    assert first.trigrams == second.trigrams
    assert all(module.training for module in model.modules())


@few
@given(st.data(), st.sampled_from(BARE))
def test_logits_by_path_sum_to_the_logits(data, residual):
    """Law 1, by path: direct, each head's with its recorded pattern, and biases."""
    model = build(data.draw(configs(residual=residual, n_layer=1, d_mlp=0)))
    ids = tokens(model.config)
    rows = contributions(model, ids)
    assert sum(label.startswith("L0H") for label in rows) == model.config.n_head
    assert error(sum(rows.values()), model(ids)) < 1e-10


def test_bad_input_is_refused():
    model = build(small())
    with pytest.raises(ConfigError, match="n: 0 rows"):
        skip_trigrams(model, top=0)
    with pytest.raises(ConfigError, match="layer: 3 is not a block of this model, which has 3"):
        skip_trigrams(model, layer=3)
    with pytest.raises(ConfigError, match="context: 1 is too short"):
        skip_trigrams(model, context=1)
    with pytest.raises(ConfigError, match="offset: 2 is not supported"):
        skip_trigrams(model, offset=2)
    with pytest.raises(ConfigError, match="vocab_size: skip-trigrams need at least 2 tokens"):
        skip_trigrams(build(small(vocab_size=1)))
