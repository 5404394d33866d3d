"""A GGUF file holds the model that was written: read back by `gguf`, and run by llama.cpp where that is installed."""

import errno
import importlib
import json

import numpy as np
import pytest
import torch

from mainstem.errors import ConfigError, DataError, RunError, TrainingFailed, UserError
from mainstem.formats import gguf
from mainstem.formats.hf import folder as hf
from mainstem.formats.keys import weights
from mainstem.generation.decoding import generate_ids
from mainstem.model.quantized import quantize
from mainstem.presets import PRESETS
from mainstem.text import tokenizer as tokenizers
from mainstem.text.tokenizer import END_OF_TEXT, Bytes, Characters
from models import build, error, small

package = pytest.importorskip("gguf", reason="GGUF is written and read back needs the package gguf: mainstem[gguf]")

BPE = tokenizers.train("bpe", ["the river runs to the sea, and the sea is deep. 강물이 흐른다.\n" * 9], 290)
GROUPS = {"d_model": 32, "d_mlp": 64, "n_layer": 2}
"""Widths that Q8_0 holds."""


def made(**changes):
    return build(small(**changes), torch.float32)


def read(path):
    """The tensors of a file, by name, float32; and what it says of itself."""
    reader = package.GGUFReader(path)
    tensors = {}
    for each in reader.tensors:
        tensors[each.name] = torch.from_numpy(package.quants.dequantize(each.data, each.tensor_type).astype(np.float32))
    kinds = {each.name: each.tensor_type.name for each in reader.tensors}
    return tensors, kinds, {name: field.contents() for name, field in reader.fields.items()}


def written(tmp_path, model, tokenizer=None, dtype="f32", **facts):
    gguf.write(tmp_path / "out.gguf", model, tokenizer, dtype, facts)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    return read(tmp_path / "out.gguf")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_float32_tensors_are_the_models_own(tmp_path, tied, bias):
    """Every weight under llama.cpp's name, in (outputs, inputs) as we have it; no bias is a bias of zeros."""
    model = made(tie_embeddings=tied, bias=bias, d_mlp=12, vocab_size=12, n_ctx=12)
    tensors, kinds, _ = written(tmp_path, model)
    ours = weights(model)
    assert set(tensors) == set(map(gguf.KEYS.external, ours))
    assert ("output.weight" in tensors) == (not tied)
    assert set(kinds.values()) == {"F32"}
    for name, tensor in ours.items():
        assert torch.equal(tensors[gguf.KEYS.external(name)], tensor)
    assert {"blk.2.attn_qkv.bias", "blk.0.ffn_down.weight", "position_embd.weight"} <= set(tensors)
    assert bool(tensors["blk.1.ffn_up.bias"].any()) == bias


def test_names_are_those_that_the_package_gives_hugging_faces():
    given = package.get_tensor_name_map(package.MODEL_ARCH.GPT2, 2)
    for name in weights(made(n_layer=2, tie_embeddings=False)):
        assert gguf.KEYS.external(name) == given.get_name(hf.KEYS.external(name), (".weight", ".bias"))


@pytest.mark.parametrize(("dtype", "kind"), [("f16", "F16"), ("q8_0", "Q8_0")])
def test_matrices_are_rounded_as_asked_and_nothing_else_is(tmp_path, dtype, kind):
    model = made(**GROUPS, tie_embeddings=False)
    tensors, kinds, said = written(tmp_path, model, dtype=dtype)
    for name, tensor in weights(model).items():
        key = gguf.KEYS.external(name)
        narrowed = tensor.ndim == 2 and name != "wpe.weight"
        assert kinds[key] == (kind if narrowed else "F32")
        if not narrowed:
            assert torch.equal(tensors[key], tensor)
        elif dtype == "f16":
            assert torch.equal(tensors[key], tensor.half().float())
        else:
            groups, found = (each.unflatten(1, (-1, gguf.BLOCK_SIZE)) for each in (tensor, tensors[key]))
            step = groups.abs().amax(-1, keepdim=True) / 127
            assert ((found - groups).abs() <= (0.5 + 127 / 2048) * step).all()  # the step itself is kept as a half
    assert said["general.file_type"] == package.LlamaFileType[f"MOSTLY_{kind}"]


def test_a_narrow_model_is_widened(tmp_path):
    model = quantize(made(), "int8")
    tensors, _, _ = written(tmp_path, model)
    assert torch.equal(tensors["token_embd.weight"], model.wte.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_file_says_of_itself(tmp_path, tied):
    model = made(vocab_size=BPE.vocab_size, norm_eps=1e-6, d_mlp=20, tie_embeddings=tied)
    _, _, said = written(tmp_path, model, BPE, license="MIT", name="a name")
    expected = {
        "general.architecture": "gpt2", "general.name": "a name", "general.license": "MIT", "general.file_type": 0,
        "gpt2.context_length": 8, "gpt2.embedding_length": 12, "gpt2.block_count": 3, "gpt2.feed_forward_length": 20,
        "gpt2.attention.head_count": 2, "gpt2.attention.layer_norm_epsilon": pytest.approx(1e-6),
        "gpt2.vocab_size": 290, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.bos_token_id": 289, "tokenizer.ggml.eos_token_id": 289,
    }  # fmt: skip
    assert {name: said[name] for name in expected} == expected


@pytest.mark.parametrize("tokenizer", [BPE, Bytes()], ids=["bpe", "byte"])
def test_the_tokenizer_is_inside(tmp_path, tokenizer):
    """Every piece in GPT-2's letters for bytes; merges in order, each of two tokens that make a third."""
    _, _, said = written(tmp_path, made(vocab_size=tokenizer.vocab_size), tokenizer)
    pieces, merges = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.merges"]
    byte_of = tokenizers.byte_alphabet()
    assert [bytes(byte_of[c] for c in piece) for piece in pieces[:-1]] == tokenizer.token_bytes[:-1]
    assert pieces[-1] == END_OF_TEXT
    kinds = package.TokenType
    assert said["tokenizer.ggml.token_type"] == [kinds.NORMAL] * (len(pieces) - 1) + [kinds.CONTROL]
    if tokenizer is BPE:
        assert ["".join(pair.split(" ")) for pair in merges] == pieces[256:-1]
    else:  # llama.cpp wants one, and no text has this one's parts as single characters
        assert merges == [f"{END_OF_TEXT} {END_OF_TEXT}"]


def test_added_tokens_keep_their_names_and_kinds(tmp_path):
    """Special, and found in a text as it is written."""
    said = json.loads(BPE.file)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for i, name, special in ((290, "<|im_start|>", True), (291, "강물", False)):
        said["added_tokens"].append({"id": i, "content": name, **plain, "special": special})
    kinds, tokenizer = package.TokenType, tokenizers.BPE(json.dumps(said))
    _, _, found = written(tmp_path, made(vocab_size=292), tokenizer)
    assert found["tokenizer.ggml.tokens"][289:] == [END_OF_TEXT, "<|im_start|>", "강물"]
    assert found["tokenizer.ggml.token_type"][289:] == [kinds.CONTROL, kinds.CONTROL, kinds.USER_DEFINED]


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    said = json.loads(BPE.file)
    said["added_tokens"] = []
    with pytest.raises(DataError, match=r"llama\.cpp would use id 11"):
        written(tmp_path, made(vocab_size=289), tokenizers.BPE(json.dumps(said)))


@pytest.mark.parametrize(("dtype", "largest"), [("f16", 7e4), ("q8_0", 1e7)])
def test_a_weight_that_a_dtype_cannot_hold_is_refused(tmp_path, dtype, largest):
    model = made(**GROUPS)
    with torch.no_grad():
        model.blocks[1].mlp.c_fc.weight[3, 2] = largest
    with pytest.raises(ConfigError, match=r"weights: blk\.1\.ffn_up\.weight has .* use f32"):
        gguf.write(tmp_path / "out.gguf", model, None, dtype)
    assert not list(tmp_path.iterdir())


def test_without_a_tokenizer_a_file_takes_ids(tmp_path):
    _, _, said = written(tmp_path, made())
    assert said["tokenizer.ggml.model"] == "no_vocab"
    assert not any(name in said for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id"))
    assert said["general.name"] == "out"


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_no_id_reaches_are_left_out(tmp_path, tied):
    """A reader counts tokens by rows."""
    model = made(vocab_size=320, tie_embeddings=tied)
    tensors, _, said = written(tmp_path, model, BPE)
    assert said["gpt2.vocab_size"] == len(said["tokenizer.ggml.tokens"]) == 290
    assert torch.equal(tensors["token_embd.weight"], model.wte.weight[:290])
    if not tied:
        assert torch.equal(tensors["output.weight"], model.lm_head.weight[:290])
    with pytest.raises(DataError, match="the model has 289 tokens and the tokenizer 290"):
        gguf.write(tmp_path / "other.gguf", made(vocab_size=289), BPE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation": "gelu"}, r"activation 'gelu' \(supported: 'gelu_tanh'\)"),
        ({"activation": "relu"}, "activation 'relu'"),
        ({"activation": "swiglu"}, "activation 'swiglu'"),
        ({"attn_scale": 1.0}, r"attn_scale 1.0 \(supported: 0.408248\)"),
        ({"attn_scale_by_depth": True}, r"attn_scale_by_depth True \(supported: False\)"),
        ({"residual": "post"}, r"residual 'post' \(supported: 'pre'\)"),
        ({"norm": "rmsnorm"}, "norm 'rmsnorm'"),
        ({"position": "rotary"}, "position 'rotary'"),
        ({"qk_norm": True}, "qk_norm True"),
        ({"lm_head_bias": True}, "lm_head_bias True"),
        ({"d_head": 5}, "d_head 5"),
        ({"d_mlp": 0}, r"d_mlp 0 \(supported: an MLP in every block\)"),
        ({"n_layer": 0}, r"n_layer 0 \(supported: 1 or more\)"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises(
        ConfigError, match=rf"GGUF's gpt2 does not support .*{said}.*mainstem export safetensors supports every"
    ):
        gguf.write(tmp_path / "out.gguf", made(**changes), None)
    assert list(tmp_path.iterdir()) == []


def test_the_demos_form_is_held_and_two_presets_are_not():
    for name in ("andrea-nano", "bard", "andrea-12m", "andrea-120m", "andrea-480m", "gpt2", "tiny"):
        gguf.LAYOUT.require(PRESETS[name].model)
    for name, field in (("mini", "lm_head_bias True"), ("swift", "position 'rotary'")):
        with pytest.raises(ConfigError, match=field):
            gguf.LAYOUT.require(PRESETS[name].model)


@pytest.mark.parametrize(("field", "width"), [("d_model", 48), ("d_mlp", 100)])
def test_rows_that_are_no_whole_groups_are_refused(tmp_path, field, width):
    with pytest.raises(ConfigError, match=rf"q8_0 needs rows of a multiple of 32 weights, not {width}; use f16"):
        gguf.write(tmp_path / "out.gguf", made(**GROUPS | {field: width}), None, "q8_0")
    with pytest.raises(ConfigError, match=r"weights: unknown value 'q8'; did you mean 'q8_0'"):
        gguf.write(tmp_path / "out.gguf", made(), None, "q8")
    assert list(tmp_path.iterdir()) == []


def test_characters_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"kind char.*use mainstem export hf"):
        gguf.write(tmp_path / "out.gguf", made(vocab_size=3), Characters("ab"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["add_tensor", "write_kv_data_to_file", "write_tensors_to_file"])
@pytest.mark.parametrize("before", [None, b"GGUF, an older one"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, stage, before):
    """And closes the file that it was writing."""
    path = tmp_path / "out.gguf"
    if before is not None:
        path.write_bytes(before)

    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(package.GGUFWriter, stage, fail)
    with pytest.raises(TrainingFailed, match=r"out\.gguf: no space left to write it"):
        gguf.write(path, made(), None)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if before is None else [before])


def test_no_folder_to_write_in_is_said(tmp_path):
    with pytest.raises(RunError, match="nowhere: no such folder; create it first"):
        gguf.write(tmp_path / "nowhere" / "out.gguf", made(), None)
    with pytest.raises(RunError, match="is not a file"):
        gguf.write(tmp_path, made(), None)


def test_a_missing_package_is_said(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        UserError, match=r"needs the package gguf \(No module named 'gguf'\): pip install 'mainstem\[gguf\]'"
    ):
        gguf.write(tmp_path / "out.gguf", made(), None)
    assert list(tmp_path.iterdir()) == []


def test_what_a_file_does_not_say_is_told():
    assert gguf.left_out(None) == ["no tokenizer: llama.cpp reads and returns token ids"]
    assert gguf.left_out(BPE) == gguf.left_out(Bytes()) == []
    file = json.loads(BPE.file)
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r" ?\p{L}+|\p{N}|\S|\s"}
    assert "another pattern" in gguf.left_out(tokenizers.BPE(json.dumps(file)))[0]
    file = json.loads(BPE.file) | {"normalizer": {"type": "NFC"}}
    assert "a normalizer (NFC)" in gguf.left_out(tokenizers.BPE(json.dumps(file)))[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("mlps", "limit"), [(True, 1e-3), (False, 1e-5)], ids=["whole", "without MLPs"])
def test_llama_cpp_computes_the_same(tmp_path, tied, mlps, limit):
    """Its GELU goes through a table of halves: logits are nearly ours, and ours where no MLP writes."""
    llama = pytest.importorskip("llama_cpp", reason="llama-cpp-python is an optional extra: mainstem[llama]")
    model = made(d_model=64, d_mlp=64, n_ctx=256, vocab_size=BPE.vocab_size, tie_embeddings=tied)
    for block in model.blocks:
        block.mlp.c_proj.weight.data *= mlps
    gguf.write(tmp_path / "out.gguf", model, BPE)
    kept = {"type_k": llama.GGML_TYPE_F32, "type_v": llama.GGML_TYPE_F32}  # keys and values are halves otherwise
    there = llama.Llama(str(tmp_path / "out.gguf"), n_ctx=256, n_threads=1, logits_all=True, verbose=False, **kept)
    for text in ("the sea runs", "강물이  흐른다.\n\n\n", " \t the river's 1234567 \r\n deep🙂…"):
        assert there.tokenize(text.encode(), add_bos=True, special=False) == BPE.encode(text)
    prompt = BPE.encode("the sea runs")
    assert there.n_vocab() == BPE.vocab_size
    ids = prompt + generate_ids(model, [prompt], max_new_tokens=16, temperature=0)[0]
    there.eval(ids[:-1])
    found = torch.from_numpy(there.scores[: len(ids) - 1].copy())
    assert error(found, model(torch.tensor([ids[:-1]]))[0]) <= limit
    assert found[len(prompt) - 1 :].argmax(-1).tolist() == ids[len(prompt) :]
    there.close()


def test_a_write_that_is_cut_short_is_a_full_disk(tmp_path, monkeypatch):
    """NumPy says then how much was written, and no number."""

    def full(self, **options):
        raise OSError("65536 requested and 38856 written")

    monkeypatch.setattr(package.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(TrainingFailed, match=r"out\.gguf: no space left to write it"):
        gguf.write(tmp_path / "out.gguf", made(), None)
    assert not list(tmp_path.iterdir())


def test_another_file_is_not_replaced(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"run\.json: exists and is not a GGUF file"):
        gguf.write(tmp_path / "run.json", made(), None)
    for _ in range(2):
        gguf.write(tmp_path / "out.gguf", made(), None)
