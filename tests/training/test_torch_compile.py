"""Compiling proves itself or is left."""

import shutil
from functools import partialmethod

import pytest
import torch
from torch import nn

from mainstem.errors import Interrupted
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.runs.folder import RunFolder
from mainstem.training.device import Device
from mainstem.training.events import Notice
from mainstem.training.torch_compile import compile_blocks
from models import small, tokens
from training_runs import StopAt, cut, end, finish, training

CPU = Device.choose("cpu")


def pair(model):
    ids = tokens(model.config)
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture
def model():
    return GPT(small())


def plainly(model):
    """What it says, and the names of its parameters."""
    with torch.no_grad():
        return model(tokens(model.config)), [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("\nno compiler here\nat line 3"), "no compiler here"), (ValueError(), "ValueError()")],
)
def test_a_compiler_that_fails_leaves_the_plain_model(model, monkeypatch, error, reason):
    """One sentence, and training goes on."""

    def broken(self, *args, **options):
        def call(*arguments):
            raise error

        self._compiled_call_impl = call

    logits, names = plainly(model)
    monkeypatch.setattr(nn.Module, "compile", broken)
    said = compile_blocks(model, *pair(model), CPU)
    assert said.startswith("not compiled: ")
    assert said.endswith("; the plain model trains on")
    assert reason in said
    assert "\n" not in said
    after, names_after = plainly(model)
    assert torch.equal(logits, after)
    assert names == names_after


def test_a_compiler_that_is_missing_leaves_the_plain_model(model, monkeypatch):
    def broken(self, *args, **options):
        raise RuntimeError("not on this Python")

    logits, _ = plainly(model)
    monkeypatch.setattr(nn.Module, "compile", broken)
    assert compile_blocks(model, *pair(model), CPU).startswith("not compiled: not on this Python")
    assert torch.equal(logits, plainly(model)[0])


@pytest.mark.parametrize(("wrong_by", "kept"), [(0.0, True), (1e-6, True), (0.5, False), (float("nan"), False)])
def test_a_compiler_is_believed_only_if_loss_and_gradients_agree(model, monkeypatch, wrong_by, kept):
    """NaN is no agreement."""

    def rough(self, *args, **options):
        self._compiled_call_impl = lambda *arguments: Block.forward(self, *arguments) + wrong_by * arguments[0]

    logits, _ = plainly(model)
    monkeypatch.setattr(nn.Module, "compile", rough)
    said = compile_blocks(model, *pair(model), CPU)
    start = "blocks compiled; loss and gradients within" if kept else "not compiled: loss and gradients differ by"
    assert said.startswith(start)
    assert kept or torch.equal(logits, plainly(model)[0])


def test_a_gradient_that_is_nan_is_no_agreement(model, monkeypatch):
    """Not even where the loss is sound: the slope of sqrt at 0 is infinite, and 0 times it is NaN."""

    def broken(self, *args, **options):
        self._compiled_call_impl = lambda *arguments: Block.forward(self, *arguments) + 0 * (0 * arguments[0]).sqrt()

    monkeypatch.setattr(nn.Module, "compile", broken)
    assert compile_blocks(model, *pair(model), CPU).startswith("not compiled: loss and gradients differ by nan")


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, g++, which PyTorch's calls")


@pytest.mark.slow
@COMPILER
@pytest.mark.filterwarnings("ignore")
def test_a_real_compiler_agrees(model):
    logits, names = plainly(model)
    assert compile_blocks(model, *pair(model), CPU).startswith("blocks compiled; loss and gradients within ")
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    after, names_after = plainly(model)
    assert not torch.equal(after, logits)  # another rounding: it is compiled code that ran
    assert torch.allclose(after, logits, rtol=0, atol=1e-4)
    assert names == names_after


@pytest.mark.slow
@COMPILER
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_compiled_blocks_that_is_stopped_and_resumed_is_uninterrupted(data, tmp_path):
    """Law 9 with PyTorch's own compiler; vitals, which are taken eagerly, change nothing."""
    changes = {"model": {"dropout": 0.1}, "compile": True}
    events = finish(training(tmp_path / "whole", cut(data), **changes))
    assert any("blocks compiled" in event.text for event in events if isinstance(event, Notice))
    with pytest.raises(Interrupted):
        finish(training(tmp_path / "run", cut(data), should_stop=StopAt(7), **changes))
    finish(training(tmp_path / "run", cut(data), **changes))
    whole = end(RunFolder(tmp_path / "whole"))
    assert end(RunFolder(tmp_path / "run")) == whole
    finish(training(tmp_path / "watched", cut(data), vitals_every=3, **changes))
    watched = end(RunFolder(tmp_path / "watched"))
    assert watched.pop("vitals.jsonl") != whole.pop("vitals.jsonl") == []
    assert watched == whole


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch looks at it while it traces
def test_every_block_with_a_constant_of_its_own_is_compiled(monkeypatch):
    """PyTorch leaves a function plain after a few graphs unless it is told how many there will be."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_with = partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(Block, "compile", compile_with)
    model = GPT(small(n_layer=10, attn_scale_by_depth=True))
    assert "blocks compiled" in compile_blocks(model, *pair(model), CPU)
    assert len(graphs) == 10
