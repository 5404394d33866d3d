"""The Triton kernel of tanh-GELU in the interpreter and on a CUDA device if any; and when a model takes it.

Triton decides when it is imported whether it interprets, so `kernel_laws` runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mainstem
from mainstem.errors import ConfigError
from mainstem.model.kernels import gelu, gelu_backend, launch
from mainstem.model.kernels.gelu_backend import triton_is_as_fast
from models import build, small

HERE = Path(__file__).parent
TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which runs on Linux")
CPU = torch.device("cpu")
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
    modules = ("gelu", "gelu_backend", "launch")
    names = ", ".join(f"mainstem.model.kernels.{name}" for name in modules)
    program = f"import sys, {names}; sys.exit('triton' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(mainstem.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize("width", [1, 2, 3, 128, 130, 768, 1024, 1025, 50_000])
def test_a_tile_covers_a_row_or_is_as_wide_as_it_may_be(width):
    rows, block, warps = launch.tile(width)
    assert block == launch.WIDEST or block >= width > block // 2
    assert block <= launch.WIDEST
    assert rows * block >= 1024
    assert rows * block & (rows * block - 1) == 0
    assert warps in (4, 8, 16)


def scaled_by(value):
    """A function in place of GELU whose results differ from it."""
    return lambda product, bias: product * value + bias


def failing(*tensors):
    raise RuntimeError("no such instruction")


@pytest.fixture
def times(monkeypatch):
    """Triton's kernel replaced by the plain form, no compiler, and a clock that reads from two lists by turns."""
    triton, plain = [1.0] * gelu_backend.ROUNDS, [2.0] * gelu_backend.ROUNDS
    turns = iter(range(2 * gelu_backend.ROUNDS))
    monkeypatch.setattr(gelu_backend, "seconds", lambda work: (triton, plain)[(turn := next(turns)) % 2][turn // 2])
    monkeypatch.setattr(gelu, "gelu_bias", lambda product, bias: gelu.plain_gelu_bias(product, bias))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    return triton, plain


@pytest.mark.parametrize(
    ("triton", "plain", "taken"),
    [((1, 9, 2), (3, 3, 3), True), ((3, 3, 3), (3, 3, 3), True), ((3, 3, 3), (1, 9, 2), False)],
)
def test_the_median_of_turns_decides(times, triton, plain, taken):
    times[0][:], times[1][:] = triton, plain
    assert triton_is_as_fast(4, 8, CPU) == taken


@pytest.mark.parametrize("wrong", [failing, scaled_by(1.0), scaled_by(float("nan"))])
def test_triton_is_not_taken_where_it_fails_or_differs_however_fast_it_is(monkeypatch, times, wrong):
    monkeypatch.setattr(gelu, "gelu_bias", wrong)
    assert not triton_is_as_fast(4, 8, CPU)


def test_where_the_compiler_fails_the_plain_form_is_compared(monkeypatch, times):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: failing)
    assert triton_is_as_fast(4, 8, CPU)


@pytest.mark.parametrize("taken", [True, False])
def test_a_model_on_cuda_takes_triton_where_it_is_as_fast(monkeypatch, taken):
    shapes, model = [], build(small(activation="gelu_tanh"), torch.float32)
    monkeypatch.setattr(gelu_backend, "triton_is_as_fast", lambda *shape: shapes.append(shape) or taken)
    cuda = torch.device("cuda")
    assert gelu_backend.choose_gelu(model, cuda, 6) == ("triton" if taken else "torch")
    assert shapes == [(6, model.config.d_mlp, cuda)]
    assert {block.mlp.gelu_bias for block in model.blocks} == {gelu.gelu_bias if taken else None}
    for changes in ({"activation": "gelu"}, {"bias": False}, {"d_mlp": 0}):
        other = build(small(**{"activation": "gelu_tanh", **changes}), torch.float32)
        assert gelu_backend.choose_gelu(other, cuda, 6) == "torch"
    assert len(shapes) == 1


def test_the_clock_counts_calls():
    calls = []
    assert gelu_backend.seconds(lambda: calls.append(1)) > 0
    assert len(calls) > gelu_backend.CALLS  # some calls before are not timed
