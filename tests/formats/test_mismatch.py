"""A folder whose files do not belong together is refused, by the name of what differs."""

import re

import pytest
import theirs
import torch
from theirs import refusal

from mainstem.formats.hf import folder as hf
from mainstem.formats.hf.tokenizer import content
from mainstem.formats.load import load
from mainstem.text.tokenizer import Characters
from models import build, small

INDEX = "model.safetensors.index.json"
WTE, BLOCK = "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"
SIZE = 40


def letters(count):
    """A tokenizer of so many ids."""
    return Characters("".join(map(chr, range(0xAC00, 0xAC00 + count - 1))))


@pytest.fixture
def folders(tmp_path):
    """The same model in one file and in many."""
    model = build(small(vocab_size=SIZE), torch.float32)
    hf.write(tmp_path / "single", model, letters(SIZE))
    hf.write(tmp_path / "shards", model, letters(SIZE), max_shard_size=3_000)
    return {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda at: at.update({WTE: "../x.safetensors"}),
            rf"{WTE} is said to be in '../x.safetensors'; only safetensors",
        ),
        (lambda at: at.update({WTE: "/x.safetensors"}), "is said to be in '/x.safetensors'"),
        (lambda at: at.update({WTE: "pytorch_model.bin"}), "is said to be in 'pytorch_model.bin'"),
        (lambda at: at.update({WTE: 1}), "is said to be in 1"),
        (
            lambda at: at.update({WTE: "model-9.safetensors"}),
            rf"model-9.safetensors: not found, .* that {WTE} is in it",
        ),
        (lambda at: at.update({WTE: max(at.values())}), rf"it lacks {WTE}, and {INDEX} says otherwise; fetch both"),
        (lambda at: at.update({"other": at[WTE]}), rf"model-00001.*: it lacks other, and {INDEX} says otherwise"),
        (lambda at: at.pop(WTE), rf"model-00001.*: it has {WTE}, and {INDEX} says otherwise"),
        (lambda at: at.clear(), "no weight_map that names the file of each tensor"),
    ],
)
def test_an_index_that_is_not_true_is_refused(folders, change, said):
    path = folders["shards"]
    index = theirs.said(path, INDEX)
    change(index["weight_map"])
    theirs.put(path, index, INDEX)
    assert re.search(said, refusal(path))


def test_an_index_beside_one_whole_file_is_not_asked(folders):
    path = folders["single"]
    theirs.put(path, {}, INDEX)
    assert refusal(path) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({BLOCK: t[BLOCK].T}), rf"{BLOCK} is \(48, 12\), not \(12, 48\) as the config has it"),
        (lambda t: t.update({WTE: t[WTE][:-1]}), rf"{WTE} is \(39, 12\), not \(40, 12\)"),
        (lambda t: t.update({WTE: torch.tensor(1.0)}), rf"{WTE} is \(\), not \(40, 12\)"),
        (lambda t: t[BLOCK].view(-1)[7:8].fill_(float("nan")), rf"{BLOCK} is not finite"),
        (lambda t: t[WTE].view(-1)[7:8].fill_(float("inf")), rf"{WTE} is not finite"),
        (
            lambda t: t.update({"lm_head.weight": t[WTE] + 1}),
            r"lm_head.weight is not wte.weight, and config.json ties them",
        ),
        (lambda t: t.update({"lm_head.weight": t[WTE].half()}), r"lm_head.weight is not wte.weight"),
        (lambda t: t.update({"lm_head.bias": torch.zeros(SIZE)}), r"it has lm_head.bias, and the config has not"),
        (
            lambda t: t.update({"score.weight": torch.zeros(2)}),
            r"it has transformer.score.weight, and the config has not",
        ),
        (lambda t: t.update({"transformer.h.3.ln_1.bias": torch.zeros(12)}), r"it has transformer.h.3.ln_1.bias"),
        (lambda t: t.pop(BLOCK), rf"it lacks {BLOCK}, which the config has"),
        (lambda t: t.pop(WTE), rf"it lacks {WTE}"),
        (lambda t: t.update({"wte.weight": t[WTE] + 0}), r"wte.weight is there twice, with `transformer.` and without"),
        (lambda t: t.update({BLOCK: t[BLOCK].to(torch.float8_e4m3fn)}), rf"{BLOCK} is F8_E4M3; only F32"),
        (lambda t: t.update({BLOCK: t[BLOCK].int()}), rf"{BLOCK} is I32; only F32, BF16, F16, F64 can be opened"),
        (lambda t: t.update({BLOCK: t[BLOCK].to(torch.complex64)}), rf"{BLOCK} is C64"),
    ],
)
def test_weights_that_are_not_the_configs_are_refused_by_name(folders, change, said):
    path = folders["single"]
    theirs.rewrite(path, change)
    assert re.search(said, refusal(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_embd": 1 << 20},
        {"n_positions": 1 << 30},
        {"n_layer": 1 << 16},
        {"n_inner": 1 << 30},
        {"vocab_size": SIZE << 20},
    ],
)
def test_a_config_far_larger_than_its_weights_builds_nothing(folders, changes):
    path = folders["single"]
    (path / "tokenizer.json").unlink()
    theirs.put(path, theirs.said(path) | changes)
    assert re.search(r"config\.json: a model of its sizes has [\d,]{9,} parameters, and the folder 6,", refusal(path))


@pytest.mark.parametrize("ids", [SIZE - 8, SIZE + 1])
def test_a_tokenizer_of_another_size_is_refused(folders, ids):
    """So few ids that the other rows are no padding, or one more than rows."""
    path = folders["single"]
    (path / "tokenizer.json").write_text(content(letters(ids)), encoding="utf-8")
    assert f"{path}: the model has 40 tokens and the tokenizer {ids}; use the tokenizer" in refusal(path)


def test_a_tokenizer_beside_padding_is_not(folders):
    path = folders["single"]
    (path / "tokenizer.json").write_text(content(letters(SIZE - 7)), encoding="utf-8")
    model, tokenizer = load(path)
    assert (model.config.vocab_size, tokenizer.vocab_size) == (SIZE, SIZE - 7)
