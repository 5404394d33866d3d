"""What a checkpoint holds, and that it is read strictly or not at all."""

import errno
import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mainstem import atomic
from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import RunError, TrainingFailed
from mainstem.formats.load import load
from mainstem.model.gpt import GPT
from mainstem.model.quantized import quantize, weights_of
from mainstem.runs import checkpoint
from mainstem.training.evaluate import loss_sum
from mainstem.training.optim import Optimizer
from models import ROWS, build, small
from training_runs import TENSORS

NAME = "step-00000003"


def saved(tmp_path, model):
    """A checkpoint with weights alone."""
    checkpoint.save(tmp_path / NAME, model, None)
    return tmp_path / NAME


def rewritten(path, change):
    """The weights' file, its tensors changed in place."""
    tensors = load_file(path / checkpoint.MODEL)
    change(tensors)
    save_file(tensors, path / checkpoint.MODEL)
    return path / checkpoint.MODEL


def sealed(path):
    """The same folder with a manifest that fits what it holds now."""
    files = [file for file in path.iterdir() if file.name != atomic.MANIFEST]
    manifest = {file.name: {"bytes": file.stat().st_size, "sha256": atomic.sha256(file)} for file in files}
    (path / atomic.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("residual", ROWS)
def test_a_model_comes_back_to_the_bit(tmp_path, residual, tied):
    model = build(small(residual, tie_embeddings=tied, qk_norm=True), torch.float32)
    opened, tokenizer = load(saved(tmp_path, model))
    assert opened.config == model.config
    assert tokenizer is None
    assert not opened.training
    assert all(torch.equal(a, b) for a, b in zip(opened.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_a_narrow_model_comes_back_to_the_bit(tmp_path, weights, tied):
    model = quantize(build(small("sandwich", tie_embeddings=tied, lm_head_bias=True), torch.float32), weights)
    path = saved(tmp_path, model)
    assert json.loads((path / checkpoint.CONFIG).read_text())["weights"] == weights
    opened, _ = load(path)
    assert weights_of(opened) == weights
    assert (opened.lm_head.matrix is opened.wte.matrix) == tied
    ids = torch.arange(8)[None]
    assert torch.equal(opened(ids), model(ids))
    checkpoint.save(tmp_path / "step-00000004", opened.double(), None)
    written = [load_file(tmp_path / name / checkpoint.MODEL) for name in (NAME, "step-00000004")]
    assert all(torch.equal(value, written[1][name].to(value.dtype)) for name, value in written[0].items())


def test_an_int8_file_is_a_quarter(tmp_path):
    model = GPT(small(d_model=96, vocab_size=400))
    sizes = [(saved(tmp_path, each) / checkpoint.MODEL).stat().st_size for each in (model, quantize(model, "int8"))]
    assert 0.25 < sizes[1] / sizes[0] < 0.3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("blocks.1.mlp.c_fc.scale"), r"it lacks blocks\.1\.mlp\.c_fc\.scale"),
        (lambda t: t.update({"wte.scale": torch.zeros(5)}), r"wte\.scale is \(5,\), not \(11,\)"),
        (lambda t: t.update({"wte.weight": t["wte.weight"].float()}), r"wte\.weight is torch.float32, not torch.int8"),
    ],
)
def test_a_narrow_file_that_does_not_fit_is_refused_by_name(tmp_path, change, said):
    model = quantize(GPT(small()), "int8")
    path = saved(tmp_path, model)
    with pytest.raises(RunError, match=rf"model\.safetensors: {said}"):
        checkpoint.load_weights(model, rewritten(path, change))


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_narrow_weights_begin_no_training(tmp_path, weights):
    path = saved(tmp_path, quantize(GPT(small()), weights))
    with pytest.raises(RunError, match=r"its weights are quantized, .* they were quantized from"):
        checkpoint.load_weights(GPT(small()), path / checkpoint.MODEL)


def test_unknown_weights_are_refused(tmp_path):
    path = saved(tmp_path, GPT(small()))
    settings = json.loads((path / checkpoint.CONFIG).read_text())
    (path / checkpoint.CONFIG).write_text(json.dumps(settings | {"weights": "int3"}))
    sealed(path)
    with pytest.raises(RunError, match="weights 'int3' are unknown"):
        load(path)


def test_what_a_checkpoint_holds(trained, data):
    """Five files and the manifest; safetensors and JSON, nothing else; the tie is in the file once."""
    last = trained.named("last")
    files = {checkpoint.MODEL, checkpoint.OPTIM, checkpoint.STATE, checkpoint.CONFIG, checkpoint.TOKENIZER}
    assert {path.name for path in last.iterdir()} == files | {atomic.MANIFEST}
    assert json.loads((last / checkpoint.STATE).read_text()) == {"step": 12, "tokens": 12 * 8 * 16}
    config = json.loads((last / checkpoint.CONFIG).read_text())
    assert config["format"] == "mainstem/1"
    assert TrainConfig.from_dict(config["train"]).steps == 12
    model = GPT(ModelConfig.from_dict(config["model"]))
    with safe_open(last / checkpoint.MODEL, framework="pt") as file:
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert load(last)[1].hash == data.tokenizer.hash


def test_a_run_opens_its_best_checkpoint(copied):
    run = copied()
    assert run.named("best") == run.named("last")  # the loss fell to the end
    run.name("best", run.checkpoint_at(4))
    for path, step in ((run.path, 4), (run.checkpoint_at(8), 8)):
        weights = load_file(run.checkpoint_at(step) / checkpoint.MODEL)
        model, _ = load(path)
        assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())


def test_a_tie_outlives_load_and_a_step(tmp_path):
    model, _ = load(saved(tmp_path, GPT(small())))
    ids = torch.arange(8)[None]
    loss_sum(model, ids[:, :-1], ids[:, 1:]).backward()
    Optimizer(model, TrainConfig()).step(1.0)
    assert model.lm_head.weight is model.wte.weight
    assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module._orig_mod."])
def test_prefixes_of_wrappers_are_taken_off(tmp_path, prefix):
    """In any nesting, before the whole name."""
    model = build(small(), torch.float32)
    path = saved(tmp_path, model)
    rewritten(path, lambda t: [t.update({prefix + name: t.pop(name)}) for name in list(t)])
    other = GPT(small(), seed=7)
    checkpoint.load_weights(other, path / checkpoint.MODEL)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_prefixes_inside_a_name_are_taken_off(tmp_path):
    """A block that was compiled on its own."""
    model = build(small(), torch.float32)
    path = saved(tmp_path, model)

    def wrap(tensors):
        for name in list(tensors):
            if name.startswith("blocks.1."):
                tensors[name.replace("blocks.1.", "blocks.1._orig_mod.")] = tensors.pop(name)

    rewritten(path, wrap)
    checkpoint.load_weights(GPT(small(), seed=7), path / checkpoint.MODEL)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("blocks.1.mlp.c_fc.weight"), r"it lacks blocks\.1\.mlp\.c_fc\.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "it has extra, and the config has not"),
        (lambda t: t.update({"ln_f.weight": torch.zeros(5)}), r"ln_f\.weight is \(5,\), not \(12,\)"),
        (lambda t: t.clear(), "it lacks blocks"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path, change, said):
    """Never a silently random weight."""
    path = saved(tmp_path, GPT(small()))
    with pytest.raises(RunError, match=rf"model\.safetensors: {said}"):
        checkpoint.load_weights(GPT(small()), rewritten(path, change))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_not_saved(tmp_path, bad):
    """What stood there before stays."""
    model = GPT(small())
    saved(tmp_path, model)
    with torch.no_grad():
        model.blocks[1].mlp.c_fc.weight[3, 2] = bad
    with pytest.raises(TrainingFailed, match=r"step-00000003: blocks\.1\.mlp\.c_fc\.weight is not finite"):
        saved(tmp_path, model)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert atomic.fault(tmp_path / NAME) is None


@pytest.mark.parametrize("file", TENSORS)
def test_a_disk_that_fills_while_tensors_are_written_leaves_nothing(tmp_path, monkeypatch, file):
    """The library tells the system's number in its text alone."""
    write = checkpoint.save_file

    def torn(tensors, path, metadata=None):
        write(tensors, path)
        if path.name == file:
            path.write_bytes(path.read_bytes()[:100])
            raise SafetensorError(f"Error while serializing: I/O error: full (os error {errno.ENOSPC})")

    monkeypatch.setattr(checkpoint, "save_file", torn)
    model = GPT(small())
    with pytest.raises(TrainingFailed, match=r"step-00000003: no space left to write it") as raised:
        checkpoint.save(tmp_path / NAME, model, None, optimizer=Optimizer(model, TrainConfig()).tensors())
    assert raised.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_another_error_while_tensors_are_written_is_not_called_a_full_disk(tmp_path, monkeypatch):
    def broken(tensors, path, metadata=None):
        raise SafetensorError("something else")

    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(OSError, match="something else"):
        checkpoint.save(tmp_path / NAME, GPT(small()), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 100])
def test_a_damaged_file_of_tensors_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=r"model\.safetensors: not readable .*take another checkpoint"):
        checkpoint.read_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_a_damaged_checkpoint_is_not_opened(copied, file, harm):
    path = copied().checkpoint_at(8) / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content[: len(content) // 2] if harm == "cut" else content)
    with pytest.raises(RunError, match=rf"{file}: .*open another checkpoint of this run"):
        load(path.parent)


def test_weights_alone_cannot_be_resumed(tmp_path):
    """The message names the flag that starts from them."""
    model = GPT(small())
    with pytest.raises(RunError, match=rf"no optimizer, so it cannot be resumed; .*`init_from` \S+{NAME}$"):
        checkpoint.resume(saved(tmp_path, model), model)


@pytest.mark.parametrize("config", [{"format": "other/1"}, [], {"format": "mainstem/2", "model": {}}])
def test_a_config_of_another_program_is_refused(tmp_path, config):
    path = saved(tmp_path, GPT(small()))
    (path / checkpoint.CONFIG).write_text(json.dumps(config))
    sealed(path)
    with pytest.raises(RunError, match=r"config\.json: not mainstem/1"):
        load(path)
