"""Each example runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *words):
    line = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(line, capture_output=True, encoding="utf-8", env=environment, check=False)


EXAMPLES_RUN = {
    "ablate_and_patch", "attribution", "export", "hugging_face", "own_loop", "same_sentence", "steer", "sublayer",
    "train",
}  # fmt: skip


def lines(name, *words):
    done = run(f"{name}.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_has_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == EXAMPLES_RUN


def test_train(text):
    """The loss falls, and the result says what it came to."""
    shown = lines("train", text)
    losses = [float(line.split()[3]) for line in shown if line.startswith("step ")]
    assert losses[-1] < losses[0] - 0.5
    assert any(line.startswith("TrainResult(40 steps, ") for line in shown)
    assert shown[-1].startswith("'the ")


def test_same_sentence(trained):
    first, *_, last = lines("same_sentence", trained.path, "강물이")
    assert first.startswith("mainstem ")
    assert last == "the same"


def test_attribution():
    shown = lines("attribution")
    assert "after 'O Romeo, Romeo! wherefore art' the model says ' thou'" in shown
    assert any(line.startswith("Terms: ") and "closing error" in line for line in shown)
    assert re.fullmatch(r"L\dH\d, the strongest head, reads '.+' most \(0\.\d\d\)", shown[-1])


def test_ablate_and_patch():
    shown = lines("ablate_and_patch")
    (change,) = [line for line in shown if line.startswith("without L")]
    assert float(change.rsplit(maxsplit=1)[1]) < -1  # the head that the answer needs
    assert float(re.search(r"restore (\S+) of the difference", shown[-1])[1]) > 0.8


def test_steer():
    shown = lines("steer")
    texts = "\n".join(shown).split("scale ")[1:]
    assert [text[:2] for text in texts] == ["-2", "+0", "+2"]
    assert len({text[2:] for text in texts}) == 3


def test_sublayer():
    rows = {name: list(map(float, sizes)) for name, *sizes in map(str.split, lines("sublayer")[1:])}
    assert set(rows["post"]) == {1.0}
    assert rows["pre"] == sorted(rows["pre"])
    assert len(set(rows["rezero"])) == 1  # its gain begins at zero
    assert rows["no_skip_bare"][-1] < 0.1


def test_own_loop(text):
    shown = lines("own_loop", text)
    losses = [float(line.split()[3]) for line in shown if line.startswith("step")]
    assert losses[-1] < losses[0] - 1
    assert any(line.startswith("4 writes") for line in shown)


def test_export():
    shown = lines("export")
    assert any(line.endswith("model.safetensors") for line in shown)
    assert shown[-2:] == ["the same logits: True", "the same ids: True"]


def test_hugging_face():
    pytest.importorskip("transformers", reason="the example makes its folder with transformers")
    shown = lines("hugging_face")
    assert shown[0] == "2 blocks, 48 wide; tokenizer: none"
    assert any(line.startswith("Terms: 6 rows that sum to (1, 48)") for line in shown)
