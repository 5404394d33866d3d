"""`mainstem import nanogpt`: a checkpoint of nanoGPT or minGPT becomes a RUN, or one line says why not."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from formats import karpathy
from formats.karpathy import ARGS, C, H, L, T, V
from mainstem import counts
from mainstem.formats.load import load
from mainstem.text import tokenizer as tokenizers
from models import normal

ALPHABET = "abcdefgh 강물\n\t"  # V characters
TRUST = "--trust-pickle"


class Canary:
    """A pickle of it makes a file where it is opened."""

    def __reduce__(self):
        return Path.touch, (Path("canary").absolute(),)


@pytest.fixture
def nano(tmp_path):
    """nanoGPT, its checkpoint and its meta.pkl in the folder that the commands run in."""
    assert len(ALPHABET) == V
    model = karpathy.nanogpt()
    torch.save(karpathy.checkpoint(model), tmp_path / "ckpt.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(karpathy.meta(ALPHABET)))
    return model


def logits(model):
    with torch.no_grad():
        return model.double()(torch.arange(T)[None] % V)


def refused(mainstem, *argv, said, code=2):
    """One line on stderr, nothing on stdout, and nothing is left."""
    before = sorted(Path().rglob("*"))
    result = mainstem("import", "nanogpt", *argv)
    assert result.code == code
    assert not result.out
    assert result.err.startswith("mainstem: ")
    assert result.err.count("\n") == 1
    for words in [said] if isinstance(said, str) else said:
        assert words in result.err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("out", ["run", "runs/새 폴더"])
def test_the_run_is_what_the_file_was(mainstem, nano, out):
    result = mainstem("import", "nanogpt", "ckpt.pt", "--out", out, TRUST, "--tokenizer", "meta.pkl")
    assert (result.code, result.err) == (0, "")
    first, second, folder, last = result.out.splitlines()
    total = counts.parameters(load(out)[0].config).total
    assert first == f"ckpt.pt: {total:,} parameters, {V} tokens, {T} positions"
    assert second == f"{L} blocks, {C} wide, {H} heads of {C // H}, gelu"
    assert folder == f"run folder  {out}"
    assert last == f'next        mainstem generate {out if out == "run" else repr(out)} "your prompt"'
    model, tokenizer = load(out)
    torch.testing.assert_close(logits(model), logits(nano), rtol=0, atol=1e-12)
    assert tokenizer.encode("강물 a") == [karpathy.meta(ALPHABET)["stoi"][each] for each in "강물 a"]
    said = mainstem("generate", out, "강물", "--max-new-tokens", 20, "--json")
    assert said.code == 0
    assert set(said.json["text"]) <= set(ALPHABET)


def test_json_has_the_facts(mainstem, nano):
    result = mainstem("import", "nanogpt", "ckpt.pt", "--out", "run", TRUST, "--tokenizer", "meta.pkl", "--json")
    model, _ = load("run")
    assert result.json == {
        "out": "run",
        "config": model.config.to_dict(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokenizer": "char",
    }


def test_without_a_tokenizer_it_opens_and_is_said(mainstem, nano, tmp_path):
    result = mainstem("import", "nanogpt", "ckpt.pt", "--out", "run", TRUST, "--json")
    assert result.json["tokenizer"] is None
    assert "note: run has no tokenizer" in result.err
    assert "next" not in result.err
    assert load("run")[1] is None
    tokenizers.Characters(ALPHABET, end_of_text=False).save(tmp_path / "run" / "tokenizer.json")
    assert mainstem("generate", "run", "a", "--max-new-tokens", 2).code == 0


def test_every_kind_of_tokenizer_is_found(mainstem, nano, small_run, tmp_path):
    """A RUN of 300 tokens, a file, GPT-2's two files; here for a model whose vocabulary is padded to 320."""
    tokenizer = load(small_run)[1]
    weights = karpathy.nanogpt().state_dict()
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = normal(320, C).float()
    torch.save({"model": weights, "model_args": {**ARGS, "vocab_size": 320}}, "wide.pt")
    tokenizer.save(tmp_path / "t.json")
    folder = tmp_path / "gpt2"
    folder.mkdir()
    said = json.loads(tokenizer.file)
    (folder / "vocab.json").write_text(json.dumps(said["model"]["vocab"] | {"<|endoftext|>": 299}))
    lines = [" ".join(pair) if isinstance(pair, list) else pair for pair in said["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines))
    for number, name in enumerate([small_run, "t.json", folder]):
        line = ["wide.pt", "--out", f"run{number}", TRUST, "--tokenizer", name, "--json"]
        assert mainstem("import", "nanogpt", *line).json["tokenizer"] == "bpe"
        assert load(f"run{number}")[1].encode("the river") == tokenizer.encode("the river")
    refused(mainstem, "ckpt.pt", "--out", "no", TRUST, "--tokenizer", "t.json", said=["ckpt.pt: ", "13 tokens", "300"])


def test_mingpt_needs_its_heads(mainstem, tmp_path):
    torch.save(karpathy.mingpt_of_2020().state_dict(), "model.pt")
    refused(mainstem, "model.pt", "--out", "run", TRUST, said="model.pt: the number of heads is not recorded")
    refused(mainstem, "model.pt", "--out", "run", TRUST, "--n-head", "5", said="model.pt: n_head: 5 heads do not")
    assert mainstem("import", "nanogpt", "model.pt", "--out", "run", TRUST, "--n-head", H).code == 0


def test_a_form_of_two_programs_needs_its_activation(mainstem, tmp_path):
    torch.save(karpathy.early_nanogpt().state_dict(), "ckpt.pt")
    line = ["ckpt.pt", "--out", "run", TRUST, "--n-head", H]
    refused(mainstem, *line, said="give --activation")
    result = mainstem("import", "nanogpt", *line, "--activation", "gelu_tanh", "--json")
    assert result.json["config"]["activation"] == "gelu_tanh"


def test_a_place_in_use_is_refused_before_anything_is_read(mainstem, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in ("run", "file"):
        refused(mainstem, "absent.pt", "--out", out, said=f"{out}: already exists")


def test_an_empty_folder_is_filled(mainstem, nano, tmp_path):
    (tmp_path / "run").mkdir()
    assert mainstem("import", "nanogpt", "ckpt.pt", "--out", "run", TRUST).code == 0
    load("run")


def test_without_trust_nothing_is_opened(mainstem, nano, tmp_path):
    said = "a pickle, which can run any code when it is loaded; if you trust its source, add --trust-pickle"
    refused(mainstem, "ckpt.pt", "--out", "run", said=f"ckpt.pt: {said}")
    refused(mainstem, "ckpt.pt", "--out", "run", "--tokenizer", "meta.pkl", said=f"meta.pkl: {said}")


@pytest.mark.parametrize("trust", [[], [TRUST]])
@pytest.mark.parametrize("place", ["file", "inside", "meta"])
def test_a_hostile_pickle_is_never_run(mainstem, nano, tmp_path, place, trust):
    shutil.copy("ckpt.pt", "나쁜.pt")
    if place == "file":
        (tmp_path / "나쁜.pt").write_bytes(pickle.dumps(Canary()))
    elif place == "inside":
        torch.save(karpathy.checkpoint(nano) | {"config": Canary()}, "나쁜.pt")
    else:
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(karpathy.meta(ALPHABET) | {"more": Canary()}))
    line = ["나쁜.pt", "--out", "run", *trust, *(["--tokenizer", "meta.pkl"] if place == "meta" else [])]
    refused(mainstem, *line, said="meta.pkl: " if place == "meta" else "나쁜.pt: ")
    assert not Path("canary").exists()


@pytest.mark.parametrize("harm", ["cut", "text", "nan", "gone", "absent", "folder"])
def test_what_is_no_checkpoint_is_one_line(mainstem, nano, tmp_path, harm):
    file = tmp_path / "ckpt.pt"
    found = karpathy.checkpoint(nano)
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-500])
    elif harm == "text":
        file.write_text("hello world\n" * 9)
    elif harm == "nan":
        found["model"]["transformer.ln_f.bias"][0] = torch.nan
        torch.save(found, file)
    elif harm == "gone":
        del found["model"]["transformer.ln_f.bias"]
        torch.save(found, file)
    else:
        file.unlink()
        if harm == "folder":
            file.mkdir()
    refused(mainstem, "ckpt.pt", "--out", "run", TRUST, said="ckpt.pt: ")


def test_a_full_disk_leaves_nothing(mainstem, nano, monkeypatch):
    from mainstem.runs import checkpoint

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    refused(mainstem, "ckpt.pt", "--out", "run", TRUST, said="run: no space left to write it", code=1)


def test_the_formats_are_listed(mainstem):
    for argv in ([], ["--help"]):
        result = mainstem("import", *argv)
        assert result.code == 0
        assert "nanogpt" in result.out
        assert "hf" in result.out
    assert "did you mean 'nanogpt'?" in mainstem("import", "nanogtp").err
    assert TRUST in mainstem("import", "nanogpt", "--help").out


def test_training_goes_on_from_an_import(mainstem, nano, tmp_path):
    """Its characters have no end of text, so nothing stands between documents."""
    mainstem("import", "nanogpt", "ckpt.pt", "--out", "run", TRUST, "--tokenizer", "meta.pkl")
    alphabet = [piece.decode() for piece in load("run")[1].token_bytes]
    Path("text.txt").write_text("".join(alphabet) * 40, encoding="utf-8")
    result = mainstem("train", "on", "--init-from", "run", "--data", "text.txt", "--steps", "1", "--batch-size", "2")
    assert result.code == 0, result.err
    assert load("on")[1].hash == load("run")[1].hash
    mainstem("import", "nanogpt", "ckpt.pt", "--out", "bare", TRUST)
    line = ["train", "more", "--init-from", "bare", "--data", "text.txt", "--steps", "1", "--batch-size", "2"]
    assert mainstem(*line).code == 2
    assert mainstem(*line, "--tokenizer", "run").code == 0
