"""One command, one page: what the benchmarks said, and nothing that they did not say."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import results
from benchmarks.__main__ import QUESTIONS, main
from benchmarks.results import Result, commands, measure, page
from mainstem.errors import RunError

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
RACE = {"speedup": 11.5, "seeds": [{"speedup": 12.0}, {"speedup": 11.5}], "torch": "2.9", "threads": 2}
RESULTS = [
    Result(("train", "--shape", "small"), TRAIN),
    Result(("decode", "--run", "/home/me/runs/demo"), DECODE),
    Result(("time-to-loss", "--data", "/home/me/text.txt"), RACE),
]


def test_the_page():
    lines = page(RESULTS).splitlines()
    assert "| `train --shape small` | step_over_floor | 1.23 | 1.20 to 1.30 |" in lines
    assert "|  | step_over_transformers | - |  |" in lines
    assert "| `decode --run demo` | int8_loss_minus_fp32 | 0.0003 |  |" in lines
    assert "|  | batch16_over_batch1 | 6.50 |  |" in lines
    assert "| `time-to-loss --data text.txt` | speedup | 11.50 | 12.00, 11.50 (by seed) |" in lines
    assert lines[-1] == "- transformers is not compared"
    assert not any("home" in line or "bytes_read" in line for line in lines)
    assert any("torch 2.9" in line for line in lines)
    assert any("commit" in line for line in lines)


def test_every_benchmark_but_itself_is_run():
    assert {words[0] for words in commands("text", None)} == set(QUESTIONS) - {"results", "overhead", "gpu"}
    assert ("decode", "--run", "runs/demo") in commands("text", "runs/demo")


def test_each_runs_to_its_end_and_a_failure_is_told(monkeypatch):
    lines = []

    def run(line, **options):
        lines.append(line[3:])
        failed = "data" in line
        said = "a bar\nmainstem: no such thing\n"
        return SimpleNamespace(returncode=2 * failed, stdout=json.dumps(DECODE), stderr=said)

    monkeypatch.setattr(results.subprocess, "run", run)
    with pytest.raises(RunError, match="data: mainstem: no such thing"):
        list(measure("text"))
    assert lines[0] == ["train", "--shape", "small", "--json"]
    assert len(lines) == 5
    monkeypatch.setattr(results, "commands", lambda data, run: [("train",), ("decode",)])
    assert [result.found for result in measure("text")] == [DECODE, DECODE]


def test_the_command_writes_the_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "measure", lambda data, run, progress: iter(RESULTS))
    out = tmp_path / "RESULTS.md"
    assert main(["results", "--data", "text", "--out", str(out), "--json"]) == 0
    assert out.read_text(encoding="utf-8") == page(RESULTS)
    assert json.loads(capsys.readouterr().out)["results"][0]["step_over_floor"] == 1.234


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "measure", lambda *arguments, **options: pytest.fail("measured"))
    assert main(["results", "--data", "text", "--out", str(tmp_path / "none" / "R.md")]) == 2
    assert "no such folder" in capsys.readouterr().err
