"""Blocks that are computed again in the backward pass: less is kept, and not a byte of what is learnt changes."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from mainstem import counts
from mainstem.config import ModelConfig
from mainstem.errors import ConfigError, Interrupted
from mainstem.generation.cache import KVCache
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.model.tap import Recorder
from mainstem.runs.folder import RunFolder
from mainstem.training import doctor
from mainstem.training.device import Device
from mainstem.training.evaluate import loss_sum
from mainstem.training.events import Notice
from models import build, configs, few, kept, small, tokens
from training_runs import PACE, SHAPE, StopAt, cut, end, finish, training

DROPOUT = {"dropout": 0.1}
KERNELS = "numba" if importlib.util.find_spec("numba") else "torch"


@pytest.fixture(scope="module")
def lines(data):
    return cut(data)


@pytest.fixture
def computed(monkeypatch):
    """A list that grows by one whenever a block is computed."""
    calls, forward = [], Block.forward

    def counted(self, *arguments):
        calls.append(self)
        return forward(self, *arguments)

    monkeypatch.setattr(Block, "forward", counted)
    return calls


def gradients(model, ids, recompute, mask=None):
    """Loss and gradients of a pass whose dropout follows from a seed; then the state of the global generator."""
    model.recompute = recompute
    torch.manual_seed(3)
    loss = model(ids, mask=mask).square().sum()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), torch.get_rng_state()]


def same(ours, theirs):
    return all(a is b is None or a.equal(b) for a, b in zip(ours, theirs, strict=True))


@few
@given(configs(**DROPOUT))
def test_gradients_are_the_same_bits(config):
    """Every kind of block, in training, with a padded row; and what is drawn after it is what was drawn before."""
    model, ids = build(config).train(), tokens(config)
    mask = torch.ones_like(ids).bool()
    mask[0, :3] = False
    assert same(gradients(model, ids, True, mask), gradients(model, ids, False, mask))


RUNS = [
    ({"model": DROPOUT, "vitals_every": 3}, KERNELS),
    ({"model": DROPOUT, "micro_batch": 3, "optimizer": "muon"}, KERNELS),
    ({"model": {**DROPOUT, "activation": "swiglu", "norm": "rmsnorm", "position": "rotary", "qk_norm": True}}, "torch"),
]


@pytest.mark.parametrize(("changes", "kernels"), RUNS, ids=["adamw", "micro-batches", "another block"])
def test_a_run_ends_in_the_same_bytes(lines, tmp_path, computed, changes, kernels):
    """Dropout in all five places, by whichever loop computes GELU; also where the choice changes on the way."""
    ends, work = [], []
    for choices in ((False,), (True,), (False, True), (True, False)):
        run = RunFolder(tmp_path / "".join("yn"[choice] for choice in choices))
        computed.clear()
        if len(choices) == 2:
            with pytest.raises(Interrupted):
                finish(training(run.path, lines, should_stop=StopAt(9), recompute=choices[0], **changes))
            assert run.newest()[0] is not None
        made = training(run.path, lines, recompute=choices[-1], **changes)
        assert made.training.kernels == kernels
        finish(made)
        assert run.settings()["train"]["recompute"] == choices[-1]
        ends.append(end(run))
        work.append(len(computed))
    assert all(other == ends[0] for other in ends[1:])
    micro_batches = -(-PACE["batch_size"] // changes.get("micro_batch", PACE["batch_size"]))
    assert work[1] - work[0] == PACE["steps"] * micro_batches * SHAPE["n_layer"]  # each block once more


def test_only_what_backward_needs_is_computed_twice(computed):
    """Not without gradients, and neither what a tap looks at nor what a cache takes."""
    config = small(**DROPOUT)
    model, ids = build(config).train(), tokens(config)
    model.recompute = True
    tap, blocks = Recorder(["blocks.1.resid_mid"]), config.n_layer
    with torch.no_grad():
        model(ids)
    assert len(computed) == blocks
    loss = model(ids, tap=tap).sum()
    (slope,) = torch.autograd.grad(loss, tap.values["blocks.1.resid_mid"])
    assert slope.abs().max() > 0
    model(ids, cache=KVCache(model.config, len(ids), dtype=torch.float64))
    assert len(computed) == 3 * blocks
    model(ids).sum().backward()
    assert len(computed) == 5 * blocks


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_less_is_kept(dropout):
    """Of a block, C numbers a token."""
    sizes = {}
    for depth in (2, 6):
        model = GPT(small(n_layer=depth, n_ctx=32, d_model=32, dropout=dropout)).train()
        for model.recompute in (False, True):
            ids = tokens(model.config, 2, 32)
            sizes[depth, model.recompute] = kept(model, lambda model=model, ids=ids: loss_sum(model, ids, ids))
    assert sizes[6, True] - sizes[2, True] == 4 * (4 * 2 * 32 * 32)
    assert sizes[6, True] < sizes[6, False] / 5


DEEP = {"n_layer": 12}


def estimates(data):
    """Bytes that a run of DEEP needs by the formulas, plain and with recompute."""
    config = ModelConfig(**SHAPE | DEEP, vocab_size=data.tokenizer.vocab_size)
    return [counts.memory(config, PACE["batch_size"], recompute=choice)["training"] for choice in (False, True)]


def test_it_may_fit_where_the_whole_does_not(lines, tmp_path, monkeypatch):
    """And the refusal says so, until it has been tried."""
    free = sum(estimates(lines)) / 2 / doctor.MARGIN
    monkeypatch.setattr(doctor, "free_memory", lambda: free)
    with pytest.raises(ConfigError, match=r"GB are free; set `recompute`, or lower `micro_batch`"):
        training(tmp_path, lines, model=DEEP)
    assert training(tmp_path, lines, model=DEEP, recompute=True).training.model.recompute
    free /= 2
    with pytest.raises(ConfigError, match=r"GB are free; lower `micro_batch`"):
        training(tmp_path, lines, model=DEEP, recompute=True)


def test_the_doctor_knows_of_it(lines, tmp_path, monkeypatch):
    made, free = training(tmp_path, lines, model=DEEP), sum(estimates(lines)) / 2 / doctor.MARGIN
    monkeypatch.setattr(doctor, "free_memory", lambda: free)
    config, fix = made.training.config, "set `recompute`, or lower `micro_batch`, `batch_size` or `d_model`"
    for choice, said in ((False, fix), (True, "GB are free")):
        (found, *_) = doctor.before(made.training.model_config, config.replace(recompute=choice), tmp_path, None)
        assert found.ok == choice
        assert found.text.endswith(said)


@pytest.mark.parametrize(("model", "refused"), [(DROPOUT, True), ({"embd_dropout": 0.1}, False)])
def test_where_dropout_cannot_be_drawn_again_it_is_refused(lines, tmp_path, monkeypatch, model, refused):
    """Of Apple's GPU torch keeps no random state; a model without dropout in its blocks needs none."""
    monkeypatch.setattr(Device, "replays_dropout", False)
    training(tmp_path, lines, model=model)
    if not refused:
        assert training(tmp_path, lines, model=model, recompute=True).training.model.recompute
        return
    with pytest.raises(ConfigError, match=r"recompute: on cpu dropout .* leave out `recompute`, or set"):
        training(tmp_path, lines, model=model, recompute=True)
    assert not replace(Device.choose("cpu"), device=torch.device("mps")).replays_dropout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [{}, DROPOUT])
def test_compiled_blocks_end_in_the_same_bytes(lines, tmp_path, model):
    """By a real compiler, where the machine has one."""
    ends = []
    for recompute in (False, True):
        made = training(tmp_path / str(recompute), lines, model=model, recompute=recompute, compile=True, steps=3)
        said = "\n".join(event.text for event in finish(made) if isinstance(event, Notice))
        if "not compiled" in said:
            pytest.skip(said)
        ends.append(end(made.run))
    assert ends[0] == ends[1]
