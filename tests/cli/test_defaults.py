"""A flag and the argument of the same name have the same default: the command line answers as the library does."""

import dataclasses
import importlib
import inspect

import pytest

from mainstem.circuits.composition import Composition, composition
from mainstem.circuits.heads import head_scores
from mainstem.circuits.skip_trigrams import skip_trigrams
from mainstem.circuits.spectra import spectra
from mainstem.circuits.virtual import virtual
from mainstem.stream.analysis.tuned import train_lens
from mainstem.stream.change.ablate import ablation
from mainstem.stream.change.patch import attribution_patch, patch_grid
from mainstem.stream.trace import Trace

CALLS = {
    "inspect ablate": [ablation],
    "inspect attribution": [Trace.attribution],
    "inspect flow": [Trace.flow],
    "inspect lens": [Trace.lens],
    "inspect patch": [patch_grid, attribution_patch],
    "inspect stream": [Trace.erasure],
    "inspect token": [Trace.token, Trace.word],
    "inspect tune": [train_lens],
    "circuits composition": [composition, Composition.top],
    "circuits heads": [head_scores, spectra],
    "circuits ngrams": [skip_trigrams],
    "circuits virtual": [virtual],
}
"""Each question, and what it calls; `circuits overlap` and `circuits contexts` have flags of their own alone."""


def flags(question):
    verb, name = question.split()
    module = importlib.import_module(f"mainstem.cli.{verb}.{name}")
    (command,) = [
        kind
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__ and hasattr(kind, "json")
    ]
    return {field.name: field.default for field in dataclasses.fields(command) if field.default != dataclasses.MISSING}


def compared():
    """Each argument with a flag of its name, but `top`: the command shows as many rows as a terminal holds."""
    for question, calls in CALLS.items():
        for call in calls:
            for name, argument in inspect.signature(call).parameters.items():
                if name in flags(question) and name != "top" and argument.default is not argument.empty:
                    yield question, call, name, argument.default


@pytest.mark.parametrize(("question", "call", "name", "default"), list(compared()))
def test_a_flag_has_the_default_of_its_argument(question, call, name, default):
    """Nothing and None are one; so are block 0 and None, where a question is about one block."""
    assert (flags(question)[name] or None) == (default or None)


def test_the_defaults_that_matter_are_among_them():
    names = {(question, name) for question, _, name, _ in compared()}
    assert names >= {
        ("inspect ablate", "by"), ("inspect ablate", "how"), ("inspect attribution", "by"), ("inspect stream", "by"),
        ("inspect lens", "norm"), ("inspect patch", "what"), ("inspect flow", "weighting"), ("inspect tune", "lr"),
        ("circuits heads", "seed"), ("circuits heads", "sequences"), ("circuits composition", "modes"),
    }  # fmt: skip


def test_seeds_are_one_everywhere():
    for call in (composition, head_scores):
        assert inspect.signature(call).parameters["seed"].default == 1
