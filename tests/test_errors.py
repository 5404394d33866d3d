"""Errors: their kinds, exit codes, and the nearest valid name."""

import ast
import pickle
import re
from pathlib import Path

import pytest

from mainstem import errors
from mainstem.config import TrainConfig
from mainstem.errors import ConfigError, DataError, Interrupted, RunError, TrainingFailed, UserError, nearest


def test_every_kind_is_a_user_error():
    kinds = [kind for kind in vars(errors).values() if getattr(kind, "__module__", "") == errors.__name__]
    kinds = [kind for kind in kinds if isinstance(kind, type)]
    assert len(kinds) > 1
    assert all(issubclass(kind, UserError) for kind in kinds)


def test_exit_codes_are_the_contract():
    """2: the input is wrong; 1: the run failed; 130 and 143: signals."""
    assert UserError("x").exit_code == 2
    assert TrainingFailed("x").exit_code == 1
    assert [Interrupted("x", signum).exit_code for signum in (2, 15)] == [130, 143]
    assert str(Interrupted("stopped at step 3", 2)) == "stopped at step 3"


def test_each_kind_is_what_python_calls_it():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ValueError)
    assert issubclass(RunError, OSError)
    assert issubclass(TrainingFailed, RuntimeError)


@pytest.mark.parametrize("kind", [UserError, ConfigError, DataError, RunError, TrainingFailed])
def test_the_message_is_the_whole_of_it(kind):
    """Also of an OSError, which would print an errno; and of a copy from another process."""
    error = kind("runs/a: not found", {"step": 3})
    copy = pickle.loads(pickle.dumps(error))
    assert [(str(e), e.args, e.facts) for e in (error, copy)] == [
        ("runs/a: not found", ("runs/a: not found",), {"step": 3})
    ] * 2
    assert getattr(error, "errno", None) is None


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("n_head: 3 heads do not divide d_model 64", "n_head"),
        ("runs/a: not found", None),
        ("a cache of 3 is full: make it larger", None),
    ],
)
def test_a_config_error_knows_its_field(message, field):
    assert ConfigError(message).field == field
    assert RunError(message).field is None


def test_a_config_names_the_field_that_is_wrong():
    with pytest.raises(ValueError, match="lr: 0") as raised:
        TrainConfig(lr=0.0)
    assert raised.value.field == "lr"


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gtp2", "did you mean 'gpt2'?"),
        ("min", "did you mean 'mini'?"),
        ("zzz", "valid: gpt2, mini, tiny"),
        ("", "valid: gpt2, mini, tiny"),
    ],
)
def test_the_nearest_name_or_all_of_them(name, end):
    assert nearest(name, {"mini", "gpt2", "tiny"}) == end


def raised_text(node):
    """What a raise statement spells out: its string constants, with a hole for each value."""
    strings = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return " ".join(part.value for part in sorted(strings, key=lambda part: (part.lineno, part.col_offset)))


ROOT = Path(errors.__file__).parent
LIBRARY = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] != "cli"]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_librarys_messages_name_fields_and_no_flags(path):
    """The command line spells fields as flags; a flag may stand in a whole command, `mainstem train RUN --preset P`."""
    raises = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Raise)]
    texts = [text for text in map(raised_text, raises) if "mainstem " not in text]
    assert [text for text in texts if re.search(r"(?<!\w)--[a-z]", text)] == []
