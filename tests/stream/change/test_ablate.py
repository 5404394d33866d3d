"""Ablation: each unit alone, as a whole pass with that tap would have it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from known import induction, periodic
from mainstem.errors import ConfigError
from mainstem.stream.capture import capture
from mainstem.stream.change import rerun
from mainstem.stream.change.ablate import ANOTHER_CUT, UNITS, WAYS, ablation
from mainstem.stream.change.intervene import Intervention, mean, resample, zero
from mainstem.stream.metrics import LogitDifference, Loss, TokenLogit
from models import ROWS, build, configs, error, few, small, tokens

MASK = torch.tensor([[False] * 3 + [True] * 4, [True] * 7])


@few
@given(st.data(), st.sampled_from(UNITS), st.sampled_from(WAYS), st.sampled_from((None, MASK)))
@pytest.mark.parametrize("residual", ROWS)
def test_it_is_a_whole_pass_with_that_tap(residual, data, units, how, mask):
    """Law: blocks that are not run again, and units that are run together, change no number."""
    d_mlp = 4 if units == "neuron" else data.draw(st.sampled_from((0, 48)))
    model = build(data.draw(configs(residual=residual, d_mlp=d_mlp)))
    ids = tokens(model.config)
    metric = data.draw(st.sampled_from((LogitDifference(3, 5), TokenLogit(2, pos=2), Loss(ids, mask))))
    reference = capture(model, ids.flip(0), mask=None if mask is None else mask.flip(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rerun, "ROOM", data.draw(st.sampled_from((1, 60))))  # units one by one, or those of two blocks
        effects = ablation(model, ids, metric, units, how, reference, mask=mask, layers=range(model.config.n_layer))
    change = {"zero": zero(), "mean": mean(reference), "resample": resample(reference)}[how]
    whole = metric(model(ids, mask=mask))
    expected = [metric(model(ids, mask=mask, tap=Intervention(model, {unit: change}))) for unit in effects.labels]
    assert error(effects.baseline, whole) < 1e-12
    assert error(effects.values + effects.baseline, torch.stack(expected)) < 1e-10


def test_labels_are_in_the_order_of_the_forward_pass():
    model = build(small(d_mlp=2))
    ids, metric = tokens(model.config), TokenLogit(3)
    assert ablation(model, ids, metric, "branch").labels[:4] == ["0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"]
    assert ablation(model, ids, metric, "head", layers=[-1, 0]).labels == ["L0H0", "L0H1", "L2H0", "L2H1"]
    assert ablation(model, ids, metric, "neuron", layers=[1]).labels == ["L1N0", "L1N1"]


def test_results_are_plain_and_by_label():
    model = build(small())
    effects = ablation(model, tokens(model.config), LogitDifference(3, 5), "head")
    assert torch.equal(effects["L1H0"], effects.values[2])
    rows = {row["label"]: row["value"] for row in effects.to_dicts()}
    assert rows == dict(zip(effects.labels, effects.values.mean(1).tolist(), strict=True))
    best = effects.top(2)
    assert best == sorted(rows.items(), key=lambda row: -abs(row[1]))[:2]
    with pytest.raises(ConfigError, match="did you mean 'L1H1'"):
        effects["L1H11"]


def test_the_mean_is_over_the_ids_themselves_without_a_reference():
    model = build(small())
    ids, metric = tokens(model.config), TokenLogit(3)
    own = ablation(model, ids, metric, "head", "mean", mask=MASK)
    given_ = ablation(model, ids, metric, "head", "mean", capture(model, ids, mask=MASK), mask=MASK)
    assert torch.equal(own.values, given_.values)
    by_ids = ablation(model, ids, metric, "head", "mean", ids.flip(1))
    assert torch.equal(by_ids.values, ablation(model, ids, metric, "head", "mean", capture(model, ids.flip(1))).values)


@pytest.mark.parametrize("residual", ROWS)
def test_the_note_says_where_zeros_are_not_a_branch_dropped(residual):
    """Law 4's remark."""
    model = build(small(residual))
    ids, metric = tokens(model.config), TokenLogit(3)
    assert (ablation(model, ids, metric, "branch", "zero").note == ANOTHER_CUT) == (
        residual in ("post", "deepnorm", "mix", "no_skip", "no_skip_bare")
    )
    assert not ablation(model, ids, metric, "branch", "mean").note
    assert not ablation(model, ids, metric, "head", "zero").note
    if residual == "mix":  # its last blocks are pre-norm
        assert not ablation(model, ids, metric, "branch", "zero", layers=[2]).note


def test_without_its_first_head_the_induction_model_reads_evenly():
    model, ids = induction(), periodic(7, 16, 5)
    seen = []
    model(ids, tap=Intervention(model, [("L0H0", zero()), ("L1H0.pattern", lambda x: seen.append(x) or x)]))
    even = torch.ones(16, 16).tril() / torch.arange(1.0, 17)[:, None]
    assert error(seen[0][0], even.double()) < 1e-6

    metric = LogitDifference(int(ids[0, 10 - 5 + 1]), int(ids[0, 9]), pos=10)  # what comes next, and what does not
    effects = ablation(model, ids, metric, "head", "zero")
    assert effects.baseline.item() > 0.99
    assert effects["L0H0"].item() < -0.9
    assert error(effects["L1H0"], -effects.baseline) < 1e-10  # the logits read its write alone


def test_it_tells_how_far_it_is_and_can_be_stopped(monkeypatch):
    model, told = build(small()), []
    monkeypatch.setattr(rerun, "ROOM", 1)
    ablation(model, tokens(model.config), TokenLogit(3), progress=lambda *done: told.append(done))
    assert told == [(i, 6) for i in range(1, 7)]

    def stop():
        raise KeyboardInterrupt

    model.train()
    with pytest.raises(KeyboardInterrupt):
        ablation(model, tokens(model.config), TokenLogit(3), should_stop=stop)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "heads"}, "did you mean 'head'"),
        ({"how": "means"}, "did you mean 'mean'"),
        ({"how": "resample"}, "resample needs another pass"),
        ({"by": "neuron"}, "give blocks"),
        ({"layers": [3]}, "3 is out of range; the model has 3 blocks"),
        ({"layers": []}, "layers: empty"),
        ({"how": "resample", "reference": torch.zeros(2, 5, dtype=torch.long)}, r"\(2, 5, 6\) in the other pass"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, r"\(2, 5\) for ids of \(2, 7\)"),
        ({"metric": lambda logits: logits.sum()}, "a number for each row"),
    ],
)
def test_what_cannot_be_ablated_is_refused(options, message):
    model = build(small())
    with pytest.raises(ConfigError, match=message):
        ablation(model, tokens(model.config), **{"metric": TokenLogit(3)} | options)


def test_a_model_without_mlps_has_no_neurons():
    with pytest.raises(ConfigError, match="have no neuron"):
        ablation(build(small(d_mlp=0)), tokens(small()), TokenLogit(3), "neuron", layers=[0])


def test_a_masked_reference_is_read_with_its_mask():
    """Given as ids it is what it is as a record: padding is no token of it."""
    model = build(small())
    two = torch.tensor([[0, 0, 0, 5, 6, 7], [1, 2, 3, 4, 5, 6]])
    mask = torch.tensor([[False] * 3 + [True] * 3, [True] * 6])
    metric = TokenLogit(3)
    same = ablation(model, two, metric, "head", "resample", two, mask=mask)
    assert same.values.abs().max() < 1e-12
    means = [ablation(model, two, metric, "head", "mean", other, mask=mask).values for other in (two, None)]
    assert (means[0] - means[1]).abs().max() < 1e-12
