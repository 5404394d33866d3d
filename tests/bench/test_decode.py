"""`bench decode`: its sides generate the same model's tokens, and its figures are what they say."""

import pytest
import torch

from mainstem.bench import decode, llama
from mainstem.bench.floors import forward_floor, memory_floor
from mainstem.bench.timing import alternate
from mainstem.model.gpt import GPT
from models import small


def model():
    return GPT(small(vocab_size=67, n_ctx=256, d_model=32, d_mlp=64)).eval()


def test_ours_says_when_each_token_came():
    for rows in (1, 3):
        times = decode.ours(model(), [1, 2, 3], rows)()
        assert len(times) == decode.NEW
        assert times == sorted(times)
        assert 0 < decode.per_token(times) < times[-1]
    assert decode.per_token([5.0, 6.0, 7.5, 8.0]) == 1.0


def test_transformers_does_too():
    pytest.importorskip("transformers", reason="a peer: pip install transformers")
    times = decode.transformers(model(), [1, 2, 3])()
    assert len(times) == decode.NEW
    assert times == sorted(times)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_llama_says_what_we_say(tmp_path, kind):
    pytest.importorskip("gguf", reason="for a peer: pip install mainstem[llama]")
    pytest.importorskip("llama_cpp", reason="a peer: pip install mainstem[llama]")
    llama.write(model(), tmp_path / "x.gguf", kind)
    times = llama.generator(tmp_path / "x.gguf", 256)([1, 2, 3], 20)
    assert len(times) == 20


def test_a_part_of_a_call_can_be_timed():
    timed = alternate(lambda: 3.0, lambda: 2.0, 4, seconds=lambda work: work())
    assert timed.first == (3.0,) * 4
    assert timed.ratio.median == 1.5


def test_floors_run(monkeypatch):
    forward_floor(model(), 16)()
    monkeypatch.setattr("mainstem.bench.floors.SUMS", 1)
    monkeypatch.setattr(torch, "ones", lambda count: torch.zeros(1 << 20))
    one, two = memory_floor(1 << 20), memory_floor(1 << 30)
    assert 0 < one() < two()
