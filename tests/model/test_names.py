"""Names: what is spelled is read again, and every point and label of a model goes there and back."""

import pytest

from mainstem.model import names
from mainstem.model.names import Label, parse_label
from mainstem.model.stack import join_index, level, levels
from models import ROWS, build, small


@pytest.mark.parametrize("residual", ROWS)
def test_every_point_of_a_model_is_spelled_as_it_is_read(residual):
    for point in build(small(residual)).points():
        block, name = names.split(point)
        assert names.point(name, block) == point
        assert (block is None) == (not point.startswith("blocks."))


@pytest.mark.parametrize(
    ("text", "label", "kind"),
    [
        (names.head(3, 12), Label(3, "head", 12), "attn"),
        (names.head(0, 1, "q"), Label(0, "head", 1, "q"), "attn"),
        (names.neuron(2, 170), Label(2, "neuron", 170), "mlp"),
        (names.write(10, "attn"), Label(10, "attn_out"), "attn"),
        (names.row(1, "mlp.b_out"), Label(1, "mlp.b_out"), "mlp"),
        (names.row(4, "attn.ln_add.bias"), Label(4, "attn.ln_add.bias"), "attn"),
        ("embed", Label(None, "embed"), None),
        ("pos_embed", Label(None, "pos_embed"), None),
        ("ln_f.bias", Label(None, "ln_f.bias"), None),
    ],
)
def test_labels_are_read_as_they_are_spelled(text, label, kind):
    assert parse_label(text) == label
    assert label.kind == kind


def test_the_spellings_are_those_of_the_field():
    assert names.point("resid_pre", 3) == "blocks.3.resid_pre"
    assert names.point("embed") == "embed"
    assert names.head(3, 1, "q") == "L3H1.q"
    assert names.neuron(3, 17) == "L3N17"
    assert names.write(3, "attn") == "3_attn_out"


@pytest.mark.parametrize("fields", [{}, {"d_mlp": 0}, {"n_layer": 0}])
def test_the_stream_has_a_level_for_each_count_of_joins(fields):
    """By all its names: what block 0 leaves is what block 1 reads."""
    model = build(small(**fields))
    joins, stream = model.joins(), levels(model)
    assert len(stream) == len(joins) + 1
    assert stream[-1][0] == "resid_final"
    for passed, site in enumerate(joins):
        assert level(model, site.reads) == passed
        assert level(model, site.after) == passed + 1
        assert level(model, site.write) is None
    assert {name for same in stream for name in same} <= set(model.points())


@pytest.mark.parametrize("fields", [{}, {"d_mlp": 0}])
def test_a_point_belongs_to_one_join(fields):
    model = build(small(**fields))
    joins = model.joins()
    assert join_index(model, "embed") == -1
    assert join_index(model, "resid_final") == len(joins)
    for index, site in enumerate(joins):
        inside = [site.point(f"{site.kind}.{name}") for name in {"attn": ("q", "z"), "mlp": ("post",)}[site.kind]]
        for point in (site.reads, *inside, site.write):
            assert join_index(model, point) == index


@pytest.mark.parametrize("residual", ROWS)
def test_joins_say_which_norms_they_have(residual):
    model = build(small(residual))
    for site in model.joins():
        for slot in ("ln_in", "ln_out", "ln_add"):
            point = site.scale(slot)
            assert (point is None) == (not getattr(site.join, slot).points())
            assert point is None or point in model.points()
