"""The model that comes with the package."""

import json
import re

import pytest
import torch
from make_bundled_model import MOST

from mainstem import atomic
from mainstem.cli import main
from mainstem.formats.load import load
from mainstem.formats.run import resolve
from mainstem.generation.decoding import generate
from mainstem.model.quantized import weights_of
from mainstem.presets import preset
from mainstem.runs import checkpoint, folder


@pytest.mark.parametrize("name", folder.BUNDLED)
def test_it_is_whole_small_and_what_its_card_says(name):
    path = folder.BUNDLED[name]
    assert atomic.fault(path) is None
    assert sum(file.stat().st_size for file in path.iterdir()) <= MOST
    model, tokenizer = load(name)
    assert weights_of(model) == "int8"
    assert model.config == preset(name).model.replace(vocab_size=tokenizer.vocab_size).resolved()
    card = (path / "README.md").read_text(encoding="utf-8")
    assert f"mainstem train {name} " in card
    assert float(re.search(r"([\d.]+) bits per byte", card)[1]) < 2.1


def test_it_speaks():
    model, tokenizer = load("bard")
    text = generate(model, tokenizer, "ROMEO:", max_new_tokens=200, seed=1, stop_at_eot=False)
    assert len(re.findall(r"\b(?:the|and|of|to|my|I|you|is|in|a|not|that)\b", text)) >= 3


def test_it_can_be_opened(capsys):
    """Rows of its attribution sum to the logit, as for a run of one's own."""
    assert main(["inspect", "attribution", "bard", "O Romeo, Romeo! wherefore art", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["closing_error"] < 1e-4


def test_a_run_of_ones_own_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("bard").path == folder.BUNDLED["bard"]
    model, tokenizer = load("bard")
    with torch.no_grad():
        model.wpe.weight.zero_()
    checkpoint.save(tmp_path / "bard", model, tokenizer)
    assert not load("bard")[0].wpe.weight.any()
