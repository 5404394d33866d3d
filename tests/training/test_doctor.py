"""What the doctor finds before a run, in a sound one, and in what is left of a failed or damaged one."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mainstem import counts
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import TrainingFailed
from mainstem.presets import PRESETS
from mainstem.runs.folder import RunFolder, append_row, read_rows
from mainstem.training import doctor
from training_runs import cut, finish, training

MODEL, TRAIN = PRESETS["tiny"].model, PRESETS["tiny"].train.replace(steps=400)


def by_name(findings):
    """The findings that are not well, and all of them, by name."""
    return {f.name for f in findings if not f.ok}, {f.name: f.text for f in findings}


@pytest.fixture
def roomy(monkeypatch):
    """A machine with so many bytes free in memory and on disk."""

    def make(memory=10**12, disk=10**12):
        monkeypatch.setattr(doctor, "free_memory", lambda: memory)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=disk))

    make()
    return make


@pytest.mark.parametrize("name", PRESETS)
def test_a_fresh_preset_fits_where_there_is_room(name, roomy, tmp_path):
    preset = PRESETS[name]
    ill, texts = by_name(doctor.before(preset.model, preset.train, tmp_path / "runs" / "x", None))
    assert not ill & {"memory", "disk", "warmup"}
    assert set(texts) == {"memory", "disk", "tokens", "work", "rate", "warmup"}


@pytest.mark.parametrize(
    ("changes", "train_tokens", "ill", "said"),
    [
        ({"lr": 1.0}, None, "rate", r"lr 1 at width 64; .* lower `lr`"),
        ({"warmup": 400}, None, "warmup", "over 400 of 400 steps; lower `warmup`"),
        ({"optimizer": "muon", "muon_lr": 0.5}, None, "rate", r"muon_lr 0\.5; .* lower `muon_lr`"),
        ({}, 1000, "epochs", r"204\.8 passes over 1,000 training tokens; expect over-fitting"),
    ],
)
def test_what_is_not_well_is_said_with_its_numbers(changes, train_tokens, ill, said, roomy, tmp_path):
    findings = doctor.before(MODEL, TRAIN.replace(**changes), tmp_path, train_tokens)
    names, texts = by_name(findings)
    assert names == {ill}
    assert re.search(said, texts[ill])


def test_memory_and_disk_are_weighed(roomy, tmp_path):
    need = counts.memory(MODEL, 8)
    for memory, ill in ((need["training"] / doctor.MARGIN - 1, {"memory"}), (need["training"], set())):
        roomy(memory=memory)
        assert by_name(doctor.before(MODEL, TRAIN, tmp_path, None))[0] == ill
    roomy(disk=3 * need["checkpoint"])
    ill, texts = by_name(doctor.before(MODEL, TRAIN, tmp_path / "not" / "there", None))
    assert ill == {"disk"}
    assert str(tmp_path) in texts["disk"]
    assert "lower `keep`, free some space, or choose another disk" in texts["disk"]


def test_this_machine_tells_its_memory():
    assert doctor.free_memory() > 10**6


def test_a_healthy_run_is_well(trained):
    ill, texts = by_name(doctor.after(trained))
    assert ill == set()
    assert set(texts) == {"checkpoint", "progress", "spikes", "held-out", "stream"}
    assert texts["checkpoint"] == f"{trained.checkpoint_at(12)} verifies"
    assert texts["progress"].startswith("step 12 of 12, loss ")


def test_a_run_that_never_began_has_no_checkpoint(tmp_path):
    ill, texts = by_name(doctor.after(RunFolder(tmp_path)))
    assert ill == set(texts) == {"checkpoint"}
    assert "the run would start again from step 0" in texts["checkpoint"]


def test_a_failure_is_told(data, tmp_path):
    with pytest.raises(TrainingFailed):
        finish(training(tmp_path, cut(data), lr=1e9, warmup=0, save_every=1, model={"residual": "none"}))
    run = RunFolder(tmp_path)
    failure = read_rows(run.metrics)[-1]
    ill, texts = by_name(doctor.after(run))
    assert "failure" in ill
    assert f"step {failure['step']} was not finite, first at {failure['where']}, at lr 1e+09" in texts["failure"]


@pytest.mark.parametrize("steps", [[12], [12, 8], [12, 8, 4]])
def test_damaged_checkpoints_are_named(copied, steps):
    run = copied()
    for step in steps:
        (run.checkpoint_at(step) / "model.safetensors").write_bytes(b"")
    found = [f for f in doctor.after(run) if f.name == "checkpoint"]
    assert [f.ok for f in found] == [False] * len(steps) + [len(steps) < 3]
    for finding, step in zip(found, steps, strict=False):
        assert finding.text.startswith(f"damaged: {run.checkpoint_at(step)}/model.safetensors: 0 bytes")


def test_over_fitting_spikes_and_a_bad_stream_are_seen(copied):
    run = copied()
    rows = read_rows(run.metrics)
    append_row(run.metrics, {"kind": "eval", "step": 16, "loss": 1.1 * rows[-1]["loss"], "bits_per_byte": 9})
    append_row(run.metrics, {**rows[0], "step": 13, "grad_norm": 1e4})
    append_row(run.vitals, {"step": 12, "block": 0, "stream": float("inf")})
    ill, texts = by_name(doctor.after(run))
    assert ill == {"held-out", "spikes", "stream"}
    assert "best is what opens" in texts["held-out"]
    assert texts["stream"] == "step 12: stream is not finite at block 0"


def test_leftovers_are_told(copied):
    run = copied()
    assert doctor.leftovers(run) == doctor.leftovers(RunFolder(run.path / "nowhere")) == []
    (run.checkpoints / ".step-00000016.tmp-1").mkdir()
    (finding,) = doctor.leftovers(run)
    assert finding.text == ".step-00000016.tmp-1 is unfinished; the next start removes it"


def test_an_attention_free_config_is_looked_at_too(roomy, tmp_path):
    model, train = ModelConfig(n_layer=0), TrainConfig(micro_batch=2)
    text = by_name(doctor.before(replace(model, d_mlp=0), train, tmp_path, None))[1]["memory"]
    assert text.startswith("training needs about 0.0")
