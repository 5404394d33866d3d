"""Bigrams from the weights: exact where nothing else speaks, and the strongest of them found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import bigram
from mainstem.circuits import chunks
from mainstem.circuits.bigrams import bigrams
from mainstem.circuits.virtual import virtual
from mainstem.errors import ConfigError
from models import UNCUT, build, configs, error, few, normal, small


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
@given(configs(n_layer=0, residual="none"), st.sampled_from((1, 7, 500)), st.sampled_from((1, 30, 1 << 22)))
def test_top_bigrams_stand_highest_above_their_rows(config, count, chunk):
    table = bigrams(build(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", chunk)
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
    counts = normal(6, 6).exp()
    assert error(bigrams(bigram(counts)).row(2).softmax(-1), counts[2] / counts[2].sum()) < 1e-12


def test_the_top_of_one_token_is_that_of_its_row():
    table = bigrams(build(small("none")))
    row = table.row(4) - table.row(4).mean()
    assert [entry.token for entry in table.top(3, token=4)] == [4, 4, 4]
    assert [entry.logit for entry in table.top(3, token=4)] == pytest.approx(row.topk(3).values.tolist(), abs=1e-12)
    assert [entry.out for entry in table.top(3, token=4)] == row.topk(3).indices.tolist()


def test_bad_input_is_refused():
    table = bigrams(build(small()))
    with pytest.raises(ConfigError, match=r"token: id 11 is outside 0\.\.10"):
        table.row(11)
    with pytest.raises(ConfigError, match=r"token: id -1 is outside 0\.\.10"):
        table.top(3, token=-1)
    with pytest.raises(ConfigError, match="count: 0 is not supported"):
        table.top(0)
    with pytest.raises(ConfigError, match="embed -> unembed: no virtual weights"):
        bigrams(build(small("post")))
