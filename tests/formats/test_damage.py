"""What is damaged is named in one line; what is hostile is never run."""

import os
import pickle
import re
import shutil

import pytest
import theirs
import torch
from hypothesis import given
from hypothesis import strategies as st
from theirs import refusal

from mainstem.formats import run
from mainstem.formats.hf import folder as hf
from mainstem.formats.load import load
from mainstem.runs import checkpoint
from mainstem.text.tokenizer import Characters
from models import build, few, small

IDS = torch.arange(8)[None]
BPE = theirs.by_gpt2s_pattern(["the cat sat on the mat, and the dog on the cat. 강물이 흐른다.\n\n" * 9])
MODEL = build(small(vocab_size=BPE.vocab_size), torch.float32)
LETTERS = Characters("".join(map(chr, range(0xAC00, 0xAC00 + BPE.vocab_size - 1))))


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def torch_bomb(path, canary):
    torch.save({"transformer.wte.weight": Bomb(canary)}, path)


HARMS = {
    "cut": lambda path, canary: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut by a line": lambda path, canary: path.write_bytes(path.read_bytes().rstrip().rpartition(b"\n")[0]),
    "text": lambda path, canary: path.write_text("this is not what it was\n"),
    "empty": lambda path, canary: path.write_bytes(b""),
    "gone": lambda path, canary: path.unlink(),
    "a folder": lambda path, canary: (path.unlink(), path.mkdir()),
    "a list": lambda path, canary: path.write_text("[]"),
    "an object": lambda path, canary: path.write_text('{"format": "other"}'),
    "pickle": lambda path, canary: path.write_bytes(pickle.dumps(Bomb(canary))),
    "pickle in letters": lambda path, canary: path.write_bytes(pickle.dumps(Bomb(canary), protocol=0)),
    "torch's pickle": torch_bomb,
}


def folders(root):
    """A RUN of each kind, by name."""
    checkpoint.save(root / "ours", MODEL, BPE, card="# A card\n")
    hf.write(root / "single", MODEL, BPE, card="# A card\n")
    hf.write(root / "shards", MODEL, BPE, max_shard_size=8_000)
    hf.write(root / "characters", MODEL, LETTERS)
    shutil.copytree(root / "single", root / "pair")
    (root / "pair" / "tokenizer.json").unlink()
    return {path.name: path for path in root.iterdir()}


IDLE = {
    "single": ("README.md", "generation_config.json", "vocab.json", "merges.txt"),
    "shards": ("generation_config.json", "vocab.json", "merges.txt"),
    "characters": ("generation_config.json",),
    "pair": ("README.md", "generation_config.json"),
}
"""Files of a folder that are not read."""
SPARE = {"tokenizer_config.json": ("gone", "a folder", "an object"), "tokenizer.json": ("gone", "a folder")}
"""Files that a folder may be without; of the settings one alone is read."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def canary(tmp_path):
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("protocol", [0, pickle.DEFAULT_PROTOCOL])
def test_the_canary_sings(tmp_path, protocol):
    """What the other tests never see."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "canary"), protocol))
    assert (tmp_path / "canary").is_dir()
    torch_bomb(tmp_path / "file", tmp_path / "again")
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "again").is_dir()


def require_as_it_was(path, kind):
    """That it opens as the model and the tokenizer that were written, or without one."""
    model, tokenizer = load(path)
    assert torch.equal(model(IDS), MODEL(IDS))
    if tokenizer is not None:
        expected, text = (LETTERS, "각가갂") if kind == "characters" else (BPE, "the cat 가\n\n1234")
        assert tokenizer.token_bytes == expected.token_bytes
        assert tokenizer.encode(text) == expected.encode(text)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", ["ours", *IDLE])
def test_every_file_of_every_run_may_be_damaged(runs, tmp_path, canary, kind, harm):
    for file in sorted(path.name for path in runs[kind].iterdir()):
        path = shutil.copytree(runs[kind], tmp_path / file / "run")
        HARMS[harm](path / file, canary)
        for open_ in (run.model_config, run.tokenizer):
            refusal(path, open_)
        said = refusal(path)
        if said is None:
            if kind == "ours":
                assert (file, harm) == ("state.json", "a list")  # not read, and as long as it was
                continue
            assert file in IDLE[kind] or harm in SPARE.get(file, ()) or same(runs[kind] / file, path / file), file
            require_as_it_was(path, kind)
        else:
            assert file in said
            assert file not in IDLE.get(kind, ())


def same(before, after):
    """Whether a file says what it said, though it may have lost a line's end."""
    return after.is_file() and before.read_bytes().split() == after.read_bytes().split()


@pytest.mark.parametrize("kind", ["ours", *IDLE])
def test_an_undamaged_run_opens(runs, kind):
    assert load(runs[kind])[1].vocab_size == BPE.vocab_size
    require_as_it_was(runs[kind], kind)


@few
@given(st.data())
@pytest.mark.parametrize("kind", IDLE)
def test_any_other_bytes_open_or_are_named(runs, tmp_path_factory, kind, data):
    path = shutil.copytree(runs[kind], tmp_path_factory.mktemp("copy") / "run")
    file = path / data.draw(st.sampled_from(sorted(each.name for each in path.iterdir())))
    content = bytearray(file.read_bytes())
    digits = st.sampled_from([b"0", b"9", b" ", b'"', b",", b"{", b"-", b"."])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(content), 2_000)))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(digits | st.binary(max_size=3))
    file.write_bytes(content)
    for open_ in (load, run.model_config, run.tokenizer):
        refusal(path, open_)


def test_a_pickle_of_weights_alone_is_not_opened(runs, tmp_path, canary):
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt"):
        path = shutil.copytree(runs["single"], tmp_path / name / "run")
        (path / theirs.MODEL).unlink()
        torch_bomb(path / name, canary)
        assert re.search(rf"{name}: a pickle, which can run any code .*save the model as {theirs.MODEL}", refusal(path))
        (path / "config.json").unlink()
        assert "config.json" in refusal(path)
