"""Ours to Hugging Face's layout and back, and theirs: to the byte."""

import errno
import tempfile
from pathlib import Path

import pytest
import theirs
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from theirs import EVERY, MODEL

from mainstem.config import AUTO
from mainstem.errors import ConfigError, DataError, RunError, TrainingFailed
from mainstem.formats.hf import folder as hf
from mainstem.formats.load import load
from mainstem.generation.decoding import generate_ids
from mainstem.model.quantized import quantize
from mainstem.runs import checkpoint
from mainstem.text import tokenizer as tokenizers
from mainstem.text.tokenizer import Characters
from models import build, configs, error, few, small

IDS = torch.arange(8)[None]
BPE = tokenizers.train("bpe", ["the river runs to the sea, and the sea is deep. 강물이 흐른다.\n" * 9], 280)
LETTERS = Characters("".join(map(chr, range(48, 123))))


def float32(config):
    return build(config, torch.float32)


def settled(config):
    """A config as it comes back: resolved, and how a new model would be drawn forgotten."""
    return config.resolved().replace(init="auto").resolved()


held = st.builds(
    lambda config, **choices: config.replace(**choices),
    configs(
        residual="pre", norm="layernorm", position="learned", rope_base=10000.0, qk_norm=False, bias=True,
        lm_head_bias=False, d_head=AUTO, vocab_size=12, n_ctx=12,
    ),
    n_layer=st.integers(0, 3),
    d_mlp=st.sampled_from((AUTO, 12, 20)),
    activation=st.sampled_from(("gelu", "gelu_tanh", "relu", "relu2")),
    attn_scale=st.sampled_from((AUTO, 1.0)),
    norm_eps=st.sampled_from((1e-5, 1e-6, 0.01)),
    init=st.sampled_from(("gpt2", "xavier", "width")),
    attn_dropout=st.sampled_from((0.0, 0.25)),
)  # fmt: skip


@few
@given(held)
def test_ours_comes_back_to_the_byte(config):
    """Law 8: ours -> Hugging Face -> ours."""
    model = float32(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint.save(folder / "before", model, None)
        hf.write(folder / "theirs", model, None)
        back, _ = load(folder / "theirs")
        checkpoint.save(folder / "after", back, None)
        assert back.config == settled(config)
        assert not back.training
        files = [(folder / name / checkpoint.MODEL).read_bytes() for name in ("before", "after")]
        assert files[0] == files[1]


@pytest.mark.parametrize("options", EVERY[::5], ids=lambda options: "-".join(map(str, options.values())))
def test_theirs_comes_back_to_the_byte(tmp_path, options):
    theirs.model(**options).save_pretrained(tmp_path / "theirs")
    hf.write(tmp_path / "again", *load(tmp_path / "theirs"))
    assert (tmp_path / "again" / MODEL).read_bytes() == (tmp_path / "theirs" / MODEL).read_bytes()
    said = theirs.said(tmp_path / "theirs")
    for field, value in theirs.said(tmp_path / "again").items():
        assert value == said[field], field


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokenizer", [BPE, LETTERS], ids=["bpe", "char"])
def test_an_export_opens_there_and_says_the_same(tmp_path, tokenizer, tied):
    model = float32(small(vocab_size=tokenizer.vocab_size, n_ctx=64, tie_embeddings=tied, activation="gelu"))
    hf.write(tmp_path / "out", model, tokenizer, card="# A card\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md", "config.json", "generation_config.json", MODEL, "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert (tmp_path / "out" / "README.md").read_text() == "# A card\n"
    there = theirs.opened(tmp_path / "out")
    assert error(there(IDS).logits, model(IDS)) <= 1e-6
    spoken = theirs.transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = spoken("theriver", return_tensors="pt")
    said = there.generate(**asked, max_new_tokens=20, do_sample=False)[0].tolist()
    prompt = tokenizer.encode("theriver")
    ids = prompt + generate_ids(model, [prompt], max_new_tokens=20, temperature=0)[0]
    assert said == ids
    assert spoken.decode(said) == tokenizer.decode(ids)
    assert there.generation_config.eos_token_id == there.generation_config.pad_token_id == tokenizer.eot_id


@pytest.mark.parametrize("tied", [True, False])
def test_shards_come_back(tmp_path, tied):
    model = float32(small(tie_embeddings=tied))
    hf.write(tmp_path / "out", model, None, max_shard_size=2_000)
    index = theirs.said(tmp_path / "out", hf.INDEX)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert set(index["weight_map"].values()) == set(files)
    sizes = [sum(each.nbytes for each in load_file(tmp_path / "out" / file).values()) for file in files]
    assert max(sizes) <= 12 * 48 * 4  # the largest tensor, which a shard has to itself
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert torch.equal(load(tmp_path / "out")[0](IDS), model(IDS))
    assert error(theirs.opened(tmp_path / "out")(IDS).logits, model(IDS)) <= 1e-6


def test_biases_that_a_model_has_not_are_zeros(tmp_path):
    model = float32(small(bias=False))
    hf.write(tmp_path / "out", model, None)
    tensors = load_file(tmp_path / "out" / MODEL)
    biases = [tensor for key, tensor in tensors.items() if key.endswith(".bias")]
    assert len(biases) == 3 * 6 + 1
    assert not any(tensor.any() for tensor in biases)
    back, _ = load(tmp_path / "out")
    assert back.config == settled(model.config.replace(bias=True))
    assert error(back(IDS), model(IDS)) <= 1e-6


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_narrow_models_are_widened(tmp_path, weights, tied):
    model = quantize(float32(small(tie_embeddings=tied)), weights)
    hf.write(tmp_path / "out", model, None)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / MODEL).values()} == {torch.float32}
    assert torch.equal(load(tmp_path / "out")[0](IDS), model(IDS))


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_no_id_reaches_are_left_out(tmp_path, tied):
    """A vocabulary that was rounded up."""
    model = float32(small(vocab_size=128, tie_embeddings=tied))
    hf.write(tmp_path / "out", model, LETTERS)
    back, again = load(tmp_path / "out")
    assert back.config == settled(model.config.replace(vocab_size=76))
    assert again.vocab_size == theirs.said(tmp_path / "out")["vocab_size"] == 76
    assert len(theirs.transformers.AutoTokenizer.from_pretrained(tmp_path / "out")) == 76
    assert error(back(IDS), model(IDS)[..., :76]) <= 1e-6


@pytest.mark.parametrize(
    ("rows", "sound"), [(76, True), (80, True), (128, True), (75, False), (77, False), (256, False)]
)
def test_rows_beyond_the_ids_are_padding_or_another_tokenizers(tmp_path, rows, sound):
    model = float32(small(vocab_size=rows, n_layer=1))
    if sound:
        return hf.write(tmp_path / "out", model, LETTERS)
    with pytest.raises(DataError, match=rf"out: the model has {rows} tokens and the tokenizer 76; use"):
        hf.write(tmp_path / "out", model, LETTERS)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_held_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"does not support residual 'post' .*; mainstem export safetensors"):
        hf.write(tmp_path / "out", float32(small("post")), None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    hf.write(tmp_path / "out", float32(small()), None)  # an empty one may be there
    before = (tmp_path / "out" / MODEL).read_bytes()
    for taken in (tmp_path / "out", tmp_path / "out" / MODEL):
        with pytest.raises(RunError, match=rf"{taken.name}: already exists; choose another"):
            hf.write(taken, float32(small()), None)
    assert (tmp_path / "out" / MODEL).read_bytes() == before


def test_a_disk_that_fills_while_weights_are_written_leaves_nothing(tmp_path, monkeypatch):
    write = checkpoint.save_file

    def torn(tensors, path, metadata):
        write(tensors, path, metadata)
        if path.name.startswith("model-00002"):
            raise SafetensorError(f"Error while serializing: I/O error: full (os error {errno.ENOSPC})")

    monkeypatch.setattr(checkpoint, "save_file", torn)
    with pytest.raises(TrainingFailed, match="out: no space left to write it"):
        hf.write(tmp_path / "out", float32(small(vocab_size=BPE.vocab_size)), BPE, max_shard_size=4_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", range(4))
def test_a_disk_that_fills_while_text_is_written_leaves_nothing(tmp_path, monkeypatch, number):
    write, calls = Path.write_text, iter(range(9))

    def torn(path, *arguments, **options):
        if next(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(TrainingFailed, match="out: no space left to write it"):
        hf.write(tmp_path / "out", float32(small(vocab_size=BPE.vocab_size)), BPE)
    assert list(tmp_path.iterdir()) == []
