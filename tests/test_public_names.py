"""The public names: sorted, each one there, each with a docstring, and none of them loaded before it is used."""

import inspect
import os
import subprocess
import sys

import pytest

import mainstem


def test_the_names_are_sorted_and_each_once():
    assert mainstem.__all__ == sorted(set(mainstem.__all__))
    assert dir(mainstem) == sorted([*mainstem.__all__, "__version__"])


@pytest.mark.parametrize("name", mainstem.__all__)
def test_a_name_leads_to_its_home(name):
    value = getattr(mainstem, name)
    assert value is getattr(sys.modules[mainstem._HOMES[name]], name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert (value.__name__, value.__module__) == (name, mainstem._HOMES[name])
        assert inspect.getdoc(value)
        assert not inspect.getdoc(value).startswith(f"{name}(")  # a dataclass's own


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match="module 'mainstem' has no attribute 'pickle'"):
        mainstem.pickle  # noqa: B018


def test_importing_the_package_loads_no_torch_and_listing_it_neither():
    program = (
        "import sys, mainstem; from mainstem import UserError, ModelConfig; "
        "assert len(dir(mainstem)) > 10; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(mainstem.__file__))}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_a_star_brings_them_all():
    names: dict = {}
    exec("from mainstem import *", names)
    assert set(mainstem.__all__) <= set(names)
