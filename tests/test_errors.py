"""Errors: their kinds, exit codes, and the nearest valid name."""

import pytest

from mainstem import errors
from mainstem.errors import Interrupted, TrainingFailed, UserError, nearest


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
