"""Virtual weights: the product of a writer and a reader, its strongest entries, and its strength against chance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import SKIP_DIRECT, copying, induction, skip_trigram
from mainstem.circuits.composition import composition
from mainstem.circuits.head_weights import ov, qk
from mainstem.circuits.paths import check_path, mean_is_read
from mainstem.circuits.virtual import virtual
from mainstem.circuits.weights import centred, reader, readers, writer, writers
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.sublayer import Constant
from models import ROWS, build, configs, error, few, small


def ends(model, source, target):
    """A writer and a reader as plain matrices, heads whole."""
    left, right = source.matrix, target.matrix
    if source.label[0] == "L":
        layer, head = int(source.label[1]), int(source.label[3])
        left = ov(model, layer, head).dense()
    if target.label[0] == "L":
        layer, head, role = int(target.label[1]), int(target.label[3]), target.label[5]
        right = {"Q": qk(model, layer, head).dense(), "K": qk(model, layer, head).dense().T}.get(role)
        if right is None:
            right = ov(model, layer, head).dense()
            right = right if mean_is_read(model) else centred(right)
    return centred(left) if target.centres else left, right


@few
@given(st.data(), st.sampled_from(ROWS))
def test_virtual_weights_are_the_product(data, residual):
    """Norm, score, singular values and entries of every path are those of the dense product."""
    model = build(data.draw(configs(residual=residual)))
    source = data.draw(st.sampled_from(list(writers(model).values())))
    for target in readers(model).values():
        try:
            skips = check_path(model, source, target)
        except ConfigError:
            continue
        found = virtual(model, source.label, target.label)
        left, right = ends(model, source, target)
        dense = skips * left @ right
        assert error(found.matrix.dense(), dense) < 1e-10
        assert error(found.matrix.norm(), dense.norm()) < 1e-10
        assert found.score == pytest.approx((dense.norm() / abs(skips) / left.norm() / right.norm()).item())
        if "L" in source.label + target.label:
            with pytest.raises(ConfigError, match=r"L\dH\d.*: the channels of a head have no basis"):
                found.top(3)
        else:
            assert found.top(3)[0].value == pytest.approx(dense.flatten()[dense.abs().argmax()].item())
        assert {*source.notes, *target.notes} <= set(found.notes)


@few
@given(st.data(), st.sampled_from(ROWS), st.integers(1, 4))
def test_between_heads_the_score_is_that_of_composition(data, residual, far):
    model = build(data.draw(configs(residual=residual, n_layer=3)))
    rotary = model.config.position == "rotary"
    try:
        scores = composition(model, far if rotary else None)
    except ConfigError:
        return
    for i, writes in enumerate(scores.labels):
        for j, reads in enumerate(scores.labels):
            for mode in "QKV" if scores.scores["V"][i, j].isfinite() else "":
                found = virtual(model, writes, f"{reads}.{mode}", far if rotary and mode != "V" else None)
                assert found.score == pytest.approx(scores.scores[mode][i, j].item(), abs=1e-10)
                assert found.chance == scores.chance
                assert found.offset == (far if rotary and mode != "V" else None)


@few
@given(configs(n_layer=2, residual="pre", n_head=2))
def test_the_directions_of_a_path_between_heads(config):
    """Each side's tokens are those highest above the mean, by W_E or W_U along the singular vectors."""
    model = build(config)
    W_E, W_U = writer(model, "embed").matrix, reader(model, "unembed").matrix
    for mode in "QKV":
        found = virtual(model, "L0H1", f"L1H0.{mode}")
        U, S, Vh = torch.linalg.svd(found.matrix.dense())
        directions = found.directions(count=2, units=3)
        assert [d.side for d in directions] == [1, -1, 1, -1]
        for index, direction in enumerate(directions):
            left, right = U[:, index // 2], Vh[index // 2]
            assert direction.value == pytest.approx(S[index // 2].item())
            at = W_E @ left
            sign = 1 if at[direction.writes[0]] - at.mean() > 0 and at.argmax() == direction.writes[0] else -1
            for units, by in (
                (direction.writes, W_E @ left),
                (direction.reads, (W_U.T if mode == "V" else W_E) @ right),
            ):
                above = sign * (by - by.mean())
                assert units == [i for i in above.topk(3).indices.tolist() if above[i] > 0]


def test_a_direction_between_units_holds_units():
    """Of an embedding, tokens as they stand in the singular vector; of neurons, their indices."""
    model = build(small())
    found = virtual(model, "embed", "L0H0.V")
    U, *_ = torch.linalg.svd(found.matrix.dense())
    plus, minus = found.directions(count=1, units=2)
    assert sorted((plus.writes, minus.writes)) == sorted((side * U[:, 0]).topk(2).indices.tolist() for side in (1, -1))
    assert (found.writer.units, found.reader.units) == ("token", "token")
    neurons = virtual(model, "0_mlp_out", "L1H0.Q")
    assert neurons.writer.units == "neuron"
    assert len(neurons.directions(count=1, units=48)[0].writes) < 48  # the others stand on the other side


def test_what_a_head_copies_is_the_same_token_at_both_ends():
    """OV of the copying model, read from the embedding and written to the logits."""
    found = virtual(copying(), "embed", "L0H0.V")
    directions = found.directions(count=5, units=1)
    assert len(directions) == 10
    for direction in directions:
        assert direction.writes[:1] == direction.reads[:1] or not direction.writes


def test_where_no_path_leads_a_head_has_no_tokens_and_the_reason_is_said():
    found = virtual(build(small("mix", n_layer=4)), "L1H0", "L2H0.K")
    assert any("embed -> L1H0.V: no virtual weights" in note for note in found.notes)
    assert any("embed -> L2H0.Q: no virtual weights" in note for note in found.notes)
    assert {(*d.writes, *d.reads) for d in found.directions()} == {()}


def test_queries_and_keys_are_at_an_offset():
    model = build(small(position="rotary"))
    near, far = virtual(model, "L0H0", "L1H0.K"), virtual(model, "L0H0", "L1H0.K", offset=4)
    assert (near.offset, far.offset) == (1, 4)
    assert any(note.startswith("QK at offset 4") for note in far.notes)
    assert near.score != far.score
    with pytest.raises(ConfigError, match=r"offset: 4 is not supported for L1H0\.V; it is for rotary queries and keys"):
        virtual(model, "L0H0", "L1H0.V", offset=4)
    with pytest.raises(ConfigError, match="offset: 4 is not supported"):
        virtual(build(small()), "L0H0", "L1H0.K", offset=4)


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
