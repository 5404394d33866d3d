"""`mainstem export` and `import hf`; and every verb that takes a RUN, on a folder in Hugging Face's layout."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mainstem.config import ModelConfig
from mainstem.errors import DataError
from mainstem.formats.card import gather
from mainstem.formats.load import load
from mainstem.formats.run import resolve
from mainstem.model.gpt import GPT
from mainstem.runs import checkpoint

GREEDY = ("--temperature", "0", "--max-new-tokens", "8", "--json")


@pytest.fixture
def run(small_run, tmp_path):
    """A copy of a small run."""
    return Path(shutil.copytree(small_run, tmp_path / "모델"))


@pytest.fixture
def folder(mainstem, run):
    """The same model in Hugging Face's layout, read-only and with everything in it noted."""
    assert mainstem("export", "hf", run, "--out", "hf").code == 0
    before = {path.name: path.read_bytes() for path in Path("hf").iterdir()}
    yield "hf"
    assert {path.name: path.read_bytes() for path in Path("hf").iterdir()} == before


def test_hf_says_what_is_there_and_what_to_type(mainstem, run):
    result = mainstem("export", "hf", run, "--out", "hf", "--json")
    assert set(result.json["files"]) == {path.name for path in Path("hf").iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert result.json["bytes"] == sum(path.stat().st_size for path in Path("hf").iterdir())
    said = mainstem("export", "hf", run, "--out", "again").out
    assert 'mainstem generate again "your prompt"' in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_weights_go_into_shards(mainstem):
    assert mainstem("export", "hf", "bard", "--out", "hf", "--max-shard-mb", "0").code == 2
    files = mainstem("export", "hf", "bard", "--out", "hf", "--max-shard-mb", "4", "--json").json["files"]
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 4
    assert max(files[name] for name in shards) < 4.1e6
    said = [mainstem("generate", name, "ROMEO:", *GREEDY).json["text"] for name in ("hf", "bard")]
    assert said[0] == said[1]


def test_the_card_says_what_is_known(mainstem, run):
    mainstem("export", "hf", run, "--out", "hf")
    card = Path("hf/README.md").read_text(encoding="utf-8")
    settings = json.loads((run / "run.json").read_text(encoding="utf-8"))
    passport = json.loads((run / "data/passport.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "eval"][-1]
    for fact in (
        passport["sources"][0]["sha256"], f"{passport['counts']['tokens']:,} tokens", "not recorded",
        f"{last['bits_per_byte']:.4f} bits per byte", settings["software"]["commit"], settings["software"]["torch"],
        "mainstem train '모델' --preset tiny --data", f"--steps {settings['train']['steps']}",
        "library_name: transformers",
    ):  # fmt: skip
        assert fact in card, fact
    assert str(run.parent) not in card


def test_a_card_goes_on_with_the_model(mainstem, folder):
    Path("theirs").mkdir()
    for path in Path(folder).iterdir():
        shutil.copy(path, "theirs")
    Path("theirs/README.md").write_text("---\nlicense: cc-by-4.0\n---\n# 시냇물\n\n어제 만들었다.\n", encoding="utf-8")
    assert mainstem("export", "hf", "theirs", "--out", "on").code == 0
    card = Path("on/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: cc-by-4.0\n")
    assert "어제 만들었다." in card
    assert "not recorded" not in card


@pytest.mark.parametrize("weights", [None, "bf16", "int8"])
def test_safetensors_are_the_model_alone(mainstem, run, weights):
    flags = [] if weights is None else ["--weights", weights]
    said = mainstem("export", "safetensors", run, "--out", "st", *flags, "--json").json
    assert set(said["files"]) == {
        "README.md", "config.json", "manifest.json", "model.safetensors", "state.json", "tokenizer.json"
    }  # fmt: skip
    assert said["weights"] == (weights or "fp32")
    share = said["weights_bytes"]["after"] / said["weights_bytes"]["before"]
    assert share == 1 if weights is None else share < {"bf16": 0.6, "int8": 0.4}[weights]
    flags = [] if weights is None else ["--weights", weights]
    assert (
        mainstem("generate", "st", "강물이", *GREEDY).json["text"]
        == (mainstem("generate", run, "강물이", *flags, *GREEDY).json["text"])
    )
    narrower = "bf16" if weights == "int8" else "int8"
    other = mainstem("export", "safetensors", "st", "--out", "other", "--weights", narrower)
    assert (other.code == 0) == (weights is None)


def test_gguf_is_one_file(mainstem, run):
    pytest.importorskip("gguf", reason="the package gguf writes GGUF files: pip install 'mainstem[gguf]'")
    sizes = {}
    for dtype in ("f32", "f16"):
        result = mainstem("export", "gguf", run, "--out", "모델.gguf", "--weights", dtype, "--json")
        sizes[dtype] = result.json["bytes"]
        assert "note" not in result.err
    assert sizes["f16"] < 0.8 * sizes["f32"]
    assert [path.name for path in Path().glob("*.gguf*")] == ["모델.gguf"]
    assert "this tokenizer has another pattern" in mainstem("export", "gguf", "bard", "--out", "bard.gguf").err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("hf", "RUN", "--out", "taken"), "taken: already exists; choose another name, or remove it"),
        (("safetensors", "RUN", "--out", "taken"), "taken: already exists"),
        (("gguf", "RUN", "--out", "taken"), "taken: exists and is not a file"),
        (("gguf", "RUN", "--out", "taken/mine.txt"), "taken/mine.txt: exists and is not a GGUF file"),
        (("gguf", "RUN", "--out", "gone/x.gguf"), "gone: no such folder; create it first"),
        (("hf", "nowhere", "--out", "x"), "nowhere: not found"),
        (("hf", "RUN"), "--out"),
        (("hf", "taken/model.gguf", "--out", "x"), "taken/model.gguf: a GGUF file, which can be exported but not read"),
        (("hf", "taken/ckpt.pt", "--out", "x"), "taken/ckpt.pt: a pickle; mainstem import nanogpt reads"),
        (("hf", "taken/mine.txt", "--out", "x"), "taken/mine.txt: a file; give the folder"),
        (("gpt4", "RUN"), "export: unknown format 'gpt4'"),
    ],
)
def test_a_bad_line_writes_nothing(mainstem, run, line, said):
    Path("taken").mkdir()
    for name in ("mine.txt", "model.gguf", "ckpt.pt"):
        Path("taken", name).write_text("mine")
    before = sorted(Path().rglob("*"))
    result = mainstem("export", *(run if word == "RUN" else word for word in line))
    assert result.code == 2
    assert said in result.err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_what_a_format_cannot_hold_is_named(mainstem, shape, form):
    line = ["--model.residual", "post", "--model.position", "rotary", "--model.lm-head-bias"]
    assert mainstem("train", "other", *shape, *line).code == 0
    result = mainstem("export", form, "other", "--out", "out")
    assert result.code == 2
    for word in ("residual 'post'", "position 'rotary'", "lm_head_bias True", "mainstem export safetensors"):
        assert word in result.err
    assert not Path("out").exists()
    assert mainstem("export", "safetensors", "other", "--out", "out").code == 0


def test_a_folder_comes_back_as_a_run(mainstem, run, folder):
    assert mainstem("import", "hf", folder, "--out", "again").code == 0
    ours, back = load(run)[0], load("again")[0]
    assert ours.config == back.config
    best = resolve(run).path
    assert (best / checkpoint.MODEL).read_bytes() == Path("again", checkpoint.MODEL).read_bytes()
    for wrong in (run, "nowhere"):
        assert mainstem("import", "hf", wrong, "--out", "x").code == 2


@pytest.mark.parametrize(
    "line",
    [
        ("info", "RUN"),
        ("doctor", "RUN"),
        ("generate", "RUN", "강물이", "--max-new-tokens", "4"),
        ("tokenizer", "encode", "RUN", "강물이"),
        ("inspect", "stream", "RUN", "강물이 바다로"),
        ("inspect", "token", "RUN", "강물이 바다로"),
        ("inspect", "lens", "RUN", "강물이 바다로"),
        ("inspect", "attribution", "RUN", "강물이 바다로"),
        ("inspect", "flow", "RUN", "강물이 바다로"),
        ("inspect", "ablate", "RUN", "강물이 바다로"),
        ("inspect", "patch", "RUN", "강물이 1", "강물이 2", "--token", "1", "--foil", "2"),
        ("inspect", "tune", "RUN", "--data", "DATA", "--out", "lens.safetensors", "--steps", "1", "--held-out", "1"),
        ("circuits", "composition", "RUN"),
        ("circuits", "overlap", "RUN"),
        ("circuits", "heads", "RUN", "--sequences", "1"),
        ("circuits", "virtual", "RUN", "L0H0", "L1H0.K"),
        ("circuits", "contexts", "RUN", "L1H0", "--data", "DATA", "--windows", "1"),
        ("circuits", "ngrams", "RUN"),
        ("export", "safetensors", "RUN", "--out", "out"),
    ],
    ids=" ".join,
)
def test_every_verb_takes_such_a_folder(mainstem, run, folder, line):
    """With the same answer, up to the names in it."""
    said = []
    for model in (run, folder):
        shutil.rmtree("out", ignore_errors=True)
        words = [str({"RUN": model, "DATA": run / "data"}.get(word, word)) for word in line]
        result = mainstem(*words, "--json")
        assert result.code == 0, result.err
        found = result.json
        if line[0] == "doctor":  # of a run of ours it looks at the training
            found = {"ok": found["ok"]}
        if line[0] == "export":  # the card tells how ours was trained
            found = found["weights_bytes"]
        said.append(json.dumps(found, ensure_ascii=False).replace(str(model), "RUN").replace(Path(model).name, "RUN"))
    assert said[0] == said[1]


def test_training_goes_on_from_such_a_folder(mainstem, run, folder, text):
    line = ["train", "on", "--init-from", folder, "--data", text, "--steps", "2", "--batch-size", "2"]
    assert mainstem(*line).code == 0
    settings = json.loads(Path("on/run.json").read_text())
    saved = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert settings["model"] == saved["model"]
    tokenizers = [Path(place, "data/tokenizer.json").read_bytes() for place in ("on", run)]
    assert tokenizers[0] == tokenizers[1]
    assert mainstem(*line).code == 0  # the same line resumes it
    moved = load_file(Path("on/checkpoints/step-00000002/model.safetensors"))["ln_f.bias"]
    assert not moved.equal(load(folder)[0].ln_f.bias)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model.n-layer", "3"), "n_layer 2, not 3; leave out --model.n-layer"),
        (("--model.n-ctx", "8"), "n_ctx 16, not 8; leave out --model.n-ctx"),
        (("--tokenizer", "byte"), "its ids are of its own tokenizer; leave out --tokenizer"),
        (("--tokenizer", "bard"), "its ids are of its own tokenizer"),
        (("--init-from", "bard"), "its weights are int8"),
        (("--init-from", "nowhere"), "nowhere: not found"),
    ],
)
def test_a_start_that_cannot_be_leaves_nothing(mainstem, folder, text, flags, said):
    """So that the corrected line works."""
    line = ["train", "on", "--init-from", folder, "--data", text, "--steps", "1", "--batch-size", "2"]
    result = mainstem(*line, *flags)
    assert result.code == 2
    assert said in result.err
    assert not Path("on").exists()
    assert mainstem(*line).code == 0


@pytest.mark.parametrize("flags", [(), ("--model.dropout", "0.25"), ("--model.attn-dropout", "0.5")])
def test_a_starts_dropouts_are_the_models_unless_typed(mainstem, folder, text, flags):
    said = json.loads(Path(folder, "config.json").read_text()) | {"resid_pdrop": 0.1, "attn_pdrop": 0.2}
    shutil.copytree(folder, "dropping")
    Path("dropping/config.json").write_text(json.dumps(said))
    line = ["train", "on", "--init-from", "dropping", "--data", text, "--steps", "1", "--batch-size", "2"]
    assert mainstem(*line, *flags).code == 0
    model = json.loads(Path("on/run.json").read_text())["model"]
    names = ("embd_dropout", "attn_dropout", "attn_out_dropout", "mlp_dropout", "mlp_out_dropout")
    expected = {(): [0, 0.2, 0.1, 0, 0.1], "--model.dropout": [0.25] * 5, "--model.attn-dropout": [0, 0.5, 0.1, 0, 0.1]}
    assert [model[name] for name in names] == expected[flags[0] if flags else ()]


def test_prepared_data_are_enough_once_a_run_has_begun(mainstem, folder, run, text):
    """The source may be gone; and weights that cannot be read begin nothing."""
    shutil.copytree(folder, "source")
    line = ["train", "on", "--init_from", "source", "--data", str(run / "data"), "--batch-size", "2"]
    assert mainstem(*line, "--steps", "2").code == 0
    Path("source").rename("gone")
    assert mainstem(*line, "--steps", "3", "--extend").code == 0
    Path("gone/model.safetensors").write_bytes(b"")
    Path("gone").rename("source")
    assert mainstem(*line[:1], "new", *line[2:], "--steps", "1").code == 2
    assert not Path("new/run.json").exists()


def test_a_refused_run_takes_its_new_folders_away(mainstem, tmp_path):
    (tmp_path / "mine").mkdir()
    for place in ("new/a/b", "mine"):
        assert mainstem("train", place, "--data", "nowhere.txt").code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert not list((tmp_path / "mine").iterdir())


def test_a_card_knows_the_run_wherever_it_is_asked(run, monkeypatch):
    monkeypatch.chdir(resolve(run).path)
    model, tokenizer = load(".")
    facts = gather(".", model.config, tokenizer)
    assert facts.settings
    assert facts.passport
    assert facts.step == 12


def test_a_start_without_a_tokenizer_needs_one(mainstem, folder, text):
    shutil.copytree(folder, "bare")
    Path("bare/tokenizer.json").unlink()
    line = ["train", "on", "--init-from", "bare", "--data", text, "--steps", "1", "--batch-size", "2"]
    result = mainstem(*line)
    assert result.code == 2
    assert "bare: it has no tokenizer" in result.err
    assert mainstem(*line, "--tokenizer", folder).code == 0


def test_nothing_is_written_beside_a_foreign_model(mainstem, run, folder, text):
    result = mainstem("inspect", "tune", folder, "--data", str(run / "data"))
    assert result.code == 2
    assert "give --out FILE" in result.err
    for place in (folder, "again"):
        result = mainstem("train", place, "--data", text, "--steps", "1")
        assert result.code == 2
        assert f"--init-from {place}" in result.err
        if place == folder:
            mainstem("import", "hf", folder, "--out", "again")


def test_a_folder_here_comes_before_a_preset(mainstem, run, folder):
    shutil.copytree(folder, "gpt2")
    assert mainstem("info", "gpt2", "--json").json["config"]["d_model"] == 32
    assert "opens" in mainstem("doctor", "gpt2").out


def test_a_card_does_not_speak_of_another_text(mainstem, run, text):
    """Token files that were made anew since, and an evaluation that was not finite."""
    (run / "data").rename("elsewhere")
    settings = json.loads((run / "run.json").read_text(encoding="utf-8"))
    settings["asked"]["data"] = [str(Path("elsewhere").resolve())]
    (run / "run.json").write_text(json.dumps(settings), encoding="utf-8")
    mainstem("export", "hf", run, "--out", "one")
    assert "| bytes | sha256 |" in Path("one/README.md").read_text(encoding="utf-8")
    settings["data"]["tokens.bin"] = "0" * 64
    (run / "run.json").write_text(json.dumps(settings), encoding="utf-8")
    rows = (run / "metrics.jsonl").read_text().replace('"kind": "eval"', '"kind": "eval", "loss": null')
    (run / "metrics.jsonl").write_text(rows)
    assert mainstem("export", "hf", run, "--out", "two").code == 0
    assert "not recorded" in Path("two/README.md").read_text(encoding="utf-8")


def test_a_folder_called_checkpoints_is_no_run(mainstem, folder):
    shutil.copytree(folder, "checkpoints/mine")
    assert mainstem("export", "safetensors", "checkpoints/mine", "--out", "out").code == 0


def test_a_tokenizer_of_another_size_is_refused(tmp_path, data):
    """Ours too, wherever its tokenizer came from."""
    model = GPT(ModelConfig(vocab_size=290, n_ctx=8, n_layer=1, n_head=1, d_model=8))
    checkpoint.save(tmp_path / "own", model, data.tokenizer)
    with pytest.raises(DataError, match="the model has 290 tokens and the tokenizer 300"):
        load(tmp_path / "own")
