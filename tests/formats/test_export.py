"""`ms.save` and `ms.export`: a model in memory as a RUN, and for other programs."""

import pytest
import torch

import mainstem as ms
from mainstem.errors import ConfigError, RunError
from mainstem.formats.load import load
from mainstem.text.tokenizer import Bytes
from models import build, small

IDS = torch.arange(8)[None]
TOKENIZER = Bytes()


@pytest.fixture(scope="module")
def model():
    return build(small(vocab_size=TOKENIZER.vocab_size), torch.float32)


def test_what_is_saved_comes_back(model, tmp_path):
    path = ms.save(model, TOKENIZER, tmp_path / "model")
    again, tokenizer = ms.load(path)
    assert torch.equal(again(IDS), model(IDS))
    assert tokenizer.hash == TOKENIZER.hash
    with pytest.raises(RunError, match="model: "):
        ms.save(model, TOKENIZER, path)


@pytest.mark.parametrize(("format", "weights"), [("hf", None), ("safetensors", None), ("safetensors", "int8")])
def test_a_folder_opens_again(model, tmp_path, format, weights):
    path = ms.export(model, TOKENIZER, tmp_path / "out", format, weights=weights)
    again, _ = load(path)
    expected = ms.quantize(model, weights) if weights else model
    assert torch.equal(again(IDS), expected(IDS))


def test_a_gguf_file_is_written(model, tmp_path):
    pytest.importorskip("gguf", reason="the package gguf writes GGUF files: pip install 'mainstem[gguf]'")
    path = ms.export(model, TOKENIZER, tmp_path / "out.gguf", "gguf", weights="f16")
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    ("format", "weights", "message"),
    [
        ("onnx", None, "format: unknown value 'onnx'"),
        ("hf", "int8", "weights: 'int8' is not possible"),
        ("safetensors", "int3", "weights: unknown value 'int3'"),
    ],
)
def test_what_a_format_lacks_is_refused(model, tmp_path, format, weights, message):
    with pytest.raises(ConfigError, match=message):
        ms.export(model, TOKENIZER, tmp_path / "out", format, weights=weights)
    assert not (tmp_path / "out").exists()
