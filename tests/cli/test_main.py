"""The top level: our own table, one message for a person, one object for a program, and nothing loaded in vain."""

import os
import subprocess
import sys

import pytest

import mainstem as package
from mainstem import cli
from mainstem.cli import VERBS, info

HEAVY = ("torch", "numpy", "tyro", "rich", "tokenizers", "safetensors")


def loaded(tmp_path, *argv, modules=HEAVY):
    """Which of the modules a command loads, and its output."""
    program = (
        "import sys\nfrom mainstem.cli import main\ntry:\n    code = main(sys.argv[1:])\n"
        "except SystemExit as left:\n    code = left.code\n"
        f"print([m for m in {modules!r} if m in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, argv)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return eval(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"], []])
def test_help_lists_every_verb(mainstem, argv):
    said = mainstem(*argv)
    assert (said.code, said.err) == (0, "")
    for verb, about in VERBS.items():
        assert f"\n  {verb} " in said.out
        assert about in said.out


def test_the_version_is_the_packages(mainstem):
    assert mainstem("--version").out == f"mainstem {package.__version__}\n"


def test_help_loads_no_library(tmp_path):
    """So that it is there at once."""
    assert loaded(tmp_path, "--help") == []


def test_information_tokenizers_and_data_load_no_torch(text, tmp_path):
    torch = ("torch",)
    assert loaded(tmp_path, "info", "gpt2", modules=torch) == []
    line = ["tokenizer", "train", text, "--out", "t.json", "--vocab-size", "300"]
    assert loaded(tmp_path, *line, modules=torch) == []
    assert loaded(tmp_path, "tokenizer", "encode", "t.json", "river", modules=torch) == []
    assert loaded(tmp_path, "data", text, "--out", "d", "--vocab-size", "300", modules=torch) == []
    assert loaded(tmp_path, "doctor", "tiny", modules=torch) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "unknown verb 'trian'; did you mean 'train'?"),
        (["qqq"], "unknown verb 'qqq'; valid: circuits, compile, data, demo"),
        (["train", "--preset", "gtp2"], "preset: unknown value 'gtp2'; did you mean 'gpt2'?"),
        (["info", "gtp2"], "gtp2: neither a preset nor a RUN; did you mean 'gpt2'?"),
        (["doctor", "gtp2"], "gtp2: neither a preset nor a RUN; did you mean 'gpt2'?"),
        (["info"], "name a preset or a RUN first; presets: tiny, "),
        (["train", "--stepz", "3"], "--steps"),
        (["train", "--model.n-layr", "3"], "--model.n-layer"),
        (["train", "--steps", "abc"], "--steps: invalid literal for int() with base 10: 'abc'"),
        (["train", "--lr"], "Missing value for argument '--lr'"),
        (["train", "--lr", "0"], "--lr: 0.0 is not possible; it must be above 0"),
        (["train", "--lr", "nan"], "--lr: nan is not a finite number"),
        (["train", "--tokens", "-3"], "--tokens: -3 is not possible; give at least 1"),
        (["train", "--model.residual", "pree"], "--model.residual: unknown value 'pree'; did you mean 'pre'?"),
        (["train", "--model.n-head", "3"], "--model.n-head: 3 heads do not divide d_model 64"),
        (["train", "a", "--out", "b"], "'b' and RUN 'a' are two folders"),
        (["train", "a", "b"], "Unrecognized options: b"),
        (["generate"], "Missing from mainstem generate: RUN A run folder"),
        (["generate", "nowhere"], "nowhere: not found; start a run with: mainstem train nowhere"),
        (["generate", "x", "--context", "slid"], "'slide', 'stop'"),
        (["data"], "(required)"),
        (["data", "nowhere.txt", "--out", "d"], "nowhere.txt: no such file, and no bundled text of that name"),
        (["tokenizer", "encod"], "tokenizer: unknown command 'encod'; did you mean 'encode'?"),
        (["verify-resume", "--preset", "tinny"], "preset: unknown value 'tinny'; did you mean 'tiny'?"),
    ],
)
def test_a_wrong_line_is_one_message_with_the_nearest_name(mainstem, argv, said):
    """Exit code 2, no traceback, nothing made; with --json one object on stdout, the same message in it."""
    plain = mainstem(*argv)
    assert plain.code == 2
    assert plain.out == ""
    assert plain.err.startswith("mainstem: ")
    assert plain.err.count("mainstem: ") == 1
    assert "Traceback" not in plain.err
    assert " ".join(said.split()) in " ".join(plain.err.split())
    spoken = mainstem(*argv, "--json")
    assert spoken.code == 2
    assert spoken.json["exit_code"] == 2
    assert spoken.err == f"mainstem: {spoken.json['error']}\n"
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            1,
            "out of memory; take a smaller model or shorter texts, or close other programs",
        ),
        (FileNotFoundError(2, "No such file or directory", "gone.txt"), 2, "gone.txt: No such file or directory"),
        (OSError(5, "Input/output error", "disk"), 1, "disk: Input/output error"),
        (MemoryError("tensor"), 1, "out of memory; take a smaller model or shorter texts, or close other programs"),
    ],
)
def test_what_strikes_from_outside_is_one_message_too(mainstem, monkeypatch, error, code, said):
    def strike(argv):
        raise error

    monkeypatch.setattr(info, "main", strike)
    result = mainstem("info", "tiny", "--json")
    assert result.code == code
    assert result.json == {"error": said, "exit_code": code}


def test_a_fault_of_our_own_is_not_hidden(mainstem, monkeypatch):
    def strike(argv):
        raise ZeroDivisionError

    monkeypatch.setattr(info, "main", strike)
    with pytest.raises(ZeroDivisionError):
        mainstem("info", "tiny")


@pytest.mark.parametrize(
    "argv", [["info", "tiny"], ["doctor", "tiny"], ["train", "--dry-run"], ["tokenizer", "encode", "d", "a river"]]
)
def test_json_is_one_object_and_nothing_else(mainstem, text, argv):
    """What a person would read goes to stderr."""
    assert mainstem("data", text, "--out", "d", "--vocab-size", "300", "--json").json["counts"]["documents"] == 1
    data = ["--data", "d"] if argv[0] == "train" else []
    result = mainstem(*argv, *data, "--json")
    assert result.code == 0
    assert isinstance(result.json, dict)
    assert "NaN" not in result.out


def test_a_reader_that_leaves_ends_the_command_quietly(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "mainstem", "info", "tiny"], stdout=closed, stderr=subprocess.PIPE, cwd=tmp_path
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_table_names_modules_that_are_there():
    import importlib

    for verb in VERBS:
        assert callable(importlib.import_module(f"{cli.__name__}.{verb.replace('-', '_')}").main)
