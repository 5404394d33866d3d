"""Virtual weights: the product of a writer and a reader, its strongest entries, and its strength against chance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import SKIP_DIRECT, induction, skip_trigram
from mainstem.circuits.virtual import virtual
from mainstem.circuits.weights import check_path, reader, readers, writer, writers
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.sublayer import Constant
from models import ROWS, build, configs, error, few, small


@few
@given(st.data(), st.sampled_from(ROWS))
def test_virtual_weights_are_the_product(data, residual):
    """Norm, singular values and entries of every path are those of the dense product."""
    model = build(data.draw(configs(residual=residual)))
    source = data.draw(st.sampled_from(list(writers(model).values())))
    for target in readers(model).values():
        try:
            skips = check_path(model, source, target)
        except ConfigError:
            continue
        found = virtual(model, source.label, target.label)
        dense = skips * source.matrix @ target.matrix
        assert error(found.matrix.dense(), dense) < 1e-10
        assert error(found.matrix.norm(), dense.norm()) < 1e-10
        assert found.top(3)[0].value == pytest.approx(dense.flatten()[dense.abs().argmax()].item())
        assert 0 <= found.score <= 1 + 1e-12
        assert set(found.notes) == {*source.notes, *target.notes}


def test_the_direct_path_is_the_model_without_blocks():
    """embed -> unembed, (V, V): logits of each token, up to ln_f's scale."""
    model = build(small("none", n_layer=0, position="none", n_ctx=11))
    found = virtual(model, "embed", "unembed")
    assert error(found.matrix.dense(), model(torch.arange(11)[None])[0]) < 1e-12
    bigrams = virtual(skip_trigram(), "embed", "unembed")
    assert error(bigrams.matrix.dense(), SKIP_DIRECT) < 1e-15
    assert {entry[1:] for entry in bigrams.top(2)} == {tuple(place) for place in SKIP_DIRECT.nonzero().tolist()}
    assert [entry.value for entry in bigrams.top(3)] == [1, 1, 0]


@pytest.mark.parametrize(("norm", "width"), [("layernorm", 7), ("rmsnorm", 8)])
def test_random_weights_score_as_chance(norm, width):
    """1 / sqrt(C), and C - 1 in place of C where the reader takes the mean away: in the mean of squares, over seeds."""
    config = small(norm=norm, vocab_size=40, d_model=8, n_layer=2, tie_embeddings=False)
    models = [GPT(config, seed).double() for seed in range(150)]
    for writes, reads in (("L0H0", "L1H0.V"), ("0_mlp_out", "1_mlp_in"), ("L0H0", "unembed")):
        found = [virtual(model, writes, reads) for model in models]
        assert found[0].chance == width**-0.5
        square = sum(one.score**2 for one in found) / len(found)
        assert square**0.5 == pytest.approx(found[0].chance, rel=0.05)


def test_a_skip_multiplies_what_passes_it_and_not_what_it_adds_to():
    model = build(small("none"))
    routes = ("0_mlp_in", "L1H0.V", "1_mlp_in", "unembed")
    before = {reads: virtual(model, "L0H0", reads).matrix.dense() for reads in routes}
    model.blocks[1].res_1.skip = Constant(0.5)
    for reads, dense in before.items():
        passes = reads in ("1_mlp_in", "unembed")
        assert error(virtual(model, "L0H0", reads).matrix.dense(), 0.5 * dense if passes else dense) < 1e-12


def test_what_a_reader_reads_of_the_induction_model():
    """The second head's keys read the first one's write, its queries and values none of it."""
    model = induction(V=7)
    assert virtual(model, "L0H0", "L1H0.K").score == pytest.approx(7**-0.5)
    assert virtual(model, "L0H0", "L1H0.Q").score == 0
    assert virtual(model, "L0H0", "L1H0.V").score == 0


def test_labels_and_paths_are_checked():
    model = build(small("post"))
    with pytest.raises(ConfigError, match="writer: 'embedd' is not in this model; did you mean 'embed'"):
        virtual(model, "embedd", "unembed")
    with pytest.raises(ConfigError, match="reader: 'unembd' is not in this model; did you mean 'unembed'"):
        virtual(model, "embed", "unembd")
    with pytest.raises(ConfigError, match="L0H0 -> unembed: no virtual weights"):
        virtual(model, "L0H0", "unembed")
    assert reader(model, "L0H0.V").notes == writer(model, "L0H0").notes == ()
