"""`ms.train`: the library's front door; in memory and in a folder the same training as the command line's."""

import random
from pathlib import Path

import pytest
import torch

import mainstem as ms
import training_runs
from mainstem.cli import main
from mainstem.config import ModelConfig
from mainstem.errors import ConfigError, Interrupted, RunError
from mainstem.presets import PRESETS
from mainstem.runs.folder import RunFolder
from mainstem.training import doctor
from mainstem.training.events import CheckpointDue, Notice, Saved, Step
from mainstem.training.keeper import Keeper
from mainstem.training.loop import NonFinite, Training

SHAPE = {"n_ctx": 16, "n_layer": 2, "n_head": 2, "d_model": 32, "vocab_size": 300}
PACE = {"steps": 6, "batch_size": 8, "warmup": 2, "save_every": 3, "eval_every": 3, "vitals_every": 3, "device": "cpu"}
FLAGS = [
    *("--preset", "tiny", "--model.n-ctx", "16", "--model.n-layer", "2", "--model.d-model", "32"),
    *("--model.vocab-size", "300", "--steps", "6", "--batch-size", "8", "--warmup", "2", "--save-every", "3"),
    *("--eval-every", "3", "--vitals-every", "3", "--device", "cpu", "--model.dropout", "0.1"),
]


def train(text, **changes):
    return ms.train("tiny", text, **{**SHAPE, **PACE, "dropout": 0.1, **changes})


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_memory_folder_and_command_line_end_in_the_same_bytes(text, tmp_path):
    """And in memory nothing is written, anywhere that was given."""
    events = []
    memory = train(text, progress=events.append)
    folder = train(text, run=tmp_path / "library")
    assert main(["train", str(tmp_path / "command"), "--data", str(text), *FLAGS]) == 0
    assert training_runs.end(RunFolder(tmp_path / "library")) == training_runs.end(RunFolder(tmp_path / "command"))
    assert equal(weights(memory.model), weights(folder.model))
    kept = ("steps", "tokens", "train_loss", "val_loss", "best_step", "parameters")
    assert {key: memory.summary[key] for key in kept} == {key: folder.summary[key] for key in kept}
    assert [event.step for event in events if isinstance(event, Step)] == list(range(1, 7))
    assert not any(isinstance(event, CheckpointDue | Saved) for event in events)
    assert memory.run is None
    assert not memory.model.training
    assert memory.tokenizer.decode(memory.tokenizer.encode("the river")) == "the river"


def test_the_repr_is_short(text, tmp_path):
    shown = repr(train(text, steps=1, run=tmp_path / "run"))
    assert shown.startswith("TrainResult(1 steps, ")
    assert shown.endswith(f" bits per byte, in {tmp_path / 'run'})")
    assert len(shown) < 200


@pytest.mark.parametrize("first", ["library", "command"])
def test_each_resumes_what_the_other_began(text, tmp_path, first, capsys):
    """The same request; 6 steps are extended to 8."""
    run, line = tmp_path / "run", ["train", str(tmp_path / "run"), "--data", str(text), *FLAGS]
    longer = ["8" if word == "6" else word for word in line]
    if first == "library":
        train(text, run=run)
        assert main([*longer, "--extend", "--json"]) == 0
    else:
        assert main(line) == 0
        assert train(text, run=run, steps=8, extend=True).summary["steps"] == 8
        assert ms.train(run=run).summary["steps"] == 8  # what is saved need not be given
    whole = train(text, run=tmp_path / "whole")
    assert whole.summary["steps"] == 6
    train(text, run=tmp_path / "whole", steps=8, extend=True)
    assert training_runs.end(RunFolder(run)) == training_runs.end(RunFolder(tmp_path / "whole"))


def test_the_command_line_resumes_what_a_keeper_began(data, tmp_path, capsys):
    """The prepared folder has to be given; then the configs are those of the run."""
    made = training_runs.training(tmp_path / "run", data, device="cpu")
    training_runs.finish(made)
    before = training_runs.end(made.run)
    assert main(["train", str(tmp_path / "run")]) == 2
    assert "its token files are in another folder" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "run"), "--data", str(data.path), "--lr", "1"]) == 2
    assert "lr: saved 0.003, asked for 1.0" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "run"), "--data", str(data.path)]) == 0
    assert training_runs.end(made.run) == before


def test_a_keeper_leaves_what_the_command_line_asked_for(text, tmp_path):
    """A run that the library resumes by hand can be resumed by its line again."""
    run = RunFolder(tmp_path / "run")
    line = ["train", str(run.path), "--data", str(text), *FLAGS]
    assert main(line) == 0
    settings = run.settings()
    data = ms.train(run=run.path).run  # opens its own tokens
    assert data == run.path
    from mainstem.text import tokens

    loop = Training(
        ms.ModelConfig.from_dict(settings["model"]), ms.TrainConfig.from_dict(settings["train"]), tokens.load(run.data)
    )
    list(Keeper(run, loop).events())
    assert run.settings()["asked"] == settings["asked"]
    assert main(line) == 0


def test_a_difference_is_refused_with_both_values(text, tmp_path):
    train(text, run=tmp_path / "run")
    with pytest.raises(RunError, match=r"lr: saved 0\.003, asked for 0.5"):
        train(text, run=tmp_path / "run", lr=0.5)
    with pytest.raises(RunError, match=r"model\.n_layer: saved 2, asked for 3"):
        train(text, run=tmp_path / "run", n_layer=3)


def test_a_config_of_ones_own(text, data):
    """With data that it names, text or prepared."""
    config = ms.ModelConfig(**SHAPE)
    for source in (text, data, data.path):
        result = ms.train(config, source, steps=2, batch_size=4, device="cpu", vitals_every=0)
        assert result.summary["steps"] == 2
        assert result.model.config.n_layer == 2


def test_it_begins_with_the_weights_of_a_run(text, trained):
    """Its config and tokenizer too; in memory."""
    first = []
    ms.train(
        data=text, init_from=trained.path, steps=1, batch_size=8, device="cpu",
        progress=lambda event: first.append(event.loss) if isinstance(event, Step) else None,
    )  # fmt: skip
    assert first[0] < 5.3
    with pytest.raises(ConfigError, match="n_layer 2, not 3"):
        ms.train(data=text, init_from=trained.path, steps=1, n_layer=3)


def test_tokens_instead_of_steps(text):
    changes = {key: value for key, value in PACE.items() if key != "steps"}
    assert ms.train("tiny", text, tokens=3 * 8 * 16 + 1, **SHAPE, **changes).summary["steps"] == 4
    with pytest.raises(ConfigError, match="no `steps` beside it"):
        train(text, tokens=9)


def test_an_unknown_field_is_refused_with_the_nearest(text):
    with pytest.raises(ConfigError, match="n_layr: no field of a run; did you mean 'n_layer'"):
        ms.train("tiny", text, n_layr=2)
    with pytest.raises(ConfigError, match="tiny"):
        ms.train("tinny", text)


def test_notices_are_events(text):
    """The vocabulary that the tokenizer reached."""
    events = []
    train(text, vocab_size=9000, steps=1, progress=events.append)
    assert any("vocabulary" in event.text for event in events if isinstance(event, Notice))


def test_training_leaves_the_process_as_it_was(text):
    """Random states of Python and PyTorch between the steps, and the compiler's limit; dropout and vitals on."""
    limit, chance = torch._dynamo.config.recompile_limit, random.getstate()
    steps = []

    def progress(event):
        if isinstance(event, Step):
            steps.append(torch.get_rng_state())

    train(text, vitals_every=1, progress=progress)
    assert all(torch.equal(steps[0], each) for each in steps)
    assert torch._dynamo.config.recompile_limit == limit
    assert random.getstate() == chance


def test_training_goes_on_from_a_state(text, data):
    """Law 9 without a folder: the state is a value, and what is trained after it does not change it."""
    config = ms.ModelConfig(**{**SHAPE, "vocab_size": data.tokenizer.vocab_size, "dropout": 0.1})
    pace = ms.TrainConfig(**PACE)
    whole, states = Training(config, pace, data), []
    for event in whole.events():
        if isinstance(event, CheckpointDue):
            states.append(whole.state())
    for state in states:
        again = Training(config, pace, data)
        again.load_state(state)
        list(again.events())
        assert equal(weights(again.model), weights(whole.model))
        assert (again.best, again.evaluated) == (whole.best, whole.evaluated)
    assert [state.step for state in states] == [3, 6]


def test_training_goes_on_after_an_interruption(data):
    """Law 9 in memory: `events` again, also when a step was interrupted between two micro-batches."""
    config = ms.ModelConfig(**{**SHAPE, "vocab_size": data.tokenizer.vocab_size, "dropout": 0.1})
    pace = ms.TrainConfig(**PACE, micro_batch=4)
    whole, again = Training(config, pace, data), Training(config, pace, data)
    list(whole.events())
    again.should_stop = training_runs.StopAt(5)
    with pytest.raises(Interrupted):
        list(again.events())
    assert 0 < again.done < 6
    list(again.events())
    assert equal(weights(again.model), weights(whole.model))


def test_numbers_that_are_not_finite_end_training_in_memory(text):
    """The message names the step, the point and the rate."""
    with pytest.raises(NonFinite, match=r"step \d is not finite .*first at .*lower `lr` \(it is 1e\+09\).*start again"):
        train(text, lr=1e9, warmup=0, residual="none")


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_training_refuses_exactly_where_the_doctor_warns(data, monkeypatch, share):
    """One estimate of memory, by the same numbers."""
    config, pace = ms.ModelConfig(**{**SHAPE, "vocab_size": data.tokenizer.vocab_size}), ms.TrainConfig(**PACE)
    need = doctor.counts.memory(config, pace.windows_at_once)["training"]
    monkeypatch.setattr(doctor, "free_memory", lambda: need / doctor.MARGIN * share)
    finding = doctor.memory(config, pace)
    assert finding.ok == (share > 1)
    if finding.ok:
        Training(config, pace, data)
    else:
        with pytest.raises(ConfigError) as raised:
            Training(config, pace, data)
        assert str(raised.value) == finding.text


@pytest.mark.parametrize("model", [3, ModelConfig, Path("mini")], ids=str)
def test_what_is_no_model_is_refused(model, text):
    with pytest.raises(ConfigError, match=r"model: \w+ cannot be trained; give a preset's name or a ModelConfig"):
        ms.train(model, text, steps=1)


def test_a_config_has_no_text_of_its_own():
    with pytest.raises(ConfigError, match="data: a ModelConfig has no text of its own"):
        ms.train(ModelConfig(n_layer=1), steps=1)


def test_a_preset_is_its_name(text):
    changes = {"steps": 2, "n_ctx": 16, "tokenizer": "byte"}
    one, other = ms.train(PRESETS["tiny"], text, **changes), ms.train("tiny", text, **changes)
    assert one.summary["train_loss"] == other.summary["train_loss"]
