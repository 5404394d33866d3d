"""One step: the precision of its passes, and the dropout that follows from the seed and the step."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import training_runs
from mainstem.config import TrainConfig
from mainstem.model.gpt import GPT
from mainstem.runs.folder import read_rows
from mainstem.training.device import Device
from mainstem.training.evaluate import evaluate, loss_sum
from mainstem.training.optim import Optimizer
from mainstem.training.step import TrainStep
from mainstem.training.vitals import Vitals, first_non_finite
from models import normal, small, tokens

HALF = Device(torch.device("cpu"), torch.bfloat16)


def stepped(model, x, y):
    config = TrainConfig()
    TrainStep(model, Optimizer(model, config), config, HALF).gradient(x, y)


PASSES = {
    "a step": stepped,
    "an evaluation": lambda model, x, y: evaluate(model, x.flatten().numpy(), np.ones(11, np.int64), device=HALF),
    "vitals": lambda model, x, y: Vitals(model, x, y, HALF),
    "the look for what is not finite": lambda model, x, y: first_non_finite(model, x, HALF, 2),
}


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
def test_every_pass_is_under_the_devices_autocast(run):
    """Products in bfloat16, as on a GPU; parameters and their gradients stay float32."""
    model, dtypes = GPT(small()), set()
    model.blocks[1].attn.c_proj.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    ids = tokens(model.config)
    run(model, ids[:, :-1], ids[:, 1:])
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} <= {torch.float32}


def test_the_loss_of_half_precision_logits_is_float32():
    """Cross-entropy is a sum over the vocabulary and over tokens, in which eight bits would be lost."""
    logits, y = (8 * normal(2, 64, 11)).bfloat16(), torch.arange(128).reshape(2, 64) % 11
    loss = loss_sum(lambda x, tap=None: logits, y, y)
    exact = -F.log_softmax(logits.double(), -1).gather(-1, y[..., None]).sum()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.fixture(scope="module")
def alike(data):
    """Token files of one token alone, so that every window is the same."""
    same = training_runs.cut(data)
    vars(same).update(train=np.full_like(same.train, 7), val=np.full_like(same.val, 7))
    return same


def losses(path, data, start, **changes):
    """Of four steps from the same weights, which do not move."""
    still = {"steps": 4, "lr": 1e-30, "eval_every": 0, "save_every": 0}
    run = training_runs.training(path, data, init_from=start, **still, **changes)
    training_runs.finish(run)
    return [row["loss"] for row in read_rows(run.run.metrics) if row["kind"] == "train"]


def test_dropout_follows_from_the_seed_and_the_step(alike, trained, tmp_path):
    """Each step and each seed leave out other units, and the same ones again when asked again."""
    model = {"dropout": 0.5}
    first, again, other = (
        losses(tmp_path / name, alike, trained.path, model=model, seed=seed)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert len({*first, *other}) == 8


def test_without_dropout_neither_matters(alike, trained, tmp_path):
    """Else the test above would hold for another reason."""
    first, other = (losses(tmp_path / f"{seed}", alike, trained.path, seed=seed) for seed in (1, 2))
    assert first == other
    assert len({*first}) == 1
