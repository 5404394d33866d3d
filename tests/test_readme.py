"""README's commands parse, and its Python runs; the Korean page shows the same commands."""

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mainstem.cli import VERBS, main
from mainstem.cli.parts.arguments import parse
from mainstem.cli.train import resumable

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "README.ko.md")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language; "" is that of blocks without one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for name, code in fenced if name == language]


def commands(page: str) -> list[list[str]]:
    lines = [line.split("  #")[0].strip() for block in blocks(page, "") for line in block.splitlines()]
    lines = [re.sub(r"^(cat [^|]+\| |\.venv/bin/)", "", line) for line in lines]
    return [shlex.split(line)[1:] for line in lines if line.startswith("mainstem ")]


def command_of(verb: str, question: str) -> type:
    """The dataclass that the module of a question fills from its flags."""
    module = importlib.import_module(f"mainstem.cli.{verb}.{question.replace('-', '_')}")
    own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
    (found,) = [kind for kind in own if dataclasses.is_dataclass(kind) and hasattr(kind, "json")]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = commands(page)
    assert len(found) >= 8
    for verb, *rest in found:
        assert verb in VERBS
        if verb == "train" and "--help" not in rest:
            resumable(["bard" if word == "demo-hf" else word for word in rest])  # a model that is there
        if verb in ("inspect", "circuits", "export", "import"):
            question, *flags = rest
            parse(command_of(verb, question), f"{verb} {question}", flags)


@pytest.mark.parametrize("page", PAGES)
def test_the_tour_asks_every_question(page):
    asked = {tuple(words[:2]) for words in commands(page)}
    for verb in ("inspect", "circuits", "export", "import"):
        questions = importlib.import_module(f"mainstem.cli.{verb}").SUBCOMMANDS
        assert {(verb, question) for question in questions} <= asked


def test_the_pages_show_the_same_commands():
    assert commands("README.md") == commands("README.ko.md")
    code = [[line.split("#")[0] for line in blocks(page, "python")[0].splitlines()] for page in PAGES]
    assert code[0] == code[1]


@pytest.mark.parametrize("page", PAGES)
def test_python_runs(page, tmp_path):
    text = tmp_path / "my.txt"
    text.write_text("ROMEO: O, she doth teach the torches to burn bright!\n" * 200, encoding="utf-8")
    line = ["train", str(tmp_path / "runs/demo"), "--preset", "tiny", "--data", str(text), "--steps", "2", "--json"]
    assert main([*line, "--model.n-ctx", "16", "--batch-size", "2"]) == 0
    (block,) = blocks(page, "python")
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
