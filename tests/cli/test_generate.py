"""`mainstem generate`: text on stdout, what a person should know on stderr, one object for a program."""

import pytest

from mainstem.text import tokens


@pytest.fixture
def say(mainstem, small_run):
    """Generates from the small run."""
    return lambda *argv: mainstem("generate", small_run, *argv, "--max-new-tokens", "12")


def test_a_prompt_is_continued(say):
    """The seed fixes the text; temperature 0 needs none; stdout has the prompt and the text."""
    first = say("the river", "--json")
    found = first.json
    assert found["text"] == found["samples"][0]["text"] != ""
    assert found["samples"][0] == {"prompt": "the river", "text": found["text"], "finish_reason": "length"}
    assert say("the river", "--json").json == found
    assert say("the river").out == f"the river{found['text']}\n"
    assert say("the river", "--seed", "2", "--json").json["text"] != found["text"]
    cold = [say("the river", "--temperature", "0", "--seed", seed, "--json").json["text"] for seed in (1, 2)]
    assert cold[0] == cold[1]


def test_several_prompts_and_samples(say):
    """Each row whole, samples of one prompt differ, and a row is what it is alone."""
    found = say("the river", "강물이", "--n", "2", "--json").json["samples"]
    assert [sample["prompt"] for sample in found] == ["the river"] * 2 + ["강물이"] * 2
    assert found[0]["text"] != found[1]["text"]
    assert found[2]["text"] == say("강물이", "--json").json["text"]
    said = say("the river", "강물이", "--n", "2").out
    for i, sample in enumerate(found):
        assert f"--- {i + 1} of 4 (length)\n{sample['prompt']}{sample['text']}\n" in said


def test_without_a_prompt_a_document_begins(say):
    assert say("--json").json["samples"][0]["prompt"] == ""


def test_a_stop_ends_the_text_before_it(say):
    whole = say("the river", "--json").json["text"]
    stop = whole[len(whole) // 2 :][:2]
    found = say("the river", "--stop", stop, "--json").json["samples"][0]
    assert found["finish_reason"] == "stop"
    assert found["text"] == whole[: whole.index(stop)]


def test_the_cache_changes_nothing_past_the_context(mainstem, small_run):
    """3 x n_ctx new tokens."""
    line = ["generate", small_run, "a stream", "--temperature", "0", "--max-new-tokens", "48", "--json"]
    assert mainstem(*line).json["text"] == mainstem(*line, "--no-cache").json["text"]
    stopped = mainstem(*line, "--context", "stop").json["samples"][0]
    assert stopped["finish_reason"] == "length"
    assert len(stopped["text"]) < len(mainstem(*line).json["text"])


def test_a_prompt_longer_than_the_context_says_so(say, small_run):
    """It keeps the last n_ctx - 1 tokens."""
    prompt = "the river flows into the main stem " * 10
    count = len(tokens.load(small_run / "data").tokenizer.encode(prompt))
    said = say(prompt)
    assert said.code == 0
    assert f"{count}" in said.err
    assert "15" in said.err
    assert say(prompt, "--json").json["notices"] != []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--temperature -1", "temperature: -1.0"),
        ("--top-p 2", "--top-p: 2.0"),
        ("--top-k -3", "--top-k: -3"),
        ("--n 0", "n: 0 is not possible"),
        ("--seed -1", "seed: -1 is not possible"),
        ("--lookup -1", "lookup: -1 is not possible"),
        ("--device cuda:7", "'cuda:7' is not on this machine"),
        ("--device gpu", "'gpu' is not a device"),
    ],
)
def test_nonsense_is_refused(mainstem, small_run, line, said):
    result = mainstem("generate", small_run, "x", *line.split())
    assert result.code == 2
    assert said in result.err


def test_a_character_that_the_model_does_not_know_is_named(mainstem, shape, tmp_path):
    (tmp_path / "en.txt").write_text("the river flows into the sea and the sea is wide. " * 30)
    assert mainstem("train", "run", *shape, "--data", "en.txt", "--tokenizer", "char", "--steps", "1").code == 0
    result = mainstem("generate", "run", "the 가")
    assert result.code == 2
    assert "'가'" in result.err
    assert mainstem("generate", "run", "the sea", "--max-new-tokens", "5").code == 0


def test_a_checkpoint_without_a_tokenizer_says_so(mainstem, small_run, tmp_path):
    from mainstem.formats.load import load
    from mainstem.runs import checkpoint

    model, _ = load(small_run)
    checkpoint.save(tmp_path / "step-00000001", model, None)
    result = mainstem("generate", "step-00000001", "x")
    assert result.code == 2
    assert "step-00000001: no tokenizer.json" in result.err


# --- how it is computed ----------------------------------------------------------------------------------------------


def test_narrow_weights(say, mainstem, small_run, tmp_path):
    """What is said of them; a run that has them keeps them, and is not narrowed again."""
    from mainstem.formats.load import load
    from mainstem.model.quantized import quantize
    from mainstem.runs import checkpoint

    found = say("the river", "--json").json
    assert found["weights"] == "fp32"
    assert found["cache_bytes_per_token"] == 2 * 2 * 32 * 4  # keys and values, two blocks, 32 wide, float32
    int8 = say("the river", "--weights", "int8", "--json").json
    assert int8["weights"] == "int8"
    model, tokenizer = load(small_run)
    checkpoint.save(tmp_path / "step-00000001", quantize(model, "int8"), tokenizer)
    line = ("generate", tmp_path / "step-00000001", "the river", "--max-new-tokens", "12", "--json")
    assert mainstem(*line).json["text"] == int8["text"]
    assert mainstem(*line, "--weights", "int8").json["text"] == int8["text"]
    refused = mainstem(*line, "--weights", "bf16")
    assert refused.code == 2
    assert "--weights bf16: the run's weights are int8; leave it out" in refused.err


def test_threads(say):
    import torch

    before = torch.get_num_threads()
    try:
        text = say("the river", "--json").json["text"]
        assert say("the river", "--threads", "2", "--json").json["text"] == text
        assert torch.get_num_threads() == 2
        refused = say("the river", "--threads", "-1")
        assert refused.code == 2
        assert "--threads -1 is not possible; give at least 1" in refused.err
    finally:
        torch.set_num_threads(before)


def test_lookup(say):
    text = say("the river", "--json").json["text"]
    assert say("the river", "--lookup", "4", "--json").json["text"] == text
    assert "lookup: 4 is for a single row" in say("a", "b", "--lookup", "4").err


def test_what_is_not_compiled_yet_is_compiled_for_the_next_time(say, monkeypatch):
    from mainstem.generation.compiled import store

    started = []
    monkeypatch.setattr(store, "start", lambda: not started.append(1))
    said = say("the river")
    assert started == [1]
    assert "note: PyTorch decodes; a process in the background compiles the faster decoder" in said.err
    monkeypatch.setattr(store, "ready", lambda: True)
    assert "compiled" not in say("the river").err
    assert started == [1]


def test_what_is_being_compiled_or_cannot_be_is_not_promised(say, monkeypatch):
    from mainstem.generation.compiled import store

    monkeypatch.setattr(store, "start", lambda: pytest.fail("it was started again"))
    monkeypatch.setattr(store, "failure", lambda: "no room; mainstem compile tries again")
    said = say("the river").err
    assert "could not be compiled: no room; mainstem compile tries again" in said
    monkeypatch.setattr(store, "underway", lambda: True)
    assert "note: PyTorch decodes; the compiled decoder is still being compiled" in say("the river").err


def test_the_compiled_decoder_is_shown_and_removed(mainstem, tmp_path, monkeypatch):
    from mainstem.generation.compiled import store

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = store.folder()
    shown = mainstem("compile", "--status", "--json").json
    assert shown == {"folder": str(folder), "state": "not compiled", "removed": []}
    monkeypatch.setattr(store, "_compile", lambda into, every: (into / "x.nbc").write_text("x"))
    assert mainstem("compile", "--json").json["state"] == "ready"
    assert mainstem("compile", "--status", "--json").json["state"] == "ready"
    assert mainstem("compile", "--remove", "--json").json == {
        "folder": str(folder), "state": "not compiled", "removed": [str(folder)],
    }  # fmt: skip
    refused = mainstem("compile", "--status", "--remove")
    assert refused.code == 2
    assert "do not go together" in refused.err


def test_without_numba_there_is_nothing_to_compile(mainstem, monkeypatch):
    from mainstem.generation.compiled import store

    monkeypatch.setattr(store, "folder", lambda: None)
    refused = mainstem("compile")
    assert refused.code == 2
    assert "numba is not installed" in refused.err
