"""`python -m benchmarks decode`: its sides generate the same model's tokens, and its figures are what they say."""

import functools
import sys
from types import ModuleType

import pytest
import torch

from benchmarks import decode, llama
from benchmarks.floors import forward_floor, memory_floor
from benchmarks.processes import NotCompared, Timed
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
        found = decode.generate_ours(model(), PROMPT, rows)()
        assert [i for i, _ in found] == greedy(decode.NEW)
        assert times(found) == sorted(times(found))
        assert 0 < decode.per_token(times(found)) < found[-1][1]
    assert len(set(greedy(20))) > 3
    assert decode.per_token([5.0, 6.0, 7.5, 8.0]) == 1.0


def test_transformers_says_what_we_say():
    pytest.importorskip("transformers", reason="a peer: pip install transformers")
    found = decode.generate_theirs(model(), PROMPT)()
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
        ("llama_cpp", r"llama.cpp is not compared \(.*llama_cpp.*\): pip install 'mainstem\[llama\]'"),
        ("gguf", "llama.cpp is not compared: .*the package gguf .*pip install"),
    ],
)
def test_a_peer_that_is_not_there_is_told(tmp_path, monkeypatch, package, said):
    for name in ("transformers", "llama_cpp", "gguf"):
        monkeypatch.setitem(sys.modules, name, None if name in ("transformers", package) else ModuleType(name))
    with pytest.raises(NotCompared, match="transformers is not compared"):
        decode.transformers("mid")
    with pytest.raises(NotCompared, match=said):
        decode.llamacpp("mid", str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("peers", [True, False])
def test_the_figures_name_their_sides(monkeypatch, in_this_process, peers):
    """Nothing is generated: a text takes the seconds that its side is given."""
    seconds = {"fp32": 4.0, "int8": 1.0, "bf16": 2.0, "batch": 8.0, "floor": 3.0, "transformers": 12.0,
               "llamacpp_f32": 6.0, "llamacpp_q8_0": 1.5, "prefill": 1.0}  # fmt: skip
    works = {name: lambda each=each: Timed(each, {"ids": [], "first": each}) for name, each in seconds.items()}

    def peer(**arguments):
        if not peers:
            raise NotCompared("not there")
        return works

    monkeypatch.setattr(decode.store, "build", lambda: True)
    monkeypatch.setattr(decode.store, "load", functools.cache(lambda weights: "a step"))
    monkeypatch.setattr(decode, "ours", lambda shape: works | {"bytes_read": lambda: 7})
    monkeypatch.setattr(decode, "floors", lambda shape, bytes_read: works)
    monkeypatch.setattr(decode, "transformers", peer)
    monkeypatch.setattr(decode, "llamacpp", peer)
    figures = decode.measure("mid", 1)
    assert figures["fp32_over_memory_floor"] == 0.75
    assert figures["fp32_over_llamacpp"] == (1.5 if peers else None)
    assert figures["bf16_over_fp32"] == 2
    assert figures["int8_over_transformers"] == (12 if peers else None)
    assert figures["int8_over_llamacpp"] == (1.5 if peers else None)
    assert figures["batch16_over_batch1"] == 8
    assert figures["bytes_read"] == 7
    assert figures["notes"] == ["not there"] * 2 * (not peers) + [decode.NO_LOSS]
    peers_seconds = {name: seconds[name] for name in ("transformers", "llamacpp_f32", "llamacpp_q8_0") if peers}
    ours = {name: seconds[name] for name in ("fp32", "int8", "bf16", "batch")}
    if not peers:
        del ours["int8"]  # which is measured beside peers alone
    assert figures["first_token_seconds"] == ours | peers_seconds


def test_what_another_process_compiles_is_waited_for(monkeypatch):
    monkeypatch.setattr(store, "build", lambda: False)
    monkeypatch.setattr(store, "underway", lambda: True)
    with pytest.raises(RunError, match="another process is compiling the step; try again in a minute"):
        decode.measure("small", 1)


def test_floors_run(monkeypatch):
    forward_floor(model(), 16)()
    monkeypatch.setattr("benchmarks.floors.SUMS", 1)
    monkeypatch.setattr(torch, "ones", lambda count: torch.zeros(1 << 20))
    one, two = memory_floor(1 << 20), memory_floor(1 << 30)
    assert 0 < one().seconds < two().seconds
