"""A run folder: one writer, checkpoints by name, rows that survive a kill."""

import json
import os
import subprocess
import sys

import pytest

from mainstem import atomic
from mainstem.errors import RunError
from mainstem.formats.run import model_config, resolve
from mainstem.runs.folder import (
    RunFolder,
    append_row,
    checkpoint_settings,
    cut_rows,
    read_rows,
    step_of,
)


@pytest.fixture
def run(tmp_path):
    """Five checkpoints of one small file each."""
    made = RunFolder(tmp_path / "run")
    for step in (1, 2, 10, 99_999_999, 123_456_789):
        with atomic.new_folder(made.checkpoint_at(step)) as folder:
            (folder / "config.json").write_text(str(step))
    return made


def steps(run):
    return [step_of(path) for path in run.found()]


def harm(checkpoint):
    (checkpoint / "config.json").write_text("x" * 20)


def test_checkpoints_stand_in_the_order_of_their_steps(run):
    """Nine digits too; whatever else lies there is none."""
    (run.checkpoints / "step-5").mkdir()
    (run.checkpoints / ".step-00000007.tmp-1").mkdir()
    assert steps(run) == [1, 2, 10, 99_999_999, 123_456_789]
    assert run.checkpoint_at(12).name == "step-00000012"
    assert RunFolder(run.path / "nowhere").found() == []
    with pytest.raises(RunError, match="step-5: not a checkpoint folder"):
        step_of(run.checkpoints / "step-5")


def test_the_newest_is_the_newest_that_verifies(run):
    """What was passed over is said."""
    assert run.newest() == (run.checkpoint_at(123_456_789), [])
    harm(run.checkpoint_at(123_456_789))
    (run.checkpoint_at(99_999_999) / atomic.MANIFEST).unlink()
    newest, passed_over = run.newest()
    assert newest == run.checkpoint_at(10)
    assert [what.split(": ")[0].split("step-")[1] for what in passed_over] == ["123456789/config.json", "99999999"]
    for checkpoint in run.found():
        harm(checkpoint)
    newest, passed_over = run.newest()
    assert newest is None
    assert len(passed_over) == 5


@pytest.mark.parametrize("keep", [1, 2, 4, 9])
def test_pruning_takes_neither_last_nor_best(run, keep):
    """Whatever the number to keep, and wherever the two stand."""
    run.name("best", run.checkpoint_at(1))
    run.name("last", run.checkpoint_at(10))
    run.prune(keep)
    newest = [1, 2, 10, 99_999_999, 123_456_789][-keep:]
    assert steps(run) == sorted({1, 10, *newest})


def test_best_and_last_are_opened_while_they_are_sound(run):
    run.name("best", run.checkpoint_at(2))
    run.name("last", run.checkpoint_at(10))
    assert run.best_or_last() == run.checkpoint_at(2)
    harm(run.checkpoint_at(2))
    assert run.best_or_last() == run.checkpoint_at(10)
    harm(run.checkpoint_at(10))
    assert run.best_or_last() == run.checkpoint_at(123_456_789)
    run.unname("best")
    run.unname("best")
    assert run.named("best") is None


@pytest.mark.parametrize("name", ["step-00000077", "", "../../elsewhere", "step-00000001/.."])
def test_a_name_that_points_nowhere_is_none(run, name):
    (run.path / "best.json").write_text(atomic.to_json({"checkpoint": name}))
    assert run.named("best") is None


def test_a_run_without_checkpoints_says_so(tmp_path):
    with pytest.raises(RunError, match="nothing to open: it has no checkpoint yet"):
        RunFolder(tmp_path).best_or_last()


def test_a_run_is_known_by_its_settings(run):
    assert not run.exists()
    run.write_settings({"model": {"n_layer": 1}, "train": {}})
    assert run.exists()
    assert run.settings()["format"] == "mainstem/1"
    assert model_config(run.path).n_layer == 1
    run.run_json.write_text('{"format": "other"}')
    with pytest.raises(RunError, match=r"run\.json: not a mainstem/1 run"):
        run.settings()


def test_what_a_run_means(run, tmp_path):
    run.name("best", run.checkpoint_at(2))
    assert resolve(run.path).path == run.checkpoint_at(2)
    assert resolve(str(run.checkpoint_at(10))).path == run.checkpoint_at(10)
    with pytest.raises(RunError, match=r"nowhere: not found; start a run with: mainstem train"):
        resolve(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match=r"other: neither a run folder \(no run\.json\) nor a checkpoint"):
        resolve(tmp_path / "other")
    harm(run.checkpoint_at(10))
    with pytest.raises(RunError, match=r"config\.json: 20 bytes where .*open another checkpoint"):
        resolve(run.checkpoint_at(10))
    with pytest.raises(RunError, match=r"config\.json: not mainstem/1"):
        checkpoint_settings(run.checkpoint_at(2))


def test_a_second_writer_is_refused_by_the_first_ones_pid(tmp_path):
    """And when the first is killed, its lock and its half-written work go with it."""
    program = (
        "import sys; from pathlib import Path; from mainstem import atomic; "
        "from mainstem.runs.folder import RunFolder\n"
        "run = RunFolder(sys.argv[1])\n"
        "with run.locked(), atomic.new_folder(run.checkpoint_at(1)) as folder:\n"
        "    (folder / 'half').write_text('x'); print('ready', flush=True); sys.stdin.read()\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    with first:
        assert first.stdout.readline() == b"ready\n"
        run = RunFolder(tmp_path)
        refused = pytest.raises(RunError, match=f"process {first.pid} is writing to this run; .*another folder")
        with refused, run.locked():
            pass
        assert [path.name for path in run.checkpoints.iterdir()] == [f".step-00000001.tmp-{first.pid}"]
        first.kill()
        first.wait()
    with run.locked():
        assert (tmp_path / "lock.pid").read_text() == str(os.getpid())
        assert list(run.checkpoints.iterdir()) == []
    assert not (tmp_path / "lock.pid").exists()


def test_a_lock_is_given_back_after_an_error(tmp_path):
    run = RunFolder(tmp_path / "new" / "run")
    with pytest.raises(ValueError, match="x"), run.locked():
        raise ValueError("x")
    other, refused = RunFolder(run.path), pytest.raises(RunError, match=f"process {os.getpid()} is writing")
    with run.locked(), run.locked(), refused, other.locked():  # who holds it may ask again, another may not
        pass
    with RunFolder(run.path).locked():
        pass


def test_rows_come_back_and_a_torn_last_one_is_passed_over(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert read_rows(file) == []
    for step in (1, 2, 3):
        append_row(file, {"step": step, "text": "강\n\u2028", "loss": float("nan")})
    rows = read_rows(file)
    assert rows == [{"step": step, "text": "강\n\u2028", "loss": None} for step in (1, 2, 3)]
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        complete = whole[: size + 1].count(b"\n")  # a row without its line end is whole too
        assert read_rows(file) == rows[:complete]


def test_a_row_damaged_in_the_middle_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: no row of ours"):
        read_rows(file)


def test_rows_can_be_cut(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert cut_rows(file, lambda row: True) == []
    assert not file.exists()
    for step in (1, 2, 3):
        append_row(file, {"step": step})
    assert cut_rows(file, lambda row: row["step"] != 2) == [{"step": 1}, {"step": 3}]
    assert read_rows(file) == [{"step": 1}, {"step": 3}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["../../other/step-00000012", "/step-00000012", "./step-00000012"])
def test_what_last_names_is_a_checkpoint_of_the_run(copied, name):
    """A name that leads out of the run is none."""
    run, other = copied(), copied("other")
    elsewhere = run.path.parent / "other" / "step-00000012"
    other.checkpoint_at(12).rename(elsewhere)
    (run.path / "last.json").write_text(json.dumps({"checkpoint": name}))
    assert run.named("last") is None
