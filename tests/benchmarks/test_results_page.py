"""One command, one page: what the benchmarks said, and nothing that they did not say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import results
from benchmarks.__main__ import QUESTIONS, main
from benchmarks.results import Result, commands, measure, page
from mainstem.errors import RunError

ROOT = Path(__file__).parents[2]
TRAIN = {
    "shape": "small",
    "step_over_floor": 1.234,
    "step_over_transformers": None,
    "timings": {"step_over_floor": {"ratio_quartiles": [1.2, 1.3]}, "step_over_transformers": None},
    "torch": "2.9",
    "threads": 2,
    "notes": ["transformers is not compared"],
}
DECODE = {"int8_loss_minus_fp32": 0.0003, "batch16_over_batch1": 6.5, "bytes_read": 7, "torch": "2.9", "threads": 2}
RACE = {
    "speedup": 11.5,
    "chosen_on": "a",
    "seeds": [{"speedup": 12.0}, {"speedup": 11.5}],
    "torch": "2.9",
    "threads": 2,
}
RESULTS = [
    Result(("train", "--shape", "small"), TRAIN, 60.4),
    Result(("decode", "--run", "/home/me/runs/demo"), DECODE, 1.0),
    Result(("time-to-loss", "--data", "/home/me/text.txt"), RACE, 1.0),
]


def test_the_page():
    lines = page(RESULTS).splitlines()
    assert "| `train --shape small` | step_over_floor | 1.23 | 1.20 to 1.30 |" in lines
    assert "|  | step_over_transformers | - |  |" in lines
    assert "| `decode --run demo` | int8_loss_minus_fp32 | 0.0003 |  |" in lines
    assert "|  | batch16_over_batch1 | 6.50 |  |" in lines
    assert (
        "| `time-to-loss --data text.txt` | speedup | 11.50 | 12.00, 11.50 (by seed; settings chosen on a) |" in lines
    )
    assert lines[-1] == "- transformers is not compared"
    assert not any("home" in line or "bytes_read" in line for line in lines)
    assert any("torch 2.9" in line for line in lines)
    assert any("commit" in line for line in lines)


def test_every_benchmark_but_itself_is_run():
    assert {words[0] for words in commands("text")} == set(QUESTIONS) - {"results", "overhead", "gpu"}
    assert ("decode", "--run", "runs/demo") in commands("text", "runs/demo")
    races = [words for words in commands("text", other="another") if words[0] == "time-to-loss"]
    assert races == [("time-to-loss", "--data", "text"), ("time-to-loss", "--data", "another")]


def test_each_runs_to_its_end_and_a_failure_is_told(monkeypatch):
    lines = []

    def run(line, **options):
        lines.append(line[3:])
        failed = "data" in line
        said = "a bar\nmainstem: no such thing\n"
        return SimpleNamespace(returncode=2 * failed, stdout=json.dumps(DECODE), stderr=said)

    monkeypatch.setattr(results.subprocess, "run", run)
    with pytest.raises(RunError, match="data: mainstem: no such thing"):
        list(measure(commands("text")))
    assert lines[0] == ["train", "--shape", "small", "--json"]
    assert len(lines) == 5
    assert [result.found for result in measure([("train",), ("decode",)])] == [DECODE, DECODE]


def test_the_command_writes_the_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "measure", lambda every, progress: iter(RESULTS))
    out = tmp_path / "RESULTS.md"
    assert main(["results", "--data", "text", "--out", str(out), "--json"]) == 0
    assert out.read_text(encoding="utf-8") == page(RESULTS)
    said = capsys.readouterr()
    assert json.loads(said.out)["results"][0]["step_over_floor"] == 1.234
    assert "train --shape small (60 s)" in said.err


@pytest.mark.slow
def test_a_quick_run_goes_the_whole_way(tmp_path):
    """Every question, in processes of its own."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and the dog did not. " * 40, encoding="utf-8")
    line = ["results", "--data", str(tmp_path / "text.txt"), "--quick", "--out", str(tmp_path / "R.md"), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    command = [sys.executable, "-m", "benchmarks", *line]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    asked = [row["words"][0] for row in json.loads(done.stdout)["results"]]
    assert asked == ["train", "decode", "data", "time-to-loss", "inspect"]
    assert all(row["seconds_taken"] > 0 for row in json.loads(done.stdout)["results"])
    assert "chosen on tinyshakespeare" in (tmp_path / "R.md").read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "measure", lambda *arguments, **options: pytest.fail("measured"))
    assert main(["results", "--data", "text", "--out", str(tmp_path / "none" / "R.md")]) == 2
    assert "no such folder" in capsys.readouterr().err
