"""The help of every command: for users, in their terms, within 80 columns, and without PyTorch."""

import importlib
import subprocess
import sys

import pytest

from mainstem.cli import VERBS


def commands():
    """Each verb, and each subcommand of those that have some."""
    for verb in VERBS:
        module = importlib.import_module(f"mainstem.cli.{verb.replace('-', '_')}")
        yield (verb,)
        yield from ((verb, name) for name in getattr(module, "SUBCOMMANDS", ()))


COMMANDS = list(commands())
INTERNALS = ("{None", "None}", "STR [STR", "INT [INT", "--no-no-", "Raises", "Config", "None)|")
"""What a parser or a docstring shows of the code."""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_for_users(mainstem, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    shown = mainstem(*words, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert not [word for word in INTERNALS if word in shown.out]
    assert max(map(len, shown.out.splitlines()[1:])) <= 80  # all but the usage line
    assert "one object on stdout" in " ".join(shown.out.replace("│", " ").split()).lower()


def test_the_table_of_verbs_fits_80_columns(mainstem):
    assert max(map(len, mainstem("--help").out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["generate"], "usage: mainstem generate [-h] [OPTIONS] RUN [PROMPT ...]"),
        (["train"], "usage: mainstem train [-h] [OPTIONS] [RUN]"),
        (["inspect", "patch"], "usage: mainstem inspect patch [-h] [OPTIONS] RUN CLEAN CORRUPT"),
        (["data"], "usage: mainstem data [-h] [OPTIONS] FILE ..."),
    ],
)
def test_usage_names_the_arguments(mainstem, words, usage):
    assert mainstem(*words, "--help").out.splitlines()[0] == usage


def test_no_help_loads_torch():
    program = (
        "import contextlib, os, sys\n"
        "from mainstem.cli import main\n"
        f"for words in {COMMANDS!r}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, 'w')):\n"
        "        main([*words, '--help'])\n"
        "    assert 'torch' not in sys.modules, words"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (["generate", "run", "--dtype", "int8"], "--dtype is now --weights"),
        (["export", "gguf", "run", "--out", "x", "--dtype=q8_0"], "--dtype is now --weights"),
        (["tokenizer", "train", "x", "--out", "t.json", "--kind", "byte"], "--kind is now --tokenizer"),
        (["inspect", "lens", "run", "a", "--tuned"], "--tuned is now --lens tuned"),
    ],
)
def test_an_old_flag_is_answered_with_the_new_one(mainstem, line, answer):
    refused = mainstem(*line)
    assert refused.code == 2
    assert answer in refused.err
