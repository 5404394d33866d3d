"""`python -m benchmarks gpu`: its whole path at a tiny shape on the CPU, and a part of it where there is a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which runs on Linux")


def run(*arguments, **environment):
    command = [sys.executable, "-m", "benchmarks", "gpu", *arguments]
    everything = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, env=everything, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@TRITON
def test_a_dry_run_takes_every_part_and_every_check_holds():
    done = run("--dry", "--json")
    assert done.returncode == 0, done.stderr[-5_000:]
    found = json.loads(done.stdout)
    assert found["ok"]
    parts = ["about", "exactness", "attention", "resume", "decode", "kernels", "training"]
    assert list(found) == [*parts, "seconds", "ok"]
    assert found["about"]["note"].startswith("this device's peak is not in the table")
    assert found["resume"]["same_twice"]
    assert found["resume"]["resumed_is_whole"]
    assert all(row["ok"] for row in found["kernels"]["rows"])
    loops = {row["loop"]: row for row in found["training"]["rows"]}
    assert {"mainstem, plain", "mainstem, compiled, our gelu", "nanoGPT-style, compiled"} <= loops.keys()
    assert all(row["tokens_per_s"] > 0 and row["mfu"] is None for row in loops.values())
    assert ("transformers" in loops) == (importlib.util.find_spec("transformers") is not None)


@pytest.mark.slow
def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path):
    """Here for want of Triton."""
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')", encoding="utf-8")
    done = run("--dry", "--parts", "kernels", "decode", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "Triton cannot be loaded (no triton here)" in done.stdout.partition("\ndecode")[0]
    assert "tokens_per_s" in done.stdout.partition("\ndecode")[2]
    assert done.stdout.splitlines()[-1].startswith("a part failed")


@pytest.mark.slow
def test_what_no_time_is_left_for_is_left_out():
    done = run("--dry", "--json", "--limit", "0", "--parts", "about", "decode")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["decode"] == {"error": "left out: 0 seconds had passed"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so():
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "no CUDA device here; --dry runs the same path at a tiny shape on the CPU\n"


@CUDA
def test_on_a_device_float64_is_near_and_steps_are_taken():
    done = run("--shape", "small", "--seconds", "0.5", "--json", "--parts", "about", "exactness", "training")
    assert done.returncode == 0, done.stderr[-5_000:]
    found = json.loads(done.stdout)
    assert found["exactness"]["float32_ok"]
    assert found["exactness"]["autocast_ok"]
    compiled = next(row for row in found["training"]["rows"] if row["loop"] == "mainstem, compiled as the loop does")
    assert compiled["said"].startswith("blocks compiled")
