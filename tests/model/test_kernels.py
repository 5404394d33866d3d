"""Our kernels in Triton's interpreter, and on a CUDA device where there is one; and how it is chosen between two.

Triton decides when it is imported whether it interprets, so `kernel_laws` runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import mainstem
from mainstem.errors import ConfigError
from mainstem.model.kernels import launch
from mainstem.model.kernels.choice import Choice, cases, choose, faster, seconds
from models import ROWS, small

HERE = Path(__file__).parent
TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which runs on Linux")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(file, cache, **environment):
    """The tests of a file in a process of its own, whose output is shown where one fails."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = kept | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(HERE / file)]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


@TRITON
def test_the_laws_hold_in_the_interpreter(tmp_path):
    run("kernel_laws.py", tmp_path, TRITON_INTERPRET="1")


@TRITON
@CUDA
def test_the_laws_hold_on_the_device(tmp_path):
    run("kernel_laws.py", tmp_path)


@pytest.mark.slow
@TRITON
def test_triton_builds_them_for_devices(tmp_path):
    run("kernel_builds.py", tmp_path)


def test_without_triton_the_error_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mainstem.model.kernels.programs", None)
    with pytest.raises(ConfigError, match=r"kernels: Triton cannot be loaded .*; pip install triton"):
        launch.programs()


def test_the_package_is_imported_without_triton():
    modules = ("gelu", "norm", "launch", "choice")
    names = ", ".join(f"mainstem.model.kernels.{name}" for name in modules)
    program = f"import sys, {names}; sys.exit('triton' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(mainstem.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize("width", [1, 2, 3, 128, 130, 768, 1024, 1025, 50_000])
def test_a_tile_covers_a_row(width):
    rows, block, warps = launch.tile(width)
    assert block >= width > block // 2
    assert rows * block >= 1024
    assert rows * block & (rows * block - 1) == 0
    assert warps in (4, 8, 16)
    assert launch.tile(width, 1024).block == min(block, 1024)


ONE, OTHER = (lambda: [torch.ones(3), torch.tensor([2.0])]), (lambda: [torch.ones(3), torch.tensor([2.001])])


def clock(**times):
    """A timer that knows each way by its function, with a figure a turn."""
    turns = {ONE: iter(times["ours"]), OTHER: iter(times["theirs"])}
    return lambda work: next(turns[work])


@pytest.mark.parametrize(
    ("ours", "theirs", "taken", "said"),
    [
        ((1e-6, 9e-6, 2e-6), (3e-6,) * 3, True, "k: ours (2.0 us ours, 3.0 us compiled)"),
        ((3e-6,) * 3, (3e-6,) * 3, True, "k: ours (3.0 us ours, 3.0 us compiled)"),
        ((3e-6,) * 3, (1e-6, 9e-6, 2e-6), False, "k: the compiler's (3.0 us ours, 2.0 us compiled)"),
    ],
)
def test_the_median_of_turns_decides(ours, theirs, taken, said):
    choice = faster("k", ONE, OTHER, ONE, clock(ours=ours, theirs=theirs))
    assert choice.takes_ours == taken
    assert str(choice) == said


def raising(message):
    def work():
        raise RuntimeError(message)

    return work


def test_ours_is_left_where_it_fails_or_differs_however_fast_it_is():
    choice = faster("k", raising("\nno such instruction\nat line 3"), OTHER, OTHER, lambda work: 1.0)
    assert str(choice) == "k: the compiler's (ours failed: no such instruction)"
    for wrong in (3.0, float("nan")):
        ours = partial(lambda value: [torch.ones(3), torch.tensor([value])], wrong)
        for compiled, form in ((OTHER, "compiled"), (raising("no compiler"), "plain")):
            choice = faster("k", ours, compiled, OTHER, lambda work: 1.0)
            assert not choice.takes_ours
            assert "ours differs by" in str(choice)
            assert f"from the {form} form" in str(choice)


@pytest.mark.parametrize(
    ("plain", "said"),
    [(2e-6, "k: ours (1.0 us ours, 2.0 us plain)"), (5e-7, "k: PyTorch's (1.0 us ours, 0.5 us plain)")],
)
def test_without_a_compiler_the_plain_form_is_the_other_side(plain, said):
    choice = faster("k", ONE, raising("no compiler"), OTHER, clock(ours=(1e-6,) * 3, theirs=(plain,) * 3))
    assert str(choice) == said
    assert choice.takes_ours == (plain > 1e-6)


def test_off_cuda_nothing_is_timed_and_nothing_taken():
    found = choose(small(), 8, "cpu")
    assert {str(choice) for choice in found.values()} == {
        "gelu_bias: the compiler's (no CUDA device: cpu)",
        "add_norm: the compiler's (no CUDA device: cpu)",
    }
    assert set(choose(small(), 8, "cpu", names=("gelu_bias",))) == {"gelu_bias"}
    assert not Choice("k").takes_ours


@pytest.mark.parametrize("row", ROWS)
def test_a_kernel_is_a_case_where_the_model_has_a_place_for_it(row):
    """add_norm where the next norm reads the sum of a join; gelu_bias where tanh-GELU follows a product with a bias."""
    added = row in ("pre", "sandwich", "layerscale", "lns", "mix")
    assert set(cases(small(row), 2, "cpu")) == {"gelu_bias"} | ({"add_norm"} if added else set())
    assert "gelu_bias" not in cases(small(row, activation="gelu"), 2, "cpu")
    assert "gelu_bias" not in cases(small(row, bias=False), 2, "cpu")
    assert "gelu_bias" not in cases(small(row, d_mlp=0), 2, "cpu")


def test_the_clock_counts_calls():
    calls = []
    assert seconds(lambda: calls.append(1) or [], "cpu", rounds=4) > 0
    assert len(calls) == 7
