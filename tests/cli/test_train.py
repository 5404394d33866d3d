"""`mainstem train`: one line starts and resumes; what may change, what may not, and what a stop leaves."""

import json
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

import training_runs
from mainstem import atomic
from mainstem.cli import demo
from mainstem.config import ModelConfig
from mainstem.presets import PRESETS, Preset
from mainstem.runs.folder import RunFolder, read_rows

LAST = "checkpoints/step-00000012"


def notes(result):
    return "\n".join(result.json["notes"])


def test_a_run_is_made_and_summed_up(mainstem, shape):
    result = mainstem("train", "run", *shape, "--json")
    assert result.code == 0
    found, rows = result.json, read_rows(Path("run/metrics.jsonl"))
    assert (found["run"], found["steps"], found["tokens"]) == ("run", 12, 12 * 8 * 16)
    assert found["parameters"] == mainstem("info", "run", "--json").json["parameters"]["total"]
    assert found["val_bits_per_byte"] == [row for row in rows if row["kind"] == "eval"][-1]["bits_per_byte"]
    assert found["train_loss"] == [row for row in rows if row["kind"] == "train"][-1]["loss"]
    assert found["peak_memory_bytes"] > 10**7
    assert [row["block"] for row in read_rows(Path("run/vitals.jsonl"))] == [0, 1, 2] * 2


def test_what_a_person_sees(mainstem, shape):
    said = mainstem("train", "run", *shape)
    assert "tiny: 2 blocks, 32 wide, residual pre; " in said.out
    assert "lines.txt: 1 documents, 0.01 MB, " in said.out
    assert "the stream at step 6" in said.out
    assert "depth  stream  attn write  mlp write" in said.out
    assert "next        mainstem generate run" in said.out
    assert "held-out " in said.err
    assert "MFU" not in said.out + said.err


def test_the_same_line_resumes(mainstem, shape):
    """Law 9, through the command line: damaged at the end, and typed again."""
    mainstem("train", "whole", *shape)
    mainstem("train", "run", *shape)
    Path("run", LAST, "manifest.json").unlink()
    again = mainstem("train", "run", *shape, "--json")
    assert f"passed over run/{LAST}: no manifest.json" in notes(again)
    assert "resumed at step 8 of 12 from run/checkpoints/step-00000008" in notes(again)
    assert training_runs.end(RunFolder("run")) == training_runs.end(RunFolder("whole"))


@pytest.mark.parametrize("line", ["", "--steps 12", "--seed 1 --batch-size 8", "--model.d-model 32"])
def test_what_is_saved_need_not_be_typed(mainstem, small_run, line):
    """Preset < saved config < typed flags; a finished run says so."""
    run = shutil.copytree(small_run, "run")
    again = mainstem("train", run, *line.split(), "--json")
    assert again.code == 0
    assert "this run has done its 12 steps; --extend with more --steps trains it on" in notes(again)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--lr 0.5", "lr: saved 0.003, asked for 0.5"),
        ("--seed 3", "seed: saved 1, asked for 3"),
        ("--model.n-layer 3", "model.n_layer: saved 2, asked for 3"),
        ("--preset mini", "preset: saved 'tiny', asked for 'mini'"),
        ("--newlines lf", "newlines: saved 'keep', asked for 'lf'"),
        ("--lr 0.5 --seed 3", "lr: saved 0.003, asked for 0.5; seed: saved 1, asked for 3"),
        ("--steps 20", "the run was started for 12, and 20 were asked for; add --extend"),
        ("--steps 20 --extend --lr 0.5", "lr: saved 0.003, asked for 0.5"),
    ],
)
def test_a_run_cannot_change_as_it_goes_on(mainstem, small_run, line, said):
    """Refused with both values."""
    before = (small_run / "run.json").read_bytes()
    result = mainstem("train", small_run, *line.split())
    assert result.code == 2
    assert said in result.err
    assert (small_run / "run.json").read_bytes() == before


def test_what_may_change_may_change(mainstem, small_run):
    run = shutil.copytree(small_run, "run")
    changes = ["--save-every", "3", "--eval-every", "7", "--vitals-every", "0", "--keep", "5", "--device", "cpu"]
    assert mainstem("train", run, *changes).code == 0
    assert mainstem("train", run).code == 0  # and is saved
    assert RunFolder(run).settings()["train"]["save_every"] == 3


def test_extending_is_said(mainstem, small_run):
    """Old and new length; the run goes on from where it was."""
    run = shutil.copytree(small_run, "run")
    result = mainstem("train", run, "--steps", "15", "--extend", "--json")
    assert "steps 12 -> 15; the schedule is that of 15 steps" in notes(result)
    assert result.json["steps"] == 15
    assert [row["step"] for row in read_rows(RunFolder(run).metrics) if row["kind"] == "train"] == list(range(1, 16))


@pytest.mark.parametrize("behind", [False, True])
def test_the_run_may_stand_behind_the_flags(mainstem, shape, behind):
    """Also when it is resumed: the saved config is found there."""
    line = ["--preset", "tiny", *shape, "--json"]
    for words in ((["runs/x", *line], [*line, "runs/x"])[behind], ["--seed", "1", "runs/x", "--json"]):
        result = mainstem("train", *words)
        assert (result.code, result.json["run"]) == (0, "runs/x")
    assert "has done its 12 steps" in notes(result)


def test_without_a_run_the_folder_is_the_presets(mainstem, shape):
    assert mainstem("train", *shape, "--json").json["run"] == "runs/tiny"
    assert mainstem("train", "--out=other", *shape, "--json").json["run"] == "other"


def test_tokens_instead_of_steps(mainstem, shape):
    """Rounded up to whole steps; the same line resumes; with --steps it would say two things at once."""
    line = ["train", "run", *shape, "--tokens", str(3 * 8 * 16 + 1), "--json"]
    assert "no --steps beside it" in mainstem(*line).json["error"]
    line.remove("--steps")
    line.remove("12")
    assert mainstem(*line).json["steps"] == 4
    assert "has done its 4 steps" in notes(mainstem(*line))


@pytest.mark.parametrize("spelling", [["--lr", "3e-4"], ["--lr=1"], ["--lr=3e-4"]])
def test_numbers_may_be_spelled_in_any_way(mainstem, shape, spelling):
    assert mainstem("train", "run", *shape, *spelling, "--steps", "1").code == 0
    asked = json.loads(Path("run/run.json").read_text())["train"]["lr"]
    assert asked == float(spelling[-1].removeprefix("--lr="))


def test_a_value_may_hold_an_equals_sign(mainstem, shape, tmp_path):
    (tmp_path / "a=b.txt").write_text("a=b one river=two " * 60)
    assert mainstem("train", "run=1", *shape, "--data=a=b.txt", "--separator", "=", "--steps", "1").code == 0
    assert Path("run=1/run.json").is_file()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_dry_run_shows_each_parameter_in_one_group(mainstem, shape, optimizer):
    """Nothing is trained."""
    found = mainstem("train", "run", *shape, "--optimizer", optimizer, "--dry-run", "--json").json
    names = [name for group in found["groups"] for name in group["names"]]
    assert len(names) == len(set(names))
    assert sum(group["parameters"] for group in found["groups"]) == found["parameters"]["total"]
    assert {group["optimizer"] for group in found["groups"]} == {"adamw", optimizer}
    assert not Path("run/run.json").exists()
    assert optimizer in mainstem("train", "run", *shape, "--optimizer", optimizer, "--dry-run").out
    assert not Path("run").exists()


def test_a_prepared_folder_and_a_text_of_its_own_to_validate_on(mainstem, shape, text, tmp_path):
    mainstem("data", text, "--out", "d", "--vocab-size", "300", "--val", text)
    result = mainstem("train", "a", *shape, "--data", "d", "--json")
    assert result.code == 0
    assert not Path("a/data").exists()
    assert mainstem("train", "b", *shape, "--val", text, "--json").json["val_loss"] == result.json["val_loss"]


def test_a_run_starts_from_the_weights_of_another(mainstem, shape, small_run):
    """With its tokenizer; the vocabulary that results is said."""
    line = ["train", "run", *shape, "--tokenizer", small_run, "--init-from", small_run, "--steps", "1", "--json"]
    result = mainstem(*line, "--model.vocab-size", "999")
    assert "vocabulary 300, the tokenizer's, instead of 999" in notes(result)
    fresh = mainstem("train", "new", *shape, "--steps", "1", "--json")
    assert result.json["train_loss"] < 5.3 < fresh.json["train_loss"]


def test_what_a_run_starts_from_is_verified_once(mainstem, shape, small_run, monkeypatch):
    """Its config, tokenizer and weights, by one resolution; never its optimizer."""
    hashed, real = Counter(), atomic.sha256

    def count(path):
        if Path(path).is_relative_to(small_run / "checkpoints"):
            hashed[Path(path).name] += 1
        return real(path)

    monkeypatch.setattr(atomic, "sha256", count)
    line = ["train", "run", "--init-from", small_run, "--data", shape[1], "--steps", "1", "--batch-size", "8", "--json"]
    assert mainstem(*line).code == 0
    assert hashed == {"config.json": 1, "tokenizer.json": 1, "model.safetensors": 1}


def test_samples_are_shown_on_a_console_of_ascii(process, shape, tmp_path):
    """Korean is replaced there, in samples and names, and ends nothing."""
    (tmp_path / "ko.txt").write_text("강물이 바다로 흐른다 시냇물 " * 200, encoding="utf-8")
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    line = ["--data", "ko.txt", "--tokenizer", "char", "--steps", "1", "--sample-every", "1"]
    out, err = process("train", "강", *shape, *line, env=env).communicate()
    assert b"Traceback" not in err
    assert b"step 1: '" in err
    assert b"next        mainstem generate ? " in out
    out.decode("ascii")
    err.decode("ascii")


def test_nothing_is_asked_of_a_network(mainstem, shape, monkeypatch):
    """Text, tokenizer, training and generation are all local, bundled texts too."""

    def refuse(*args, **options):
        raise AssertionError("a connection was tried")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    line = ["--data", "constitution-ko", "--steps", "1", "--eval-every", "0"]
    assert mainstem("train", "run", *shape, *line).code == 0
    assert mainstem("generate", "run", "강", "--max-new-tokens", "3").code == 0


def wait_for_step(run, process, step):
    """Until the run has written that step."""
    while not any(row["step"] >= step for row in read_rows(run.metrics)):
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.002)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_at_that_step_and_the_same_line_resumes(mainstem, process, shape, tmp_path, signum):
    """Law 9: exit code 128 + the signal, and the end is that of an uninterrupted run."""
    line = [*shape, "--steps", "250", "--save-every", "0", "--eval-every", "0", "--model.dropout", "0.1"]
    run = RunFolder(tmp_path / "run")
    stopped = process("train", "run", *line)
    wait_for_step(run, stopped, 3)
    stopped.send_signal(signum)
    _, err = stopped.communicate()
    assert stopped.returncode == 128 + signum
    step = read_rows(run.metrics)[-1]["step"]
    assert 3 <= step < 250
    assert run.newest() == (run.checkpoint_at(step), [])
    said = err.decode().splitlines()[-1]
    name = signal.Signals(signum).name
    assert said == f"mainstem: stopped by {name}; saved as run/checkpoints/step-{step:08d}; the same line resumes it"
    if signum == signal.SIGTERM:
        assert mainstem("train", "run", *line).code == 0
        assert mainstem("train", "whole", *line).code == 0
        assert training_runs.end(run) == training_runs.end(RunFolder(tmp_path / "whole"))


def test_the_demo_is_the_whole_trip(mainstem, text, monkeypatch):
    """Train, weigh, talk; the same line again shows what is there."""
    model = ModelConfig(vocab_size=300, n_ctx=16, n_layer=1, n_head=2, d_model=16)
    small = Preset("drop", "for this test", model, PRESETS["tiny"].train.replace(steps=3, warmup=1), str(text))
    monkeypatch.setitem(PRESETS, "drop", small)
    monkeypatch.setattr(demo, "PRESET", "drop")
    first, again = (mainstem("demo", "--json").json for _ in range(2))
    assert (first["run"], first["steps"]) == ("runs/demo", 3)
    assert first["sample"].startswith(demo.PROMPT)
    assert len(first["sample"]) > len(demo.PROMPT)
    assert first["bigram_bits_per_byte"] > 0
    assert "has done its 3 steps" in "\n".join(again["notes"])
    assert {**again, "notes": 0, "peak_memory_bytes": 0} == {**first, "notes": 0, "peak_memory_bytes": 0}
    said = mainstem("demo").out
    assert "next        mainstem generate runs/demo" in said
    assert demo.PROMPT in said
