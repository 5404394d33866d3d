"""Spectra of heads are those of the dense circuits; a head that copies scores 1, one that suppresses -1."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import copying, induction
from mainstem.circuits.head_weights import ov, qk
from mainstem.circuits.paths import mean_is_read
from mainstem.circuits.spectra import matching, positive_share, spectra
from mainstem.circuits.weights import centred, reader, writer
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from models import UNCUT, build, configs, error, few, small

ROWS = tuple(row for row in UNCUT if row != "mix")


@few
@given(st.data(), st.sampled_from(ROWS))
def test_spectra_are_the_dense_ones(data, residual):
    model = build(data.draw(configs(residual=residual)))
    found, D = spectra(model), model.config.d_head
    W_E, W_U = writer(model, "embed").matrix, reader(model, "unembed").matrix
    assert found.reasons == {}
    for index, label in enumerate(found.labels):
        layer, head = divmod(index, model.config.n_head)
        assert label == f"L{layer}H{head}"
        written, read = ov(model, layer, head).dense(), qk(model, layer, head).dense()
        written = written if mean_is_read(model) else centred(written)
        seen = W_E @ written @ W_U
        assert error(found.copying[index], positive_share(torch.linalg.eigvals(seen))) < 1e-7
        assert error(found.qk_singular_values[index], torch.linalg.svdvals(read)[:D]) < 1e-10
        assert found.ov_eigenvalues.shape == (len(found.labels), D)
        assert error(found.ov_eigenvalues[index].sum().real, written.trace()) < 1e-9


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_head_that_copies_and_one_that_suppresses(sign):
    found = spectra(copying(sign))
    assert found.copying.tolist() == [pytest.approx(sign)]
    assert error(found.ov_eigenvalues[0], torch.full((5,), sign, dtype=torch.complex128)) < 1e-12
    assert error(found.ov_singular_values[0], torch.ones(5)) < 1e-12


def test_random_heads_do_neither():
    model = GPT(small("none", d_model=64, n_head=4, d_head=16, vocab_size=100, init="width", tie_embeddings=False))
    scores = spectra(model.double()).copying
    assert abs(scores.mean()) < 0.1
    assert scores.abs().max() < 0.4


def test_an_induction_head_copies_and_matches():
    """And the head before it does neither: the logits do not read what it writes."""
    model = induction(V=7)
    scores = spectra(model).copying
    assert scores[1].item() == pytest.approx(1)
    assert scores[0].isnan()  # all eigenvalues are 0
    assert matching(model, "L0H0", "L1H0") == pytest.approx(1)


@few
@given(configs(n_layer=2, residual="pre"), st.integers(1, 4))
def test_matching_is_that_of_the_dense_circuit(config, offset):
    model = build(config)
    offset = offset if config.position == "rotary" else None
    W_E = writer(model, "embed").matrix
    moved = W_E @ ov(model, 0, 0).dense()
    dense = W_E @ qk(model, 1, 0, offset).dense() @ moved.T
    expected = positive_share(torch.linalg.eigvals(dense)).item()
    assert matching(model, "L0H0", "L1H0", offset) == pytest.approx(expected, abs=1e-6)


def test_without_a_path_there_is_no_copying_score():
    model = build(small("post"))
    found = spectra(model)
    assert found.copying.isnan().all()
    assert found.ov_singular_values.isfinite().all()
    assert found.reasons[0].startswith("blocks.0.res_1.ln_add")
    assert set(found.reasons) == {0, 1, 2}
    assert found.notes == (f"3 of 3 blocks lack a copying score, for {found.reasons[2]}",)  # one line a cause
    assert set(spectra(build(small("no_skip", d_mlp=0, n_layer=1))).reasons) == set()
    with pytest.raises(ConfigError, match="no virtual weights"):
        matching(model, "L0H0", "L1H0")


def test_what_qk_leaves_open_is_said():
    found = spectra(build(small(position="rotary", qk_norm=True)), offset=3)
    assert found.offset == 3
    assert found.notes[0].startswith("QK at offset 3")
    assert found.notes[1].startswith("QK: direction only")
    assert spectra(build(small(position="rotary"))).offset == 1


def test_bad_input_is_refused():
    model = build(small())
    with pytest.raises(ConfigError, match=r"L1H0 -> L0H1\.K: no virtual weights, for L0H1\.K reads before"):
        matching(model, "L1H0", "L0H1")
    with pytest.raises(ConfigError, match=r"'L7H0\.V' is not in this model; did you mean"):
        matching(model, "L7H0", "L1H0")
    with pytest.raises(ConfigError, match="has no heads"):
        spectra(build(small(n_layer=0)))
    with pytest.raises(ConfigError, match="offset: 1 is not supported"):
        spectra(model, offset=1)
