"""`mainstem doctor`: findings as a table or an object; they do not change the exit code."""

import shutil
from pathlib import Path


def names(found, ok):
    return {finding["name"] for finding in found["findings"] if finding["ok"] == ok}


def test_a_preset_before_step_0(mainstem):
    found = mainstem("doctor", "andrea-12m", "--json").json
    assert found["target"] == "andrea-12m"
    assert names(found, True) | names(found, False) == {"memory", "disk", "tokens", "work", "rate", "warmup"}
    assert found["ok"] == (names(found, False) == set())
    said = mainstem("doctor", "andrea-12m").out
    assert "ok  warmup" in said


def test_a_run_and_a_damaged_one(mainstem, small_run):
    found = mainstem("doctor", small_run, "--json").json
    assert {"checkpoint", "progress", "stream", "epochs"} <= names(found, True)
    shutil.copytree(small_run, "run")
    Path("run/checkpoints/step-00000012/model.safetensors").write_bytes(b"x")
    result = mainstem("doctor", "run", "--json")
    assert result.code == 0
    assert not result.json["ok"]
    assert "checkpoint" in names(result.json, False)
    said = mainstem("doctor", "run").out
    assert "!!  checkpoint  damaged: run/checkpoints/step-00000012/model.safetensors: 1 bytes" in said


def test_a_failed_run_is_told(mainstem, shape):
    line = ["--lr", "1e9", "--warmup", "0", "--model.residual", "none"]
    assert mainstem("train", "run", *shape, *line).code == 1
    found = mainstem("doctor", "run", "--json").json
    assert "failure" in names(found, False)


def test_a_folder_that_is_no_run_does_not_open(mainstem, tmp_path):
    (tmp_path / "empty").mkdir()
    result = mainstem("doctor", "empty", "--json")
    assert names(result.json, False) == {"opens"}
    assert "neither a run folder (no run.json) nor a checkpoint" in result.json["findings"][0]["text"]


def test_a_model_that_was_not_trained_here(mainstem, small_run):
    for run in (Path(small_run) / "checkpoints/step-00000012", "bard"):
        assert mainstem("doctor", str(run), "--json").json["ok"]
    assert mainstem("doctor", "barf").code == 2
