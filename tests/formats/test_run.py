"""A RUN is resolved once, and each file that is used is verified once."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from mainstem import atomic
from mainstem.errors import RunError
from mainstem.formats.load import load
from mainstem.formats.run import model_config, resolve, tokenizer
from mainstem.runs.folder import CONFIG, MODEL, OPTIM
from mainstem.text.tokens import TOKENIZER


@pytest.fixture
def hashed(monkeypatch):
    """How often the sha256 of each file was computed, by its name."""
    names = Counter()
    real = atomic.sha256
    monkeypatch.setattr(atomic, "sha256", lambda path: names.update([Path(path).name]) or real(path))
    return names


@pytest.mark.parametrize("which", ["run", "checkpoint"])
def test_load_hashes_each_file_that_it_reads_once(trained, hashed, which):
    """And never the optimizer's, which it does not read."""
    load(trained.path if which == "run" else trained.checkpoint_at(8))
    assert hashed == {CONFIG: 1, MODEL: 1, TOKENIZER: 1}


def test_a_bundled_model_is_hashed_once(hashed):
    load("bard")
    assert hashed == {CONFIG: 1, MODEL: 1, TOKENIZER: 1}


@pytest.mark.parametrize("which", ["run", "checkpoint", "bundled"])
def test_a_config_is_read_without_hashing_weights(trained, hashed, which):
    model_config({"run": trained.path, "checkpoint": trained.checkpoint_at(8), "bundled": "bard"}[which])
    assert not set(hashed) & {MODEL, OPTIM}


def test_a_tokenizer_is_read_without_hashing_weights(hashed):
    tokenizer("bard")
    assert hashed == {TOKENIZER: 1}


def test_what_was_resolved_is_resolved(trained, hashed):
    """Its config, tokenizer and weights are all of one checkpoint, each file hashed once."""
    folder = resolve(trained.path)
    assert resolve(folder) is folder
    model, own = load(folder)
    assert folder.config == model.config
    assert folder.tokenizer is own
    assert folder.weights == "fp32"
    assert hashed == {CONFIG: 1, MODEL: 1, TOKENIZER: 1}


@pytest.mark.parametrize("file", [CONFIG, MODEL, TOKENIZER])
def test_a_damaged_file_is_refused_by_name_and_in_a_run_passed_over(copied, file):
    """The best checkpoint is at 12: with one byte changed, a run opens the next one and says so."""
    run = copied()
    path = run.checkpoint_at(12) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=f"{file}: its sha256 is not the one that was written; open another checkpoint"):
        load(path.parent)
    notices = []
    folder = resolve(run.path, notices.append)
    assert folder.path == run.checkpoint_at(8)
    assert notices == [f"passed over {path}: its sha256 is not the one that was written; {folder.path} is opened"]


def test_a_damaged_optimizer_does_not_keep_a_model_from_being_opened(copied):
    """Its bytes are not read; a file that is cut short is no valid checkpoint."""
    path = copied().checkpoint_at(12)
    content = bytearray((path / OPTIM).read_bytes())
    content[-1] ^= 1
    (path / OPTIM).write_bytes(content)
    load(path)
    (path / OPTIM).write_bytes(content[:-1])
    with pytest.raises(RunError, match=r"optim\.safetensors: "):
        load(path)


def test_a_checkpoint_without_a_tokenizer_has_none(trained, tmp_path):
    path = shutil.copytree(trained.checkpoint_at(12), tmp_path / "step-00000012")
    (path / TOKENIZER).unlink()
    manifest = atomic.read_json(path / atomic.MANIFEST)
    del manifest[TOKENIZER]
    (path / atomic.MANIFEST).write_text(atomic.to_json(manifest))
    assert not resolve(path).has_tokenizer
    assert load(path)[1] is None


def test_a_file_that_the_manifest_leaves_out_is_not_verified(copied):
    """Taking an entry out of the manifest must not make a changed file count as checked."""
    checkpoint = copied().checkpoint_at(8)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["model.safetensors"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"model\.safetensors: manifest\.json does not list it"):
        load(checkpoint)


def test_a_checkpoint_of_ours_has_a_tokenizer_only_in_its_own_format(copied):
    checkpoint = copied().checkpoint_at(8)
    (checkpoint / "tokenizer.json").rename(checkpoint / "vocab.json")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["tokenizer.json"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    opened = resolve(checkpoint)
    assert (opened.has_tokenizer, opened.tokenizer) == (False, None)
