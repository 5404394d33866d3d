"""Patching: every cell as a whole pass with that patch would have it, at a fraction of its cost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import induction, periodic
from mainstem.errors import ConfigError, DataError
from mainstem.model.gpt import GPT
from mainstem.stream.change import patch as patching
from mainstem.stream.change import rerun
from mainstem.stream.change.intervene import At, Intervention, resample
from mainstem.stream.change.patch import HEADS, STREAM, attribution_patch, patch, patch_grid
from mainstem.stream.change.rerun import recorded
from mainstem.stream.metrics import LogitDifference, Loss, TokenLogit, TokenLogProb
from models import ROWS, Change, T, build, configs, error, few, record, small, tokens

METRICS = st.sampled_from(
    (LogitDifference(3, 5), TokenLogit(2, pos=3), TokenLogProb(2), lambda logits: logits[:, 1:, 4].square().mean(1))
)
MASK = torch.tensor([[False] * 2 + [True] * 5, [True] * 7])


def pair(config):
    """Clean ids and corrupted ones, (B, T)."""
    clean = tokens(config)
    return clean, (3 * clean + 1) % config.vocab_size


def cell(model, clean, corrupt, metric, what, layer, column, mask, positions=range(T)):
    """The metric of one patched pass, run whole; by a tap of the test's own."""
    point = f"blocks.{layer}.{f'attn.{HEADS[what]}' if what in HEADS else what}"
    there = record(model, clean, **({} if mask is None else {"mask": mask}))[point]

    def put(x):
        x = x.clone()
        for pos in positions if what in HEADS else [column]:
            where = (slice(None), column, pos) if what == "pattern" else (slice(None), pos, column)
            where = where if what in HEADS else (slice(None), pos)
            x[where] = there[where]
        return x

    with torch.no_grad():
        return metric(model(corrupt, mask=mask, tap=Change({point: put})))


def whole(model, clean, corrupt, metric, what, mask, grid, **options):
    """The grid, cell by cell, (layers, columns, B)."""
    rows = [
        [cell(model, clean, corrupt, metric, what, layer, column, mask, **options) for column in grid.columns]
        for layer in grid.layers
    ]
    return torch.stack([torch.stack(row) for row in rows])


@few
@given(st.data(), METRICS, st.sampled_from((None, MASK)))
@pytest.mark.parametrize("residual", ROWS)
def test_a_grid_is_whole_passes_with_that_patch(residual, data, metric, mask):
    """Law: what is not run again, and what is run together, changes no number."""
    model = build(data.draw(configs(residual=residual)))
    what = data.draw(st.sampled_from([w for w in (*STREAM, *HEADS) if model.config.d_mlp or w not in ABSENT]))
    clean, corrupt = pair(model.config)
    with pytest.MonkeyPatch.context() as attributes:
        room = data.draw(st.sampled_from((1, 30, 100, 1000)))  # blocks and positions apart, some of them, all together
        attributes.setattr(rerun, "ROOM", room)
        attributes.setattr(patching, "ROOM", room)
        grid = patch_grid(model, clean, corrupt, metric, what, mask=mask)
    assert error(grid.clean, metric(model(clean, mask=mask))) < 1e-12
    assert error(grid.corrupt, metric(model(corrupt, mask=mask))) < 1e-12
    assert error(grid.effects + grid.corrupt, whole(model, clean, corrupt, metric, what, mask, grid)) < 1e-10


ABSENT = ("resid_mid", "mlp_out")
"""Without an MLP."""


@few
@given(configs(n_layer=3), METRICS, st.sampled_from(("attn_out", *HEADS)))
def test_a_part_of_a_grid(config, metric, what):
    """Of heads, the positions are those that are patched."""
    model = build(config)
    clean, corrupt = pair(config)
    grid = patch_grid(model, clean, corrupt, metric, what, layers=[-1, 1], positions=[5, -4])
    assert grid.layers == [1, 2]
    assert grid.columns == (list(range(config.n_head)) if what in HEADS else [3, 5])
    expected = whole(model, clean, corrupt, metric, what, None, grid, positions=(3, 5))
    assert error(grid.effects + grid.corrupt, expected) < 1e-10


@few
@given(configs(), st.sampled_from(("resid_pre", "attn_out", *HEADS)))
def test_clean_into_clean_is_the_identity(config, what):
    model, ids = build(config), tokens(config)
    grid = patch_grid(model, ids, ids, LogitDifference(3, 5), what)
    assert grid.effects.abs().max() < 1e-10 * grid.clean.abs().max()
    assert torch.equal(grid.clean, grid.corrupt)
    assert not patch(model, ids, ids, [("attn_out", 0), "L0H0.q"], LogitDifference(3, 5)).effects.any()
    with pytest.raises(ConfigError, match="nothing to restore"):
        grid.values  # noqa: B018


def test_values_are_shares_of_the_difference():
    """The whole last stream restores all of it; so does the clean input."""
    model = build(small())
    clean, corrupt = pair(model.config)
    grid = patch_grid(model, clean, corrupt, LogitDifference(3, 5), "resid_post")
    assert error(grid.values[-1, -1], torch.tensor(1.0)) < 1e-10
    assert not grid.values[-1, :-1].any()  # no later block reads what was patched there
    metric = LogitDifference(3, 5)
    gap = (metric(model(clean)) - metric(model(corrupt))).mean()
    assert error(grid.values, grid.effects.mean(-1) / gap) < 1e-12
    assert error(patch(model, clean, corrupt, ("resid_pre", 0), metric).values, torch.tensor(1.0)) < 1e-10


def test_results_are_plain_and_by_label():
    model = build(small())
    clean, corrupt = pair(model.config)
    grid = patch_grid(model, clean, corrupt, TokenLogit(3), "attn_out", layers=[1, 2], positions=[2, 6])
    assert [grid.label(0, 0), grid.label(1, 1)] == ["1_attn_out at 2", "2_attn_out at 6"]
    cells = [(i, j, grid.values[i, j].item()) for i in (0, 1) for j in (0, 1)]
    assert grid.to_dicts() == [
        {"label": grid.label(i, j), "layer": i + 1, "position": (2, 6)[j], "value": value} for i, j, value in cells
    ]
    largest = max((abs(v), (i, j), v) for i, row in enumerate(grid.values.tolist()) for j, v in enumerate(row))
    assert grid.top(1) == [(grid.label(*largest[1]), largest[2])]
    for what, label in (("head", "L1H1"), ("q", "L1H1.q"), ("pattern", "L1H1.pattern")):
        assert patch_grid(model, clean, corrupt, TokenLogit(3), what, layers=[1]).label(0, 1) == label


def test_a_patch_of_several_targets_is_one_intervention():
    model, metric = build(small()), Loss(tokens(small()))
    clean, corrupt = pair(model.config)
    targets = [At("resid_mid0", pos=2), "L1H0.v", "L2N4", "2_attn_out"]
    source = recorded(model, clean, [f"blocks.{p}" for p in ("0.resid_mid", "1.attn.v", "2.mlp.post", "2.attn_out")])
    tap = Intervention(model, {target: resample(source) for target in targets})
    found = patch(model, clean, corrupt, targets, metric)
    assert error(found.effects, metric(model(corrupt, tap=tap)) - metric(model(corrupt))) < 1e-12
    assert error(found.clean, metric(model(clean))) < 1e-12


def work(model, run):
    """Positions times blocks that are run."""
    count = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: count.append(given[0][..., 0].numel()))
    run()
    return sum(count)


@pytest.mark.parametrize(("what", "length"), [("resid_pre", 32), ("attn_out", 32), ("resid_pre", 64)])
def test_a_grid_costs_a_third_of_its_passes(what, length):
    """At 12 blocks, counted in positions times blocks, with what it takes to prepare."""
    model = GPT(small(n_layer=12, n_ctx=64)).eval()
    clean, corrupt = tokens(model.config, 2, length).split(1)
    grid = work(model, lambda: patch_grid(model, clean, corrupt, TokenLogit(3), what))
    assert grid < 0.35 * 12 * length * 12 * length


def test_the_induction_model_is_found_out():
    """The clean token before what the last position looks for: its copy by L0H0, read by L1H0 as its key."""
    model, clean = induction(), periodic(7, 16, 5)[:, :11]
    corrupt = clean.clone()
    corrupt[0, 5] = 6  # the last token has no earlier occurrence
    metric = TokenLogit(int(clean[0, 6]))
    stream = patch_grid(model, clean, corrupt, metric)
    assert stream.values[0, 5] > 0.99  # the token itself
    assert stream.values[1, 6] > 0.99  # what the first block has copied to the next position
    assert (stream.values > 0.01).sum() == 2
    assert patch_grid(model, clean, corrupt, metric, "attn_out").top(1)[0][0] == "0_attn_out at 6"
    for what, head in (("k", 0.99), ("q", 0), ("v", 0)):
        grid = patch_grid(model, clean, corrupt, metric, what)
        assert abs(grid.values[1, 0] - head) < 0.02
    assert patch_grid(model, clean, corrupt, metric, "pattern").values[1, 0] > 0.99


@few
@given(st.data(), st.sampled_from((*STREAM, *HEADS)), METRICS)
def test_attribution_is_the_derivative_of_the_patch(data, what, metric):
    """A step eps from the corrupted value towards the clean one moves the metric by eps times it, to first order."""
    model = build(data.draw(configs(d_mlp=48, activation="gelu")))
    clean, corrupt = pair(model.config)
    estimate = attribution_patch(model, clean, corrupt, metric, what)
    row, column = (data.draw(st.integers(0, len(axis) - 1)) for axis in (estimate.layers, estimate.columns))
    key = (HEADS.get(what, what), estimate.layers[row])
    target = At(key, units=column) if what in HEADS else At(key, pos=column)
    point = f"blocks.{key[1]}.{f'attn.{HEADS[what]}' if what in HEADS else what}"
    here, there = (recorded(model, ids, [point])[point] for ids in (corrupt, clean))

    def moved(eps):
        with torch.no_grad():
            step = Intervention(model, {target: resample(here + eps * (there - here))})
            return metric(model(corrupt, tap=step))

    slope = (moved(1e-4) - moved(-1e-4)) / 2e-4
    assert (estimate.effects[row, column] - slope).abs().max() < 1e-6 * max(1.0, slope.abs().max())


@pytest.mark.parametrize("what", ["resid_mid", "head", "pattern"])
def test_an_attribution_has_the_grids_form(what):
    model = build(small())
    clean, corrupt = pair(model.config)
    chosen = {"layers": [0, 2], "positions": [1, 4], "mask": MASK}
    exact, first = (f(model, clean, corrupt, TokenLogit(3), what, **chosen) for f in (patch_grid, attribution_patch))
    assert (exact.what, exact.layers, exact.columns) == (first.what, first.layers, first.columns)
    assert exact.effects.shape == first.effects.shape
    assert error(exact.clean, first.clean) < 1e-12
    assert error(exact.corrupt, first.corrupt) < 1e-12


def test_in_a_model_that_is_linear_the_attribution_is_exact():
    """No norms, fixed patterns and values: what a head writes moves a logit in proportion."""
    model, clean = induction(), periodic(7, 16, 5)[:, :11]
    corrupt = clean.roll(1, 1)
    grids = [f(model, clean, corrupt, TokenLogit(2), "attn_out", layers=[1]) for f in (patch_grid, attribution_patch)]
    assert error(grids[1].effects, grids[0].effects) < 1e-12


def test_it_tells_how_far_it_is_and_can_be_stopped(monkeypatch):
    model = build(small())
    clean, corrupt = pair(model.config)
    for module in (rerun, patching):
        monkeypatch.setattr(module, "ROOM", 1)
    for what, cells in (("attn_out", 21), ("head", 6)):
        told = []
        patch_grid(model, clean, corrupt, TokenLogit(3), what, progress=lambda *done, told=told: told.append(done))
        assert told == [(i, cells) for i in range(1, cells + 1)]

        def stop():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            patch_grid(model, clean, corrupt, TokenLogit(3), what, should_stop=stop)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": "resid_prr"}, "did you mean 'resid_pre'"),
        ({"clean": torch.zeros(2, 6, dtype=torch.long)}, r"\(2, 6\) and corrupt ids of \(2, 7\)"),
        ({"layers": [3]}, "3 is out of range; the model has 3 blocks"),
        ({"positions": [0, 7]}, "7 is out of range; the text has 7 positions"),
        ({"positions": []}, "positions: empty"),
        ({"metric": TokenLogit(3, pos=9)}, "9 is out of range"),
        ({"metric": lambda logits: logits[0]}, r"returned \(7, 11\); it must return a number for each row, \(2,\)"),
        ({"mask": torch.ones(2, 6, dtype=torch.bool)}, r"\(2, 6\) for ids of \(2, 7\)"),
    ],
)
@pytest.mark.parametrize("grid", [patch_grid, attribution_patch])
def test_what_cannot_be_patched_is_refused(grid, options, message):
    model = build(small())
    clean, corrupt = pair(model.config)
    with pytest.raises(ConfigError, match=message):
        grid(model, **{"clean": clean, "corrupt": corrupt, "metric": TokenLogit(3)} | options)


def test_ids_and_points_that_are_not_there_are_refused():
    model = build(small(d_mlp=0))
    clean, corrupt = pair(model.config)
    with pytest.raises(ConfigError, match="not in this model"):
        patch_grid(model, clean, corrupt, TokenLogit(3), "mlp_out")
    with pytest.raises(DataError, match=r"token id 11 is outside 0\.\.10"):
        patch_grid(model, clean, corrupt + 11 - corrupt.max(), TokenLogit(3))
    with pytest.raises(DataError, match="at least one"):
        patch(model, clean[:, :0], clean[:, :0], "L0H0", TokenLogit(3))
    with pytest.raises(ConfigError, match=r"\(2, 6\) and corrupt ids of \(2, 7\)"):
        patch(model, clean[:, 1:], corrupt, "L0H0", TokenLogit(3))
