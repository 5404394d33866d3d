"""N-grams from the weights: exact where nothing else speaks, and what the model says in the contexts they describe."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import AT, BAY, IN, KEEP, MIND, bigram, skip_trigram
from mainstem.circuits import ngrams
from mainstem.circuits.ngrams import bigrams, contributions, skip_trigrams
from mainstem.circuits.virtual import virtual
from mainstem.circuits.weights import ov, qk, reader, writer
from mainstem.errors import ConfigError
from mainstem.stream.capture import capture
from models import ROWS, UNCUT, B, T, build, configs, error, few, small, tokens

CHUNKS = st.sampled_from((1, 30, 1 << 22))
BARE = ("none", "rezero", "no_skip_bare")


@few
@given(configs(n_layer=0, residual="none", position="none"))
def test_bigrams_are_the_logits_of_a_model_without_blocks(config):
    model = build(config)
    table, every = bigrams(model), torch.arange(config.vocab_size)
    assert error(table.matrix.dense(), model(every[:, None])[:, 0]) < 1e-12
    assert torch.equal(table.row(3), table.matrix.left[3] @ table.matrix.right)
    assert table.notes == ()


@few
@given(st.data(), st.sampled_from(UNCUT))
def test_bigrams_are_the_virtual_weights_of_the_direct_path(data, residual):
    model = build(data.draw(configs(residual=residual, lm_head_bias=False)))
    if residual == "mix":
        with pytest.raises(ConfigError, match=r"embed -> unembed: no virtual weights, for blocks\.0\.res_1\.ln_add"):
            bigrams(model)
        return
    table, path = bigrams(model), virtual(model, "embed", "unembed")
    assert error(table.matrix.dense(), path.matrix.dense()) < 1e-12
    assert table.notes[: len(path.notes)] == path.notes


@few
@given(configs(n_layer=0, residual="none"), st.sampled_from((1, 7, 500)), CHUNKS)
def test_top_bigrams_stand_highest_above_their_rows(config, count, chunk):
    table = bigrams(build(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "CHUNK", chunk)
        found = table.top(count)
    dense = table.matrix.dense()
    dense = dense - dense.mean(1, keepdim=True)
    assert len(found) == min(count, dense.numel())
    expected = dense.flatten().sort(descending=True).values[:count]
    assert error(torch.tensor([entry.logit for entry in found], dtype=torch.float64), expected) < 1e-12
    for token, out, logit in found:
        assert logit == pytest.approx(dense[token, out].item(), abs=1e-12)


def test_a_norms_scale_and_the_biases_behind_it_are_noted():
    notes = bigrams(build(small("pre"))).notes
    assert "ln_f.scale" in notes[0]
    assert notes[1:] == ("without the biases of ln_f and lm_head",)
    assert len(bigrams(build(small("pre", norm="rmsnorm"))).notes) == 1


def test_the_table_of_a_known_bigram_model():
    counts = torch.rand(6, 6, dtype=torch.float64) + 0.1
    assert error(bigrams(bigram(counts)).row(2).softmax(-1), counts[2] / counts[2].sum()) < 1e-12


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

    before, after = (skip_trigrams(model, count=V**3, context=n).rows for n in (V, V + 1))
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
        patch.setattr(ngrams, "CHUNK", chunk)
        found = skip_trigrams(model, count=20, context=context, offset=offset)
    expected = dense_skip_trigrams(model, context, offset)
    best = sorted(expected.values(), reverse=True)[:20]
    assert [row.gain for row in found.rows] == pytest.approx([gain for gain, *_ in best], abs=1e-12)
    for row in found.rows:
        assert [row.gain, row.qk, row.ov] == pytest.approx(expected[row[:4]], abs=1e-10)


def test_keep_in_mind_and_keep_at_bay():
    """And the bug: the head cannot but know "keep ... in bay", which nobody says."""
    found = [row[:3] for row in skip_trigrams(skip_trigram(), count=4).rows]
    assert set(found[:2]) == {(KEEP, IN, MIND), (KEEP, AT, BAY)}
    assert set(found[2:]) == {(KEEP, IN, BAY), (KEEP, AT, MIND)}


def test_few_candidates_are_the_best_ones(monkeypatch):
    """A tenth of the pairs holds the strongest triple."""
    model = build(small("none", n_layer=1, d_mlp=0, vocab_size=30, position="none"))
    monkeypatch.setattr(ngrams, "CANDIDATES", 1)
    few_pairs = skip_trigrams(model, count=90).rows
    monkeypatch.setattr(ngrams, "CANDIDATES", 900)
    every_pair = skip_trigrams(model, count=90).rows
    assert few_pairs[0] == every_pair[0]
    assert len({row[:4] for row in few_pairs} & {row[:4] for row in every_pair}) > 60


def test_what_a_reading_leaves_out_is_said():
    assert skip_trigrams(build(small("none", n_layer=1, d_mlp=0, position="none")), count=1).notes == ()
    notes = skip_trigrams(build(small("sandwich", position="rotary")), layer=1, count=1, offset=3).notes
    assert notes == (
        "every token is read 3 before its destination",
        "MLPs are left out",
        "block 1 reads the embeddings and is unembedded; other blocks are left out",
        "ov: up to the scales of res_1.ln_out, ln_f, positive numbers",
    )
    assert skip_trigrams(build(small()), count=1).notes[0].startswith("positions are left out")


def test_the_model_is_left_as_it_was():
    model = build(small("pre", dropout=0.5)).train()
    first, second = skip_trigrams(model, count=3), skip_trigrams(model, count=3)
    assert first.rows == second.rows
    assert all(module.training for module in model.modules())


@few
@given(st.data(), st.sampled_from(BARE), st.sampled_from((None, -1, slice(2, 5))))
def test_contributions_sum_to_the_logits(data, residual, pos):
    """Law 1, by path: direct, each head's with its recorded pattern, and biases."""
    model = build(data.draw(configs(residual=residual, n_layer=1, d_mlp=0)))
    terms = contributions(capture(model, tokens(model.config)), pos)
    assert terms.closing_error < 1e-10
    kept = (B, T) if pos is None else (B,) if pos == -1 else (B, 3)
    assert terms.values.shape == (len(terms.labels), *kept, model.config.vocab_size)
    assert sum(label.startswith("L0H") for label in terms.labels) == model.config.n_head


def test_contributions_of_padded_rows():
    model = build(small("none", n_layer=1, d_mlp=0))
    assert contributions(capture(model, [[1, 2, 3], [4, 5, 6, 7, 8]])).closing_error < 1e-12


@pytest.mark.parametrize(
    "change", [{"n_layer": 2}, {"n_layer": 0}, {"d_mlp": 8}, {"residual": "pre"}, {"residual": "post"}]
)
def test_contributions_of_another_model_are_refused(change):
    model = build(small(**{"residual": "none", "n_layer": 1, "d_mlp": 0} | change))
    with pytest.raises(ConfigError, match="only one attention-only block without norms has them"):
        contributions(capture(model, tokens(model.config)))


def test_bad_input_is_refused(monkeypatch):
    model = build(small())
    with pytest.raises(ConfigError, match=r"token: id 11 is outside 0\.\.10"):
        bigrams(model).row(11)
    with pytest.raises(ConfigError, match="count: 0 entries"):
        bigrams(model).top(0)
    with pytest.raises(ConfigError, match="count: 0 entries"):
        skip_trigrams(model, count=0)
    with pytest.raises(ConfigError, match="layer: 3 is not a block of this model, which has 3"):
        skip_trigrams(model, layer=3)
    with pytest.raises(ConfigError, match="context: 1 tokens leave no room"):
        skip_trigrams(model, context=1)
    with pytest.raises(ConfigError, match="offset: 2 has no meaning here"):
        skip_trigrams(model, offset=2)
    with pytest.raises(ConfigError, match="embed -> unembed: no virtual weights"):
        bigrams(build(small("post")))
    one = build(small("none", n_layer=1, d_mlp=0))
    monkeypatch.setattr(ngrams, "BUDGET", 1000)
    with pytest.raises(ConfigError, match="choose a position with pos="):
        contributions(capture(one, tokens(one.config)))
