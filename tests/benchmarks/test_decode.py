"""`python -m benchmarks decode`: its sides generate the same model's tokens, and its figures are what they say."""

import re
import sys
from types import ModuleType

import pytest
import torch

from benchmarks import decode, llama
from benchmarks.floors import forward_floor, memory_floor
from benchmarks.timing import alternate
from mainstem.errors import RunError
from mainstem.generation.compiled import store
from mainstem.generation.decoding import generate_ids
from models import build, small

PROMPT = [1, 2, 3]


def model():
    """One that says different tokens, as an untrained one does not."""
    return build(small(vocab_size=67, n_ctx=256, d_model=32, d_mlp=64), torch.float32, by=0.5)


def greedy(count):
    return generate_ids(model(), [PROMPT], max_new_tokens=count, temperature=0)[0]


def times(generated):
    return [came for _, came in generated]


def test_ours_says_when_each_token_came():
    for rows in (1, 3):
        found = decode.ours(model(), PROMPT, rows)()
        assert [i for i, _ in found] == greedy(decode.NEW)
        assert times(found) == sorted(times(found))
        assert 0 < decode.per_token(times(found)) < found[-1][1]
    assert len(set(greedy(20))) > 3
    assert decode.per_token([5.0, 6.0, 7.5, 8.0]) == 1.0


def test_transformers_says_what_we_say():
    pytest.importorskip("transformers", reason="a peer: pip install transformers")
    found = decode.transformers(model(), PROMPT)()
    assert len(found) == decode.NEW
    assert [i for i, _ in found[:20]] == greedy(20)
    assert times(found) == sorted(times(found))


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_llama_says_what_we_say(tmp_path, dtype):
    pytest.importorskip("gguf", reason="for a peer: pip install mainstem[llama]")
    pytest.importorskip("llama_cpp", reason="a peer: pip install mainstem[llama]")
    found = llama.generator(model(), tmp_path / "x.gguf", dtype)(PROMPT, 20)
    assert len(found) == 20
    assert times(found) == sorted(times(found))
    if dtype == "f32":
        assert [i for i, _ in found] == greedy(20)


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("llama_cpp", r"llama.cpp is not compared \(.*llama_cpp.*\): pip install mainstem\[llama\]"),
        ("gguf", "llama.cpp is not compared: GGUF files are written by the package gguf .*pip install"),
    ],
)
def test_a_peer_that_is_not_there_is_noted(tmp_path, monkeypatch, package, said):
    for name in ("transformers", "llama_cpp", "gguf"):
        monkeypatch.setitem(sys.modules, name, None if name in ("transformers", package) else ModuleType(name))
    sides = decode._Sides(model(), PROMPT, tmp_path)
    assert len(sides.notes) == 2
    assert "transformers is not compared" in sides.notes[0]
    assert re.match(said, sides.notes[1])
    assert sides.seconds("llamacpp_f32") is sides.seconds("transformers") is None
    assert not list(tmp_path.iterdir())


def test_the_figures_name_their_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "transformers", lambda model, prompt: list)
    monkeypatch.setattr(llama, "generator", lambda model, path, dtype: lambda prompt, count: [])
    sides = decode._Sides(model(), PROMPT, tmp_path)
    named = {name for first, second, _ in decode.PAIRS.values() for name in (first, second)} - {"floor"}
    assert not [name for name in named if sides.seconds(name) is None]


def test_what_another_process_compiles_is_waited_for(monkeypatch):
    monkeypatch.setattr(store, "build", lambda: False)
    monkeypatch.setattr(store, "underway", lambda: True)
    with pytest.raises(RunError, match="another process is compiling the step; try again in a minute"):
        decode.measure("small", 1)


def test_a_part_of_a_call_can_be_timed():
    timed = alternate(lambda: 3.0, lambda: 2.0, 4, seconds=lambda work: work())
    assert timed.first == (3.0,) * 4
    assert timed.ratio.median == 1.5


def test_floors_run(monkeypatch):
    forward_floor(model(), 16)()
    monkeypatch.setattr("benchmarks.floors.SUMS", 1)
    monkeypatch.setattr(torch, "ones", lambda count: torch.zeros(1 << 20))
    one, two = memory_floor(1 << 20), memory_floor(1 << 30)
    assert 0 < one() < two()
