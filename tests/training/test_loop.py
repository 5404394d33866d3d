"""The loop: a run that is stopped and resumed anywhere ends in the bytes of one that is not, and loses nothing."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mainstem import atomic
from mainstem.config import OPTIMIZERS
from mainstem.errors import DataError, Interrupted, RunError, TrainingFailed
from mainstem.formats.load import load
from mainstem.model.kernels.gelu_backend import choose_gelu
from mainstem.runs import checkpoint
from mainstem.runs.folder import RunFolder, append_row, read_rows
from mainstem.text import tokenizer as tokenizers
from mainstem.text import tokens
from mainstem.text.corpus import Source
from mainstem.training import doctor, loop
from mainstem.training import step as train_step
from mainstem.training.events import Evaluated, Evaluating, Notice, Observed, Sampled, Saved, Step
from mainstem.training.optim import Optimizer
from training_runs import EPOCH, TENSORS, StopAt, cut, end, finish, training


@pytest.fixture(scope="module")
def small(data):
    return cut(data)


def run_to_end(path, data, **changes):
    """An undisturbed run, and what it ends in."""
    finish(training(path, data, **changes))
    return end(RunFolder(path))


def stopped(path, data, call, **changes):
    """Run until `should_stop` raises at that call; whether it did."""
    try:
        finish(training(path, data, should_stop=StopAt(call), **changes))
    except Interrupted:
        return True
    return False


def notices(events):
    return "\n".join(event.text for event in events if isinstance(event, Notice))


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """What an undisturbed run with dropout ends in, by optimizer."""
    changes = {"model": {"dropout": 0.1}, "vitals_every": 3}
    where = tmp_path_factory.mktemp("whole")
    return {name: run_to_end(where / name, small, optimizer=name, **changes) for name in OPTIMIZERS}


# --- law 9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stopped_anywhere_and_resumed_is_uninterrupted(small, whole, tmp_path, optimizer):
    """Law 9: at every moment that the flag is read, in steps, evaluations, at an epoch's end and at the last step.

    With Muon, whose steps take longer, at every fourth.
    """
    changes = {"model": {"dropout": 0.1}, "vitals_every": 3, "optimizer": optimizer}
    counted = StopAt(None)
    finish(training(tmp_path / "counted", small, should_stop=counted, **changes))
    assert counted.calls > 12 + 3
    for call in range(0, counted.calls, 1 if optimizer == "adamw" else 4):
        path = tmp_path / f"{call}"
        assert stopped(path, small, call, **changes)
        assert run_to_end(path, small, **changes) == whole[optimizer], f"stopped at call {call}"


def test_stopped_many_times_and_resumed_is_uninterrupted(small, whole, tmp_path):
    """Law 9: at every single step, in micro-batches."""
    changes = {"model": {"dropout": 0.1}, "micro_batch": 3}
    expected = run_to_end(tmp_path / "whole", small, **changes)
    turns = 0
    while stopped(tmp_path / "run", small, 4, **changes):  # 3 micro-batches a step, and one more
        turns += 1
    assert turns >= 12
    assert end(RunFolder(tmp_path / "run")) == expected


def test_a_stop_saves_at_that_step(small, tmp_path):
    """Before the first step there is nothing to save."""
    assert stopped(tmp_path / "run", small, 0)
    assert RunFolder(tmp_path / "run").found() == []
    assert stopped(tmp_path / "run", small, 9)  # the evaluation at 5 read the flag three times
    run = RunFolder(tmp_path / "run")
    assert run.named("last") == run.newest()[0] == run.checkpoint_at(6)


def test_a_stop_in_an_evaluation_repeats_it_whole(small, tmp_path):
    stopped(tmp_path / "run", small, 6)  # 5 steps, then the second batch of the evaluation
    run = RunFolder(tmp_path / "run")
    assert run.named("last") == run.checkpoint_at(5)
    assert [row for row in read_rows(run.metrics) if row["kind"] == "eval"] == []
    first = finish(training(tmp_path / "run", small))
    assert [event.step for event in first if isinstance(event, Evaluated)] == [5, 10, 12]


def test_the_order_of_the_data_goes_on_over_an_epochs_end(small, tmp_path):
    """No window of an epoch is read twice or left out because of a stop on its last step."""
    seen = []
    first = training(tmp_path / "run", small, save_every=EPOCH, steps=2 * EPOCH)
    assert first.training.windows.per_epoch == 8 * EPOCH
    events = first.events()
    for event in events:
        if isinstance(event, Saved):
            break
    events.close()
    second = training(tmp_path / "run", small, save_every=EPOCH, steps=2 * EPOCH)
    batch = second.training.windows.batch
    second.training.windows.batch = lambda step, size: seen.append(step) or batch(step, size)
    finish(second)
    assert seen == list(range(EPOCH, 2 * EPOCH))


def test_watching_changes_nothing(small, tmp_path):
    """Law 3: vitals at every step, and samples, or none."""
    changes = {"model": {"dropout": 0.1}}
    plain = run_to_end(tmp_path / "plain", small, **changes)
    watched = training(tmp_path / "watched", small, vitals_every=1, sample_every=1, **changes)

    def sample(model, tokenizer):
        model.eval()
        torch.rand(1, generator=torch.default_generator)  # the generator that dropout draws from
        return "text"

    watched.training.sample = sample
    events = finish(watched)
    assert [event.step for event in events if isinstance(event, Observed)] == list(range(12))
    assert [event.step for event in events if isinstance(event, Sampled)] == list(range(1, 13))
    seen = end(RunFolder(tmp_path / "watched"))
    assert seen.pop("vitals.jsonl") != plain.pop("vitals.jsonl") == []
    assert seen == plain


def test_the_seed_decides(small, tmp_path):
    a, b, c = (run_to_end(tmp_path / str(i), small, seed=seed, steps=3) for i, seed in enumerate((1, 1, 2)))
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]


def test_compiling_leaves_training_on(small, whole, tmp_path, monkeypatch):
    """Dropout too: a compiler that changes nothing ends in the same bytes, also when the run is resumed."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(
        loop, "choose_gelu", lambda *where, compiled: choose_gelu(*where)
    )  # the loop of the run beside it
    changes = {"model": {"dropout": 0.1}, "vitals_every": 3, "compile": True}
    stopped(tmp_path / "run", small, 9, **changes)
    events = finish(training(tmp_path / "run", small, **changes))
    assert "blocks compiled; loss and gradients within 0.0e+00" in notices(events)
    assert end(RunFolder(tmp_path / "run")) == whole["adamw"]


# --- damage


@pytest.mark.parametrize("file", [*TENSORS, "state.json", atomic.MANIFEST])
def test_a_damaged_newest_checkpoint_is_passed_over(small, whole, tmp_path, file):
    """It is said, and the end is the same."""
    changes = {"model": {"dropout": 0.1}, "vitals_every": 3}
    stopped(tmp_path / "run", small, 12, **changes)
    run = RunFolder(tmp_path / "run")
    newest = run.found()[-1]
    (newest / file).write_bytes((newest / file).read_bytes()[:-1])
    events = finish(training(tmp_path / "run", small, **changes))
    before = run.checkpoint_at(8).name
    assert f"passed over {newest}" in notices(events)
    assert f"resumed at step 8 of 12 from {run.checkpoints / before}" in notices(events)
    assert end(run) == whole["adamw"]


def test_without_a_sound_checkpoint_it_starts_again(small, whole, tmp_path):
    changes = {"model": {"dropout": 0.1}, "vitals_every": 3}
    stopped(tmp_path / "run", small, 6, **changes)
    run = RunFolder(tmp_path / "run")
    for path in run.found():
        (path / atomic.MANIFEST).unlink()
    said = notices(finish(training(tmp_path / "run", small, **changes)))
    assert "no checkpoint was valid; started again from step 0" in said
    assert end(run) == whole["adamw"]


def test_a_stop_on_a_damaged_checkpoint_of_the_same_step_saves_again(small, tmp_path):
    stopped(tmp_path / "run", small, 9)
    run = RunFolder(tmp_path / "run")
    (run.checkpoint_at(6) / atomic.MANIFEST).unlink()
    assert stopped(tmp_path / "run", small, 1)  # from step 5 to step 6
    assert atomic.fault(run.checkpoint_at(6)) is None


def test_rows_past_the_resumed_step_are_cut(small, tmp_path):
    """Also a torn last one, those of a failure, and vitals of steps that are done again."""
    stopped(tmp_path / "run", small, 9, vitals_every=1)
    run = RunFolder(tmp_path / "run")
    for step in (6, 7, 99):
        append_row(run.metrics, {"kind": "eval", "step": step, "loss": -1.0, "bits_per_byte": -1.0, "seconds": 0})
        append_row(run.vitals, {"step": step, "block": 0})
    append_row(run.metrics, {"kind": "failure", "step": 3, "where": "x", "lr": 1})
    with open(run.metrics, "a") as file:
        file.write('{"kind": "tr')
    (run.checkpoint_at(6) / atomic.MANIFEST).unlink()
    events = training(tmp_path / "run", small, vitals_every=1).events()
    next(event for event in events if isinstance(event, Step))
    events.close()
    rows = [(row["kind"], row["step"]) for row in read_rows(run.metrics)]
    assert rows == [*(("train", step) for step in range(1, 6)), ("eval", 5), ("train", 6)]
    assert {row["step"] for row in read_rows(run.vitals)} == {0, 1, 2, 3, 4}


# --- evaluations and checkpoints


def test_best_and_last_are_kept_apart(small, tmp_path, monkeypatch):
    """A held-out loss that rises moves `last` and leaves `best`, which pruning does not take either."""
    losses = iter([3.0, 2.0, 4.0, 5.0, 6.0, 7.0])
    real = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *a, **k: replace(real(*a, **k), loss=next(losses)))
    events = finish(training(tmp_path / "run", small, eval_every=2, save_every=2, keep=1))
    run = RunFolder(tmp_path / "run")
    assert [event.best for event in events if isinstance(event, Evaluated)] == [True, True, False, False, False, False]
    assert run.named("best") == run.checkpoint_at(4)
    assert run.named("last") == run.checkpoint_at(12)
    assert run.found() == [run.checkpoint_at(4), run.checkpoint_at(12)]
    assert atomic.read_json(run.path / "best.json")["loss"] == 2.0
    opened, _ = load(run.path)
    weights = load_file(run.checkpoint_at(4) / checkpoint.MODEL)
    assert all(torch.equal(weights[name], p) for name, p in opened.named_parameters())


def test_a_resumed_run_recalls_its_best(small, tmp_path, monkeypatch):
    real = loop.evaluate
    for losses, steps in (([2.0, 3.0], 4), ([2.5, 2.4], 8)):
        given = iter(losses)
        monkeypatch.setattr(loop, "evaluate", lambda *a, given=given, **k: replace(real(*a, **k), loss=next(given)))
        events = finish(training(tmp_path / "run", small, eval_every=2, save_every=2, steps=steps, keep=1, extend=True))
    assert not any(event.best for event in events if isinstance(event, Evaluated))
    run = RunFolder(tmp_path / "run")
    assert run.named("best") == run.checkpoint_at(2)


def test_a_final_evaluation_that_dies_has_lost_nothing(small, tmp_path, monkeypatch):
    """The checkpoint is there first; the same line again evaluates, and nothing else."""
    real = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *a, **k: (_ for _ in ()).throw(MemoryError("killed")))
    with pytest.raises(MemoryError):
        finish(training(tmp_path / "run", small, eval_every=0, save_every=0))
    run = RunFolder(tmp_path / "run")
    assert run.newest() == (run.checkpoint_at(12), [])
    monkeypatch.setattr(loop, "evaluate", real)
    events = finish(training(tmp_path / "run", small, eval_every=0, save_every=0))
    assert [type(event) for event in events] == [Notice, Notice, Evaluating, Evaluated]


def test_a_text_without_a_held_out_part_is_trained_on(data, tmp_path):
    """One token cannot be predicted from nothing."""
    events = finish(training(tmp_path / "run", cut(data, val=1), steps=2))
    assert not any(isinstance(event, Evaluated) for event in events)


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_newest_are_kept(small, tmp_path, keep):
    finish(training(tmp_path / "run", small, save_every=1, eval_every=0, keep=keep))
    run = RunFolder(tmp_path / "run")
    assert run.found() == [run.checkpoint_at(step) for step in range(13 - keep, 13)]


def test_save_every_0_saves_at_the_end(small, tmp_path):
    """A run resumed one step before its end has a last checkpoint."""
    events = finish(training(tmp_path / "run", small, save_every=0, eval_every=0))
    assert [event.step for event in events if isinstance(event, Saved)] == [12]
    stopped(tmp_path / "other", small, 11, save_every=0, eval_every=0)
    events = finish(training(tmp_path / "other", small, save_every=0, eval_every=0))
    assert [event.step for event in events if isinstance(event, Saved)] == [12]


def test_a_finished_run_says_so_and_changes_nothing(copied, small):
    run = copied()
    before = end(run)
    events = finish(training(run.path, small, keep=3, eval_every=4, vitals_every=4))
    assert "has done its 12 steps; `extend` with more `steps` trains it on" in notices(events)
    assert not any(isinstance(event, Step | Saved | Evaluated) for event in events)
    assert end(run) == before


def test_a_longer_run_goes_on(copied, small):
    run = copied()
    with pytest.raises(RunError, match="started for 12, and 14 were asked for; add `extend`"):
        finish(training(run.path, small, steps=14))
    with pytest.raises(RunError, match="12 steps are done, more than the 5 asked for"):
        finish(training(run.path, small, steps=5, extend=True))
    events = finish(training(run.path, small, steps=14, extend=True))
    assert [event.step for event in events if isinstance(event, Step)] == [13, 14]
    assert run.named("last") == run.checkpoint_at(14)
    assert run.settings()["train"]["steps"] == 14


@pytest.mark.parametrize("changes", [{"batch_size": 4}, {"lr": 1.0}, {"seed": 9}, {"model": {"dropout": 0.5}}])
def test_a_run_cannot_change_as_it_goes_on(copied, small, changes):
    """Whoever resumes it: another batch size would change what every later step reads."""
    with pytest.raises(RunError, match=r"cannot change as it goes on \(.*: saved .*, asked for "):
        finish(training(copied().path, small, **changes))


def test_a_run_that_was_moved_goes_on(small, whole, tmp_path):
    """Nothing in it holds its own path."""
    changes = {"model": {"dropout": 0.1}, "vitals_every": 3}
    stopped(tmp_path / "here", small, 9, **changes)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert run_to_end(tmp_path / "there", small, **changes) == whole["adamw"]
    for file in (tmp_path / "there").rglob("*.json*"):
        assert str(tmp_path) not in file.read_text(encoding="utf-8")


# --- refusals


def test_a_second_writer_is_refused(small, tmp_path):
    run = RunFolder(tmp_path / "run")
    with run.locked(), pytest.raises(RunError, match="is writing to this run"):
        finish(training(run.path, small))
    assert not run.exists()


def test_a_disk_that_is_too_small_is_refused_at_the_start(small, tmp_path, monkeypatch):
    """With both numbers, before anything is trained."""
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(
        TrainingFailed, match=r"4 checkpoints need 2 MB, and 0 MB are free at .*another disk"
    ) as raised:
        finish(training(tmp_path / "run", small))
    assert raised.value.exit_code == 1
    assert not RunFolder(tmp_path / "run").metrics.exists()


def test_a_disk_that_fills_at_a_save_keeps_the_checkpoint_before(small, tmp_path, monkeypatch):
    """Once there is room the run goes on to the same end."""
    expected = run_to_end(tmp_path / "whole", small)
    real, saves = checkpoint.save_file, iter(range(9))

    def full(tensors, path, metadata=None):
        if next(saves) >= 2:  # the second checkpoint's first file
            raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(TrainingFailed, match="step-00000005: no space left"):
        finish(training(tmp_path / "run", small))
    run = RunFolder(tmp_path / "run")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000004"]
    assert run.newest() == (run.checkpoint_at(4), [])
    monkeypatch.setattr(checkpoint, "save_file", real)
    assert run_to_end(tmp_path / "run", small) == expected


def test_weights_alone_are_not_resumed(small, tmp_path):
    run = RunFolder(tmp_path / "run")
    checkpoint.save(run.checkpoint_at(3), training(run.path, small).training.model, None)
    with pytest.raises(RunError, match=r"checkpoints and no run\.json"):
        finish(training(run.path, small))
    finish(training(tmp_path / "other", small, steps=1))
    shutil.copy(tmp_path / "other/run.json", run.run_json)
    settings = run.settings()
    run.write_settings({**settings, "train": {**settings["train"], "steps": 12}})
    with pytest.raises(RunError, match=r"no optimizer.*`init_from`"):
        finish(training(run.path, small))


def test_a_run_can_start_from_the_weights_of_another(trained, small, tmp_path):
    """From its best ones; once it has a checkpoint of its own, from that."""
    start = training(tmp_path / "new", small, init_from=trained.path, steps=4, seed=5)
    first = next(event for event in start.events() if isinstance(event, Step))
    fresh = next(event for event in training(tmp_path / "x", small, seed=5).events() if isinstance(event, Step))
    assert first.loss < fresh.loss - 0.1
    finish(training(tmp_path / "new", small, init_from=trained.path, steps=4, seed=5))
    said = notices(finish(training(tmp_path / "new", small, init_from=tmp_path / "gone", steps=4, seed=5)))
    assert "resumed at step 4" in said


def test_weights_of_another_shape_are_refused(trained, small, tmp_path):
    with pytest.raises(RunError, match=r"it has blocks\.1"):
        finish(training(tmp_path / "new", small, init_from=trained.path, model={"n_layer": 1}))


def test_another_torch_or_thread_count_is_said(small, tmp_path):
    """Law 9 holds for the same torch, machine and threads."""
    run = training(tmp_path / "run", small, steps=4)
    assert "begun with" not in notices(finish(run))
    settings = run.run.settings()
    run.run.write_settings({**settings, "made_with": {**settings["made_with"], "torch": "2.0"}})
    assert "the bytes may differ" in notices(finish(training(tmp_path / "run", small, steps=4)))


def test_weights_for_another_tokenizer_are_refused(trained, text, tmp_path):
    other = tokens.prepare(Source((text,)), tmp_path / "data", vocab_size=280)
    with pytest.raises(RunError, match="trained with another tokenizer than these tokens"):
        finish(training(tmp_path / "new", other, init_from=trained.path))


def test_a_run_goes_on_with_the_tokens_that_it_began_with(text, tmp_path):
    """A prepared folder that was made anew under the same name is another one."""
    for newlines in ("keep", "lf"):
        (tmp_path / "text.txt").write_text(text.read_text(encoding="utf-8") + newlines, encoding="utf-8")
        data = tokens.prepare(Source((tmp_path / "text.txt",)), tmp_path / "data", vocab_size=300)
        run = training(tmp_path / "run", data, steps=4)
        if newlines == "keep":
            finish(run)
    with pytest.raises(RunError, match=r"tokens\.bin: not what .*run was started with"):
        finish(run)


def test_tokens_of_another_tokenizer_are_refused(small, tmp_path):
    """An id outside the model's vocabulary, in training and in evaluation."""
    byte = cut(small)
    object.__setattr__(byte, "tokenizer", tokenizers.Bytes())
    with pytest.raises(DataError, match="outside the vocabulary of 257"):
        finish(training(tmp_path / "run", byte))


def test_a_text_shorter_than_a_window_is_refused_with_both_numbers(data, tmp_path):
    with pytest.raises(DataError, match=r"16 tokens, but one window needs 17 .*`n_ctx`"):
        training(tmp_path / "run", cut(data, train=16))


# --- numbers


def test_accumulating_is_a_large_batch(small, tmp_path, monkeypatch):
    """Gradients and the logged loss of a batch of 8 are those of 8 x 1 and of 3 + 3 + 2."""
    grads, step = [], Optimizer.step

    def spy(self, rate):
        grads.append(torch.cat([p.grad.flatten() for p in self._named.values()]).clone())
        step(self, rate)

    monkeypatch.setattr(Optimizer, "step", spy)
    rows = {}
    for micro in (-1, 1, 3):
        finish(training(tmp_path / str(micro), small, steps=1, micro_batch=micro, clip=0.0))
        rows[micro] = read_rows(tmp_path / str(micro) / "metrics.jsonl")[0]
    for other, micro in zip(grads[1:], (1, 3), strict=True):
        assert torch.allclose(other, grads[0], rtol=0, atol=1e-6)
        assert rows[micro]["loss"] == pytest.approx(rows[-1]["loss"], abs=1e-6)
        assert rows[micro]["grad_norm"] == pytest.approx(rows[-1]["grad_norm"], rel=1e-5)
    assert rows[1]["tokens"] == 8 * 16


def test_the_logged_numbers_are_those_of_the_step(small, tmp_path):
    """Loss by hand on the first batch, the norm before clipping, bits per byte from the bytes of the targets."""
    made = training(tmp_path / "run", small, steps=1, clip=1e-3)
    x, y = (torch.from_numpy(part) for part in made.training.windows.batch(0, 8))
    loss = torch.nn.functional.cross_entropy(made.training.model(x).flatten(0, 1), y.flatten())
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(made.training.model.parameters()))]).norm()
    event = next(event for event in finish(made) if isinstance(event, Step))
    assert event.loss == pytest.approx(loss.item(), rel=1e-6)
    assert event.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    size = sum(len(small.tokenizer.token_bytes[i]) for i in y.flatten().tolist())
    assert event.bits_per_byte == pytest.approx(loss.item() * y.numel() / 0.6931471805599453 / size, rel=1e-6)
    assert event.lr == pytest.approx(3e-3 / 3)


def test_the_gradient_is_clipped(small, tmp_path, monkeypatch):
    norms, step = [], Optimizer.step

    def spy(self, rate):
        norms.append(torch.cat([p.grad.flatten() for p in self._named.values()]).norm().item())
        step(self, rate)

    monkeypatch.setattr(Optimizer, "step", spy)
    for clip in (0.05, 0.0):
        finish(training(tmp_path / str(clip), small, steps=1, clip=clip))
    assert norms[0] == pytest.approx(0.05, rel=1e-3)
    assert norms[1] > 0.5


# --- failures


def test_a_run_that_goes_bad_stops_before_the_step(small, tmp_path):
    """It names the step and the layer, keeps the last checkpoint finite, and leaves a row."""
    said = r"step \d+ is not finite .*first at \S+; .*lower `lr` \(it is 1e\+09\)"
    with pytest.raises(TrainingFailed, match=said) as e:
        finish(training(tmp_path / "run", small, lr=1e9, warmup=0, save_every=1, model={"residual": "none"}))
    assert e.value.exit_code == 1
    run = RunFolder(tmp_path / "run")
    failure = read_rows(run.metrics)[-1]
    assert failure["kind"] == "failure"
    assert f"step {failure['step']} is not finite" in str(e.value)
    assert failure["where"] in str(e.value)
    assert "no checkpoint is left" in str(e.value)  # the one of step 1 held the weights that did it
    assert run.found() == []


def test_the_last_sound_checkpoint_outlives_a_failure(small, tmp_path):
    """It is named, finite, and what `last` names."""
    made = training(tmp_path / "run", small, eval_every=0)
    events = made.events()
    next(event for event in events if isinstance(event, Step) and event.step == 5)
    made.training.model.wpe.weight.data.fill_(float("inf"))
    with pytest.raises(TrainingFailed, match=r"step 6 is not finite .*step-00000004 is the newest before it"):
        list(events)
    assert made.run.named("last") == made.run.checkpoint_at(4)
    tensors = [tensor for name in TENSORS for tensor in load_file(made.run.checkpoint_at(4) / name).values()]
    assert all(torch.isfinite(tensor).all() for tensor in tensors)


@pytest.mark.parametrize(("loss", "eval_every", "kept"), [("nan", 0, False), ("nan", 4, True), ("fine", 0, True)])
def test_a_failure_takes_no_sound_checkpoint_with_it(small, tmp_path, monkeypatch, loss, eval_every, kept):
    """Of the weights at step 4: gone if they gave the NaN; kept if evaluated, or if their gradient alone is bad."""
    made = training(tmp_path / "run", small, eval_every=eval_every, save_every=4)
    real = train_step.loss_sum

    def bad(model, x, y):
        total = real(model, x, y)
        return total * float("nan") if loss == "nan" else total + 0 * (model.wte.weight.sum() * 0).sqrt()

    events = made.events()
    for event in events:
        if isinstance(event, Evaluated if eval_every else Saved):
            break
    monkeypatch.setattr(train_step, "loss_sum", bad)
    with pytest.raises(TrainingFailed, match="step 5 is not finite"):
        list(events)
    assert made.run.checkpoint_at(4).is_dir() == kept
    assert made.run.named("last") == (made.run.checkpoint_at(4) if kept else None)


def test_a_held_out_loss_that_is_not_finite_fails_the_run(small, tmp_path, monkeypatch):
    """The checkpoint of those weights goes, and the run is no success."""
    real = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *a, **k: replace(real(*a, **k), loss=float("nan")))
    made = training(tmp_path / "run", small, steps=5)
    with pytest.raises(TrainingFailed, match=r"step 5 is not finite \(held-out loss nan\).*step-00000004"):
        finish(made)
    assert [path.name for path in made.run.found()] == ["step-00000004"]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("blocks.1.attn.c_proj.bias", "blocks.1.attn_out"),
        ("ln_f.bias", "the gradient of ln_f.bias"),
        ("wpe.weight", "blocks.0.resid_pre"),
    ],
)
def test_the_first_place_that_went_bad_is_named(small, tmp_path, name, where):
    """In the order of the forward pass; what is not in the stream is in the loss or in a gradient."""
    made = training(tmp_path / "run", small)
    before = {name: p.detach().clone() for name, p in made.training.model.named_parameters()}
    with torch.no_grad():
        dict(made.training.model.named_parameters())[name].fill_(float("nan"))
        before[name].fill_(float("nan"))
    with pytest.raises(TrainingFailed, match="no checkpoint is left"):
        finish(made)
    found = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["where"]
    assert found == where
    assert all(torch.equal(p.nan_to_num(7), before[n].nan_to_num(7)) for n, p in made.training.model.named_parameters())


def test_a_gradient_that_is_not_finite_is_never_stepped(small, tmp_path):
    """With a finite loss."""
    made = training(tmp_path / "run", small)
    made.training.model.blocks[1].mlp.c_fc.weight.register_hook(lambda grad: grad * float("inf"))
    before = made.training.model.wte.weight.detach().clone()
    said = r"gradient norm (nan|inf)\), first at the gradient of blocks\.1\.mlp\.c_fc"
    with pytest.raises(TrainingFailed, match=said):
        finish(made)
    assert torch.equal(made.training.model.wte.weight, before)


def test_a_failed_run_fails_the_same_way_again(small, tmp_path):
    """The row of a failure does not outlive the next start."""
    for _ in range(2):
        with pytest.raises(TrainingFailed):
            finish(training(tmp_path / "run", small, lr=1e9, warmup=0, model={"residual": "none"}))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["kind"] for row in rows].count("failure") == 1
