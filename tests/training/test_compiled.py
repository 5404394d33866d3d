"""Compiling proves itself or is left."""

from functools import partialmethod

import pytest
import torch
from torch import nn

from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.training.compiled import compile_blocks
from mainstem.training.device import Device
from models import small, tokens

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_compiler_agrees_or_is_left(model):
    """Whatever the machine has, the logits stay what they were."""
    logits, names = plainly(model)
    said = compile_blocks(model, *pair(model), CPU)
    assert said.startswith(("blocks compiled; loss and gradients within ", "not compiled: "))
    after, names_after = plainly(model)
    assert torch.allclose(after, logits, rtol=0, atol=1e-4)
    assert names == names_after


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
