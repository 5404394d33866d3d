"""`mainstem verify-resume`: law 9 under real kills, and a verdict that can be no."""

import shutil
from pathlib import Path

import pytest

from mainstem.cli import verify_resume
from mainstem.runs.folder import RunFolder
from mainstem.training.verify_resume import compare


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_kills_and_a_request_to_stop_change_nothing(mainstem, text, monkeypatch, kills):
    """Law 9: every shot met a run that was going on."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("mainstem.py").write_text("raise ImportError('the working folder is not imported from')")
    line = ["--kills", kills, "--terms", "1", "--steps", "80", "--save-every", "5", "--data", text]
    result = mainstem("verify-resume", *line, "--json")
    assert result.code == 0, result.err
    found = result.json
    assert (found["identical"], found["differences"]) == (True, [])
    assert (found["kills"], found["terms"]) == (kills, 1)
    assert found["starts"] >= kills + 2


def test_a_difference_is_a_failure(mainstem, monkeypatch):
    """One object, exit code 1."""
    answer = {"identical": False, "differences": ["optim.safetensors"], "kills": 1, "terms": 0, "starts": 2}
    monkeypatch.setattr(verify_resume, "verify_resume", lambda *a, **k: answer)
    result = mainstem("verify-resume", "--json")
    assert result.code == 1
    assert result.json["identical"] is False
    assert result.json["error"] == "a resumed run ended differently: optim.safetensors"


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["model.safetensors", "optim.safetensors", "metrics.jsonl", "vitals.jsonl"])
def test_one_byte_is_a_difference(small_run, tmp_path, file):
    a, b = RunFolder(small_run), RunFolder(shutil.copytree(small_run, tmp_path / "b"))
    assert compare(a, b) == []
    if file.endswith("jsonl"):
        with open(b.path / file, "a") as rows:
            rows.write('{"kind": "train", "step": 99}\n')
    else:
        flip(b.named("last") / file)
    assert compare(a, b) == [file]


def test_seconds_are_no_difference(small_run, tmp_path):
    b = RunFolder(shutil.copytree(small_run, tmp_path / "b"))
    b.metrics.write_text(b.metrics.read_text().replace('"seconds": ', '"seconds": 1'))
    assert compare(RunFolder(small_run), b) == []


def test_a_run_without_an_end_is_a_difference(small_run, tmp_path):
    assert compare(RunFolder(small_run), RunFolder(tmp_path)) == ["one of them has no last checkpoint"]
