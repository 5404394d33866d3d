"""`python -m benchmarks`: the figures as a table and as an object."""

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import decode
from benchmarks.__main__ import QUESTIONS, main
from benchmarks.inspect import FIGURES
from benchmarks.peer import PACKAGE

LINE = ("inspect", "--preset", "tiny", "--tokens", "12", "--grid-tokens", "5", "--rounds", "1")


@pytest.fixture(autouse=True)
def quick(monkeypatch, in_this_process):
    """No peer, whether or not it is installed."""
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.model_bridge.sources", None)


@pytest.fixture
def ask(capsys):
    """Ask one question in this process: its exit code, output and messages."""

    def run(*argv):
        capsys.readouterr()
        try:
            code = main([*argv])
        except SystemExit as left:  # --help
            code = left.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.mark.slow
def test_the_figures_as_an_object(ask):
    result = ask(*LINE, "--json")
    assert result.code == 0
    found = json.loads(result.out)
    assert found["capture_over_forward"] > 0
    assert found["patch_grid_ratio"] > 0
    assert found["composition_speedup"] is found["head_attribution_ratio"] is found["memory_ratio"] is None
    assert found["shape"]["tokens"] == 12
    assert "note: TransformerLens is not compared" in result.err
    assert "pip install 'mainstem[bench]'" in result.err


def test_the_figures_for_a_person(ask):
    said = ask(*LINE).out
    assert said.startswith("tiny: 2 blocks of 2 heads, 64 wide")
    assert "12 tokens are read, and 5 in the grid of patches" in said
    for figure in FIGURES:
        (row,) = [line.split() for line in said.splitlines() if line.split()[:1] == [figure.name]][:1]
        assert (row[1] == "-") == figure.needs_peer
        assert figure.about in said


DECODE = {
    "shape": "small", "fp32_over_memory_floor": 0.9, "int8_over_transformers": None, "int8_loss_minus_fp32": 0.0003,
    "losses": {"fp32": 2.0, "bf16": 2.0001, "int8": 2.0003},
    "timings": {
        "fp32_over_memory_floor": {
            "ratio": 0.9, "ratio_quartiles": [0.85, 0.95], "seconds": {"floor": 0.0009, "fp32": 0.001}
        },
        "int8_over_transformers": None,
    },
    "first_token_seconds": {"fp32": 0.012}, "bytes_read": 3_000_000, "prompt": 64, "new": 128, "torch": "2.9",
    "threads": 2, "notes": ["transformers is not compared"],
}  # fmt: skip


@pytest.fixture
def decoded(monkeypatch):
    """What `decode` was asked for; nothing is timed."""
    asked = []

    def measure(shape, rounds, *, run, data, progress):
        asked.append((shape, rounds, run, data))
        progress(1, 2)
        return DECODE

    monkeypatch.setattr(decode, "measure", measure)
    return asked


def test_decoding_as_an_object(ask, decoded):
    words = ("--shape", "small", "--rounds", "2", "--run", "runs/demo", "--data", "text")
    result = ask("decode", *words, "--json")
    assert result.code == 0
    assert json.loads(result.out) == DECODE
    assert "note: transformers is not compared" in result.err
    assert decoded == [("small", 2, "runs/demo", "text")]


def test_decoding_for_a_person(ask, decoded):
    said = ask("decode").out
    assert decoded == [("andrea", 5, None, None)]
    assert "small: 64 tokens, then 128 more; torch 2.9, 2 threads, 3 MB of float32 weights a token" in said
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.strip()}
    assert rows["fp32_over_memory_floor"] == ["0.900", "0.850", "to", "0.950", "floor", "0.90,", "fp32", "1.00"]
    assert rows["int8_over_transformers"] == ["-", "-", "-"]
    assert "first token after, ms: fp32 12" in said
    assert "held-out loss: fp32 2.0000, bf16 2.0001, int8 2.0003; int8 - fp32 +0.00030 nats" in said


def test_its_help_lists_the_questions(ask):
    said = ask("--help").out
    for name, about in QUESTIONS.items():
        assert name in said
        assert about in said
    assert "--grid-tokens" in ask("inspect", "--help").out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["inspct"], "unknown question 'inspct'; did you mean 'inspect'?"),
        (["decode", "--shape", "smal"], "small"),
        (["inspect", "--preset", "gtp2"], "did you mean 'gpt2'?"),
        (["inspect", "--preset", "tiny", "--tokens", "99"], "tokens: 99 is not possible; give 2 to 64, the context of"),
        ([*LINE[:-1], "0"], "rounds: 0 is not possible; give at least 1"),
    ],
)
def test_a_wrong_line_is_one_message(ask, argv, said):
    result = ask(*argv)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
