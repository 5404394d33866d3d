"""Two sides, two clocks, one target: who is where when."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from benchmarks import time_to_loss
from benchmarks.reference import Recipe
from benchmarks.time_to_loss import OURS, REFERENCE, Data, Ours, Run, Score, Turns, characters, measure, validation_loss
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import ConfigError, DataError
from mainstem.presets import PRESETS, Preset, preset
from mainstem.text.corpus import Source
from mainstem.text.tokens import prepare
from mainstem.training.loop import Training

TEXT = "".join(itertools.islice(itertools.cycle("the cat sat on the mat. "), 1200))
RECIPE = Recipe(layers=1, heads=2, width=16, context=16, batch=2, iterations=60, warmup=5)
SMALL = Preset(
    "small",
    "for these tests",
    ModelConfig(n_ctx=16, n_layer=1, n_head=2, d_model=16),
    TrainConfig(steps=30, batch_size=4, lr=1e-2, warmup=2, optimizer="muon"),
)


pytestmark = pytest.mark.usefixtures("in_this_process")


class Fixed(torch.nn.Module):
    """Logits that do not depend on the text, and every target that was asked for."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.read = logits, []

    def forward(self, ids):
        self.read += ids.tolist()
        return self.logits.expand(*ids.shape, -1)


def test_characters_are_numbered_in_their_order_and_a_tenth_is_held_out():
    data = characters("ba가" * 100, context=8)
    assert (len(data.train), len(data.val), data.vocabulary) == (270, 30, 3)
    assert data.train[:4].tolist() == [1, 0, 2, 1]
    with pytest.raises(DataError, match="80 characters; a tenth of them must hold a window of 8"):
        characters("ab" * 40, context=8)


@pytest.mark.parametrize("length", [17, 32, 33, 40])
def test_a_score_reads_every_character_once(length):
    val = np.arange(length, dtype=np.uint16) % 5
    data = Data(val, val, 5, 16)
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    model = Fixed(probabilities.log())
    expected = -sum(math.log(probabilities[i]) for i in val[1:].tolist()) / (length - 1)
    assert validation_loss(model, data) == pytest.approx(expected, rel=1e-6)
    assert list(itertools.chain(*model.read)) == val[:-1].tolist()
    assert max(map(len, model.read)) == 16


def test_a_loss_is_reached_at_the_first_score_that_is_not_above_it():
    scores = [Score(25, 1.0, 3.0), Score(50, 2.0, 1.5), Score(75, 3.0, 1.7), Score(100, 4.0, 1.5)]
    run = Run(100, scores)
    assert run.share == 1
    assert run.reached(1.5) == scores[1]
    assert run.reached(1.6) == scores[1]
    assert run.reached(1.4) is None


def test_the_clock_runs_over_training_alone(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(time_to_loss.time, "perf_counter", lambda: 0.0 + next(clock))

    def slow(model, data):
        for _ in range(1000):
            next(clock)
        return 2.0

    monkeypatch.setattr(time_to_loss, "validation_loss", slow)
    data = characters(TEXT, 16)
    turns = Turns(Ours(SMALL, data.train, data.vocabulary, seed=1), data)
    assert [turns.turn(), turns.turn()] == [Score(25, 1.0, 2.0), Score(30, 2.0, 2.0)]


def test_our_steps_are_those_of_the_training_loop(tmp_path):
    """The weights after a run of the same preset, to the bit."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    data = prepare(Source((tmp_path / "text.txt",)), tmp_path / "data", kind="char")
    config = SMALL.train.replace(steps=6, device="cpu", vitals_every=0, seed=5)
    vocabulary = data.tokenizer.vocab_size
    training = Training(SMALL.model.replace(vocab_size=vocabulary), config, data)
    for _ in training.events():
        pass
    side = Ours(Preset("same", "", SMALL.model, config), np.asarray(data.train), vocabulary, seed=5)
    for step in range(side.steps):
        side.step(step)
    for mine, theirs in zip(side.model.parameters(), training.model.parameters(), strict=True):
        assert mine.equal(theirs)


def test_the_figures_are_there():
    said = []
    found = measure(TEXT, (1, 2), recipe=RECIPE, chosen=SMALL, progress=lambda *at: said.append(at))
    turns = 2 * (3 + 2)
    assert [done for done, _, _ in said] == list(range(1, turns + 1))
    assert {total for _, total, _ in said} == {turns}
    assert said[-1][2].startswith("seed 2: reference ")
    json.dumps(found)
    for row in found["seeds"]:
        scores = row["scores"]
        assert [steps for steps, _, _ in scores[REFERENCE]] == [25, 50, 60]
        assert [steps for steps, _, _ in scores[OURS]] == [25, 30]
        assert row["target"] == scores[REFERENCE][-1][2]
        first = next(score for score in scores[OURS] if score[2] <= row["target"])
        assert row["steps"][OURS] == first[0]
        assert row["speedup"] == row["seconds"][REFERENCE] / first[1]
    assert found["speedup"] == min(row["speedup"] for row in found["seeds"])
    assert found["chosen_on"] is None
    assert set(found["memory"]) == {OURS, REFERENCE}
    assert (found["memory_over_reference"] is None) == (not all(found["memory"].values()))


def test_a_target_that_was_missed_is_no_speedup():
    hopeless = Preset("slow", "", SMALL.model, TrainConfig(steps=2, batch_size=1, lr=1e-6))
    found = measure(TEXT, (1,), recipe=RECIPE, chosen=hopeless)
    assert found["speedup"] is found["seeds"][0]["speedup"] is found["seeds"][0]["steps"][OURS] is None


def test_what_cannot_be_raced_is_refused():
    with pytest.raises(ConfigError, match="seeds: none"):
        measure(TEXT, (), recipe=RECIPE, chosen=SMALL)
    with pytest.raises(ConfigError, match="n_ctx: 16 is not the reference's 64"):
        measure(TEXT, chosen=SMALL)


def test_swift_does_the_references_task_and_a_run_of_it_is_training():
    chosen = preset("swift")
    assert chosen.model.n_ctx == Recipe.context
    assert chosen.train.vitals_every == chosen.train.eval_every == chosen.train.save_every == 0


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(PRESETS, "swift", Preset("swift", "", SMALL.model.replace(n_ctx=64), SMALL.train))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    line = ["--data", str(tmp_path / "text.txt"), "--seeds", "4", "--iterations", "2"]
    time_to_loss.main([*line, "--json"])
    said = capsys.readouterr()
    assert json.loads(said.out)["seeds"][0]["seed"] == 4
    assert json.loads(said.out)["chosen_on"] == "tinyshakespeare"
    assert "note: the recipe has 2,000 iterations, not 2: a try, not a figure" in said.err
    time_to_loss.main(line)
    said = capsys.readouterr().out
    assert "reference s" in said
    assert "speedup: " in said
    with pytest.raises(ConfigError, match="iterations: 0 is not possible"):
        time_to_loss.main([*line[:-1], "0"])
