"""The residual table: its rows against the papers' constants. (What each row computes: model/test_sublayer.py.)"""

import math

import pytest

from mainstem.errors import ConfigError
from mainstem.residuals import RESIDUALS, row

NORMS = {
    "pre": "ln_in ln_f",
    "post": "ln_add",
    "sandwich": "ln_in ln_out ln_f",
    "reordered": "ln_out ln_f",
    "none": "",
    "deepnorm": "ln_add",
    "rezero": "",
    "layerscale": "ln_in ln_f",
    "lns": "ln_in ln_f",
    "mix": "ln_in ln_f",  # beyond its first quarter
    "no_skip": "ln_in ln_f",
    "no_skip_bare": "",
}


def test_the_table_has_these_rows_and_each_has_its_norms():
    found = {}
    for name, residual in RESIDUALS.items():
        slots = residual.slots(7, 8)
        names = [slot for slot in ("ln_in", "ln_out", "ln_add") if getattr(slots, slot)]
        found[name] = " ".join([*names, *["ln_f"] * residual.ln_f])
    assert found == NORMS


def test_names_and_sources():
    for name, residual in RESIDUALS.items():
        assert residual.name == name
        assert residual.source


@pytest.mark.parametrize("depth", [1, 6, 12, 100])
def test_deepnorm_alpha_and_beta(depth):
    """DeepNet, table 1, decoder-only: alpha = (2 M)^(1/4), beta = (8 M)^(-1/4)."""
    assert row("deepnorm").slots(0, depth).skip ** 4 == pytest.approx(2 * depth)
    assert row("deepnorm").branch_gain(depth) ** -4 == pytest.approx(8 * depth)


def test_layer_norm_scaling_counts_blocks_from_1():
    assert [row("lns").slots(i, 9).damp for i in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3])


def test_layerscale_starts_by_depth():
    starts = {depth: row("layerscale").slots(0, depth).gain_init for depth in (1, 18, 19, 24, 25, 48)}
    assert starts == {1: 0.1, 18: 0.1, 19: 1e-5, 24: 1e-5, 25: 1e-6, 48: 1e-6}


def test_rezero_starts_at_0_with_one_scalar():
    slots = row("rezero").slots(3, 12)
    assert (slots.gain, slots.gain_init) == ("scalar", 0)


@pytest.mark.parametrize(("depth", "posts"), [(1, 1), (4, 1), (5, 2), (12, 3), (24, 6)])
def test_mix_is_post_in_its_first_quarter_rounded_up(depth, posts):
    slots = [row("mix").slots(i, depth) for i in range(depth)]
    assert [s.ln_add for s in slots] == [True] * posts + [False] * (depth - posts)
    assert [s.ln_in for s in slots] == [False] * posts + [True] * (depth - posts)


def test_output_projections_are_scaled_by_depth_but_for_two_rows():
    for name, residual in RESIDUALS.items():
        expected = 1 if name in ("deepnorm", "lns") else 1 / math.sqrt(24)
        assert residual.out_scale(12) == pytest.approx(expected), name


def test_skips_and_other_constants_are_1_elsewhere():
    for name, residual in RESIDUALS.items():
        slots = residual.slots(2, 8)
        assert slots.skip == {"deepnorm": 2.0, "no_skip": 0.0, "no_skip_bare": 0.0}.get(name, 1.0)
        assert (slots.damp == 1) == (name != "lns")
        assert (slots.gain == "one") == (name not in ("rezero", "layerscale"))


def test_an_unknown_row_names_the_nearest():
    with pytest.raises(ConfigError, match="'deepnrm'; did you mean 'deepnorm'"):
        row("deepnrm")
