"""Each example runs."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *words):
    line = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(line, capture_output=True, encoding="utf-8", env=environment, check=False)


def test_every_example_has_a_test():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"same_sentence.py"}


def test_same_sentence(trained):
    done = run("same_sentence.py", trained.path, "강물이")
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    assert said[0].startswith("mainstem ")
    assert last == "the same"
