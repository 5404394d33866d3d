"""The tuned lens: it begins as the logit lens, says more after training at every depth, and its file can be trusted."""

import errno
import json
import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import training_runs
from mainstem.errors import ConfigError, DataError, Interrupted, RunError, TrainingFailed
from mainstem.formats.load import load
from mainstem.stream.analysis import lens as lens_file
from mainstem.stream.analysis.lens import depths, lens
from mainstem.stream.analysis.tuned import TunedLens, lens_kl, train_lens
from mainstem.stream.capture import capture
from mainstem.text.tokens import Windows, evaluation_windows
from mainstem.training.optim import orthogonalise
from models import ROWS, build, configs, few, normal, small, tokens


def windows(config, rows=4):
    """Random ids, a function of the step."""
    return lambda step: torch.randint(config.vocab_size, (rows, 8), generator=torch.Generator().manual_seed(step))


def held_out(config, count=4):
    return [windows(config)(10_000 + step) for step in range(count)]


@pytest.fixture(scope="module")
def taught():
    """A stirred model and its lens after a few steps, with the steps."""
    model = build(small(), torch.float32)
    return model, *train_lens(model, windows(model.config), steps=5)


@few
@given(configs())
def test_it_begins_as_the_logit_lens(config):
    model = build(config)
    trace, untrained = capture(model, tokens(config)), TunedLens(model)
    assert torch.equal(lens(trace, tuned=untrained).kl, lens(trace).kl)
    assert len(untrained.weight) == len(depths(model)) - 1


@pytest.mark.parametrize("residual", ROWS)
def test_every_depth_of_every_row_is_nearer_to_the_end(residual):
    model = build(small(residual), torch.float32)
    tuned, _ = train_lens(model, windows(model.config, rows=16), steps=40)
    before, after = (lens_kl(model, held_out(model.config), which) for which in (None, tuned))
    assert all(new < old for new, old in zip(after[:-1], before[:-1], strict=True))
    assert before[-1] == after[-1] == 0


def test_it_says_more_than_the_logit_lens_of_a_trained_model(trained, data):
    """On text that neither was trained on, at every depth; here more than one epoch of windows is read."""
    model, _ = load(trained.path)
    few_tokens = training_runs.cut(data)
    order = Windows(few_tokens.train, model.config.n_ctx, 1, model.config.vocab_size)
    steps = 3 * training_runs.EPOCH
    tuned, history = train_lens(model, lambda step: torch.from_numpy(order.batch(step, 8)[0]), steps=steps)
    text = [torch.from_numpy(x) for x, _ in evaluation_windows(few_tokens.val, model.config.n_ctx, 16)]
    before, after = lens_kl(model, text), lens_kl(model, text, tuned)
    assert all(new < old for new, old in zip(after[:-1], before[:-1], strict=True))
    assert [step.step for step in history] == list(range(1, 3 * training_runs.EPOCH + 1))
    assert all(last < first for first, last in zip(history[0].kl, history[-1].kl, strict=True))


def test_the_same_windows_make_the_same_lens(taught):
    model, tuned, history = taught
    torch.manual_seed(7)  # nothing is drawn, from whatever state
    state, told = torch.get_rng_state(), []
    again, same = train_lens(model, windows(model.config), steps=5, progress=told.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert same == told == history
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), tuned.parameters(), strict=True))
    other, _ = train_lens(model, lambda step: windows(model.config)(step + 1), steps=5)
    assert not torch.equal(other.weight[0], tuned.weight[0])


def test_the_model_is_left_as_it_was():
    model = build(small(dropout=0.5), torch.float32).train()
    versions = [parameter._version for parameter in model.parameters()]
    with torch.no_grad():  # the maps' gradients are taken all the same
        _, history = train_lens(model, windows(model.config), steps=2)
    assert history[0].kl == train_lens(model, windows(model.config), steps=1)[1][0].kl  # no dropout
    assert model.training
    assert all(module.training for module in model.modules())
    assert [parameter._version for parameter in model.parameters()] == versions
    assert all(parameter.grad is None for parameter in model.parameters())


@few
@given(configs(), st.integers(1, 150))
def test_parts_are_the_whole(config, at_once):
    """Gradients and KL are those of all positions together, however few are unembedded at once."""
    model = build(config)
    whole, history = train_lens(model, windows(config), steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lens_file, "AT_ONCE", at_once)
        parts, same = train_lens(model, windows(config), steps=2)
        kl = lens_kl(model, held_out(config), whole)
    assert same[1].kl == pytest.approx(history[1].kl, rel=1e-6, abs=1e-10)
    assert (parts.weight[0] - whole.weight[0]).abs().max() < 1e-6
    expected = lens_kl(model, held_out(config), whole)
    assert kl == pytest.approx(expected, rel=1e-10)
    assert expected == pytest.approx(by_the_lens(model, held_out(config), whole), rel=1e-10)


def by_the_lens(model, ids, tuned):
    """Mean KL at each depth as `lens` finds it."""
    return lens(capture(model, torch.cat(ids)), tuned=tuned).kl.mean((1, 2)).tolist()


@few
@given(configs())
def test_the_first_step_follows_the_mean_kls_gradient(config):
    """KL(final || lens) by the formula, of one depth's map alone: Muon's step for W, Adam's for b."""
    model, ids = build(config), windows(config)(0)
    trained, history = train_lens(model, lambda step: ids, steps=1, lr=0.01)
    trace, C = capture(model, ids), config.d_model
    p = trace.logits.softmax(-1)
    for index, point in enumerate(depths(model)[:-1]):
        W, b = (torch.zeros(*shape, dtype=torch.float64, requires_grad=True) for shape in ((C, C), (C,)))
        log_q = model.unembed(trace[point] + trace[point] @ W + b).log_softmax(-1)
        kl = (p * (p.log() - log_q)).sum(-1).mean()
        at_w, at_b = torch.autograd.grad(kl, (W, b))
        assert history[0].kl[index] == pytest.approx(kl.item(), rel=1e-10, abs=1e-12)
        nesterov = 0.19 * at_w  # 1 - momentum^2 of it
        assert (trained.weight[index] + 0.01 * orthogonalise(nesterov[None])[0]).abs().max() < 1e-8
        assert (trained.bias[index] + 0.001 * at_b / (at_b.abs() + 1e-8)).abs().max() < 1e-8


def test_a_depth_and_nothing_else():
    tuned = TunedLens(build(small()))
    torch.nn.init.ones_(tuned.bias[2])
    x = normal(2, 3, 12)
    assert torch.equal(tuned(x, "blocks.1.resid_pre"), x + 1)
    assert tuned(x, "resid_final") is x
    with pytest.raises(ConfigError, match=r"did you mean 'blocks\.1\.resid_mid'"):
        tuned(x, "blocks.1.resid_mit")


@few
@given(configs(), st.sampled_from((torch.float32, torch.float64)))
def test_a_file_gives_back_the_lens(tmp_path_factory, config, dtype):
    model, path = build(config, dtype), tmp_path_factory.mktemp("lens") / "tuned.safetensors"
    tuned, _ = train_lens(model, windows(config), steps=1)
    tuned.save(path, model)
    back = TunedLens.load(path, model)
    assert [path.name] == os.listdir(path.parent)
    assert back.points == tuned.points
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), tuned.parameters(), strict=True))
    assert {parameter.dtype for parameter in back.parameters()} == {dtype}
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["model"])["points"] == depths(model)[:-1]


def test_another_precision_is_the_same_unembedding(taught, tmp_path):
    model, tuned, _ = taught
    tuned.save(tmp_path / "lens", model)
    double = build(small(), torch.float32).double()
    back = TunedLens.load(tmp_path / "lens", double)
    assert torch.equal(back.weight[1], tuned.weight[1].double())


def changed(path):
    """A model in which one number is another."""
    model = build(small(), torch.float32)
    with torch.no_grad():
        model.get_parameter(path).view(-1)[0] += 0.001
    return model


@pytest.mark.parametrize("path", ["wte.weight", "ln_f.weight", "ln_f.bias"])
def test_another_unembedding_is_refused(taught, tmp_path, path):
    model, tuned, _ = taught
    tuned.save(tmp_path / "lens", model)
    with pytest.raises(RunError) as caught:
        TunedLens.load(tmp_path / "lens", changed(path))
    expected = "made for another unembedding; train it again with mainstem inspect tune RUN"
    assert str(caught.value) == f"{tmp_path / 'lens'}: {expected}"


def test_other_blocks_and_the_same_unembedding_are_not(taught, tmp_path):
    """As the paper has it: a lens may be read on a fine-tuned model whose unembedding stayed."""
    model, tuned, _ = taught
    tuned.save(tmp_path / "lens", model)
    TunedLens.load(tmp_path / "lens", changed("blocks.0.attn.c_proj.weight"))


@pytest.mark.parametrize(
    "changes", [{"n_layer": 2}, {"d_mlp": 0}, {"norm_eps": 1e-4}, {"d_model": 14}, {"norm": "rmsnorm"}]
)
def test_another_shape_is_refused(taught, tmp_path, changes):
    model, tuned, _ = taught
    tuned.save(tmp_path / "lens", model)
    with pytest.raises(RunError, match="lens: made for a model of another shape"):
        TunedLens.load(tmp_path / "lens", build(small(**changes), torch.float32))


def damage(path, change):
    """Write the file again with its tensors changed and its metadata as they were."""
    with safe_open(path, "pt") as file:
        said = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, said)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 7), "not readable"),
        (lambda path: os.truncate(path, 3), "not readable"),
        (lambda path: path.write_bytes(b""), "not readable"),
        (lambda path: path.write_text("a lens"), "not readable"),
        (lambda path: path.unlink(), "not found"),
        (lambda path: damage(path, lambda t: t["blocks.1.resid_mid.weight"][0].fill_(torch.nan)), "not finite"),
        (lambda path: damage(path, lambda t: t["blocks.0.resid_pre.bias"][0].fill_(torch.inf)), "not finite"),
        (lambda path: damage(path, lambda t: t.pop("blocks.1.resid_mid.bias")), "blocks.1.resid_mid.bias is missing"),
        (lambda path: damage(path, lambda t: t.update(x=torch.ones(1))), "x is too many"),
        (lambda path: damage(path, lambda t: t.update({"blocks.0.resid_pre.bias": torch.ones(1)})), "another shape"),
        (lambda path: save_file({"x": torch.ones(1)}, path), "no tuned lens"),
        (lambda path: save_file({"x": torch.ones(1)}, path, {"format": "pt"}), "no tuned lens"),
    ],
)
def test_a_bad_file_is_refused(taught, tmp_path, harm, words):
    model, tuned, _ = taught
    path = tmp_path / "lens"
    tuned.save(path, model)
    harm(path)
    with pytest.raises(RunError) as caught:
        TunedLens.load(path, model)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "mainstem inspect tune RUN" in str(caught.value)


def test_what_cannot_be_saved_leaves_the_file_that_was_there(taught, tmp_path, monkeypatch):
    model, tuned, _ = taught
    path = tmp_path / "lens"
    tuned.save(path, model)
    before = path.read_bytes()
    worse = TunedLens(model)
    torch.nn.init.constant_(worse.weight[1], torch.nan)
    with pytest.raises(TrainingFailed, match=r"resid_mid.weight is not finite"):
        worse.save(path, model)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TrainingFailed, match="no space left"):
        TunedLens(model).save(path, model)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["lens"]
    with pytest.raises(RunError, match="no such folder"):
        tuned.save(tmp_path / "nowhere" / "lens", model)


def test_it_stops_when_told_and_leaves_the_mode():
    model = build(small(), torch.float32).train()
    told = []
    with pytest.raises(Interrupted):
        train_lens(model, windows(model.config), steps=9, should_stop=training_runs.StopAt(3), progress=told.append)
    assert len(told) == 3
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"steps": 0}, "steps 0"), ({"lr": 0.0}, "lr 0"), ({"lr": math.nan}, "lr nan"), ({"lr": math.inf}, "lr inf")],
)
def test_numbers_out_of_range(arguments, words):
    model = build(small())
    with pytest.raises(ConfigError, match=words):
        train_lens(model, windows(model.config), **arguments)


def test_nothing_to_train_and_nothing_to_weigh():
    bare = build(small(n_layer=0))
    with pytest.raises(ConfigError, match="no blocks"):
        train_lens(bare, windows(bare.config))
    with pytest.raises(DataError, match="no windows"):
        lens_kl(bare, [])
    assert lens_kl(bare, held_out(bare.config)) == [0.0]


def test_what_is_not_finite_is_not_stepped():
    model = build(small(), torch.float32)
    with torch.no_grad():
        model.blocks[1].attn.c_proj.weight[0, 0] = torch.nan
    with pytest.raises(TrainingFailed, match=r"blocks.0.resid_pre is nan at step 1"):
        train_lens(model, windows(model.config), steps=3)


def test_another_models_lens_is_refused_and_changed_blocks_are_said(tmp_path):
    model, other = build(small()), build(small(), by=0.3)
    tuned, told = TunedLens(model), []
    with pytest.raises(ConfigError, match="another model"):
        capture(other, tokens(small())).lens(tuned=tuned)
    tuned.save(tmp_path / "lens", model)
    TunedLens.load(tmp_path / "lens", model, told.append)
    assert told == []
    with torch.no_grad():
        model.blocks[0].attn.c_proj.weight.mul_(-2)
    TunedLens.load(tmp_path / "lens", model, told.append)
    assert "blocks have changed" in told[0]


def test_a_lens_reads_another_precision():
    trace = capture(build(small()), tokens(small()))
    lens = TunedLens(build(small(), torch.float32))
    assert trace.lens(tuned=lens).kl.dtype == torch.float64
