"""Inputs that cannot work: one message that names the file, the number and the fix; never a traceback."""

import resource
import shutil
from pathlib import Path

import pytest

from mainstem.runs.folder import RunFolder


def harmed(run, file, how):
    """A copy of a run, its last checkpoint harmed."""
    Path(shutil.copytree(run, "run"))
    path = Path("run/checkpoints/step-00000012") / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if how == "flipped" else content[: len(content) // 2])


def check(result, code, *said):
    assert result.code == code
    assert result.err.splitlines()[-1].startswith("mainstem: ")
    assert "Traceback" not in result.err
    for words in said:
        assert words in result.err


@pytest.mark.parametrize("verb", ["data", "train"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ["in.txt", "no "]),
        (b"ab\xffcd" * 9, ["in.txt: byte 2 (0xff) is not utf-8", "--encoding cp949"]),
    ],
)
def test_a_text_that_cannot_be_read_is_named(mainstem, shape, tmp_path, verb, content, said):
    """Nothing is left behind."""
    (tmp_path / "in.txt").write_bytes(content)
    line = {"data": ["in.txt", "--out", "d"], "train": ["d", *shape, "--data", "in.txt"]}[verb]
    check(mainstem(verb, *line), 2, *said)
    assert not list(tmp_path.rglob("*.bin"))
    assert not list(tmp_path.rglob(".*tmp*"))


def test_a_text_shorter_than_the_context_has_both_numbers(mainstem, shape, tmp_path):
    """The message names the flag that helps."""
    (tmp_path / "in.txt").write_text("twenty bytes of text")
    result = mainstem("train", "run", *shape, "--data", "in.txt", "--tokenizer", "byte", "--model.n-ctx", "32")
    check(result, 2, "tokens, but one window needs 33 (n_ctx + 1)", "--model.n-ctx")
    line = ["train", "other", *shape, "--data", "in.txt", "--tokenizer", "byte", "--model.n-ctx", "4", "--steps", "9"]
    assert mainstem(*line).code == 0  # far more steps than an epoch has


def test_an_edited_text_is_refused(mainstem, shape, text, tmp_path):
    shutil.copy(text, "in.txt")
    line = ["train", "run", *shape, "--data", "in.txt", "--steps", "1"]
    assert mainstem(*line).code == 0
    with open("in.txt", "a") as file:
        file.write("one more line\n")
    check(mainstem(*line), 2, "in.txt: changed since run was started; choose another folder")


@pytest.mark.parametrize("how", ["cut", "flipped"])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_checkpoint_is_passed_over_or_named(mainstem, small_run, file, how):
    """The run opens an earlier one; the checkpoint itself does not open."""
    harmed(small_run, file, how)
    check(mainstem("generate", "run/checkpoints/step-00000012", "x"), 2, f"step-00000012/{file}: ")
    result = mainstem("generate", "run", "x", "--max-new-tokens", "2")
    assert result.code == 0
    assert f"passed over run/checkpoints/step-00000012/{file}: " in result.err


def test_a_run_without_a_sound_checkpoint_cannot_be_opened(mainstem, small_run):
    harmed(small_run, "model.safetensors", "cut")
    shutil.rmtree("run/checkpoints/step-00000008")
    check(mainstem("generate", "run", "x"), 2, "run: nothing to open: ", "model.safetensors: ")


def test_tokens_of_another_tokenizer_are_refused(mainstem, shape, small_run, text):
    """As a folder, and as token files that were put in its place."""
    mainstem("data", text, "--out", "d", "--tokenizer", "byte")
    result = mainstem("train", "new", *shape, "--data", "d", "--tokenizer", small_run)
    check(result, 2, "d: made by another tokenizer than ")
    shutil.copytree(small_run, "run")
    shutil.copy("d/tokens.bin", "run/data/tokens.bin")
    check(mainstem("train", "run"), 2, "run/data/tokens.bin: ", "prepare the text again")


@pytest.mark.parametrize("flags", [["--val", "v.txt"], ["--tokenizer", "char"], ["--encoding", "cp949"]])
def test_what_a_prepared_folder_has_settled_is_not_asked_again(mainstem, shape, text, flags):
    """A flag that would change nothing is refused, not passed over."""
    mainstem("data", text, "--out", "d", "--vocab-size", "300")
    check(mainstem("train", "new", *shape, "--data", "d", *flags), 2, "d: ")


def test_a_run_that_lost_its_settings_keeps_its_data(mainstem, shape, small_run, text):
    """Refused before anything is written; nor does a run begin inside another."""
    shutil.copytree(small_run, "run")
    Path("run/run.json").unlink()
    Path("other.txt").write_text("another text\n" * 200)
    before = Path("run/data/tokens.bin").read_bytes()
    line = ["train", "run", *shape]
    line[line.index("--data") + 1] = "other.txt"
    check(mainstem(*line), 2, "run: checkpoints and no run.json")
    assert Path("run/data/tokens.bin").read_bytes() == before
    check(mainstem("train", "run/checkpoints", *shape), 2, "a place inside a run folder")


def test_a_validation_text_that_changed_is_refused(mainstem, shape, text):
    """For --val as for --data."""
    shutil.copy(text, "val.txt")
    line = ["train", "run", *shape, "--val", "val.txt"]
    assert mainstem(*line).code == 0
    assert mainstem(*line).code == 0
    with open("val.txt", "a") as file:
        file.write("one more line\n")
    check(mainstem(*line), 2, "val.txt: changed since run was started")


def test_a_prepared_folder_that_moved_is_the_same_text(mainstem, shape, text):
    """Its hashes decide, not its name; another text under its name is refused."""
    mainstem("data", text, "--out", "d", "--vocab-size", "300")
    line = ["train", "run", *shape, "--data", "d"]
    assert mainstem(*line).code == 0
    Path("d").rename("e")
    line[-1] = "e"
    assert mainstem(*line).code == 0
    Path("other.txt").write_text("another text\n" * 200)
    mainstem("data", "other.txt", "--out", "e", "--vocab-size", "300")
    check(mainstem(*line), 2, "tokens.bin: not what run was started with")


def test_a_run_of_the_library_is_resumed_by_the_library(mainstem, trained):
    shutil.copytree(trained.path, "run")
    check(mainstem("train", "run"), 2, "run: its token files are in another folder; give that folder as --data")


@pytest.mark.parametrize("content", ["[]", "{", '{"checkpoint": 3}', ""])
def test_a_torn_best_is_no_loss(mainstem, small_run, content):
    """It repeats what rows and checkpoints tell."""
    shutil.copytree(small_run, "run")
    Path("run/best.json").write_text(content)
    assert mainstem("generate", "run", "x", "--max-new-tokens", "2").code == 0


def test_json_nested_without_end_is_named(mainstem):
    Path("deep.jsonl").write_text("[" * 100_000 + "\n")
    check(mainstem("data", "deep.jsonl", "--out", "d"), 2, "deep.jsonl, line 1: not JSON")


def test_weights_alone_point_to_init_from(mainstem, small_run):
    from mainstem.formats.load import load
    from mainstem.runs import checkpoint

    shutil.copytree(small_run, "run")
    model, tokenizer = load(small_run)
    for path in RunFolder("run").found():
        checkpoint.save(path, model, tokenizer)
    check(mainstem("train", "run"), 2, "it has weights and no optimizer", "--init-from run/checkpoints/step-00000012")


def test_settings_that_are_no_json_are_named(mainstem, small_run):
    shutil.copytree(small_run, "run")
    Path("run/run.json").write_text("{")
    for verb in ("train", "info", "doctor"):
        check(mainstem(verb, "run"), 2, "run/run.json: not readable as JSON")


def test_a_second_writer_is_refused(mainstem, small_run):
    shutil.copytree(small_run, "run")
    with RunFolder("run").locked():
        check(mainstem("train", "run"), 2, "is writing to this run", "choose another folder")


def test_a_rate_that_is_absurd_ends_the_run(mainstem, shape):
    """Exit code 1, the step and the layer, and what is left is sound."""
    line = ["--lr", "1e9", "--warmup", "0", "--save-every", "1", "--model.residual", "none"]
    result = mainstem("train", "run", *shape, *line, "--json")
    check(result, 1, "is not finite", "first at ", "lower --lr (it is 1e+09)")
    assert result.json["exit_code"] == 1
    assert RunFolder("run").newest()[1] == []


def test_a_full_disk_keeps_what_was_there(process, shape, tmp_path):
    """A limit on the size of a file that the first checkpoint exceeds."""
    limit = 60_000

    def few_bytes():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    started = process("train", "run", *shape, preexec_fn=few_bytes)
    _, err = started.communicate()
    assert started.returncode == 1, err
    said = err.decode().splitlines()[-1]
    assert said.startswith("mainstem: run/checkpoints/step-00000004: no space left to write it (")
    assert "free some space, or choose another disk" in said
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
