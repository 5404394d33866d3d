"""`mainstem inspect`: every question answers a person, a program and a file; and says what it cannot."""

import json
import math

import numpy as np
import pytest

PROMPT = "ROMEO: O, she doth teach"


def pairs(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("by", ["head", "branch", "neuron"])
def test_attribution_sums_to_the_logit(mainstem, small_run, by):
    said = mainstem("inspect", "attribution", small_run, PROMPT, "--by", by, "--json")
    assert said.code == 0, said.err
    found = said.json
    assert math.isclose(sum(row["value"] for row in found["rows"]), found["logit"], abs_tol=1e-4)
    assert found["closing_error"] < 1e-4
    assert found["rank"] == 1
    assert found["rows"][0]["label"] == "embed"


def test_a_person_sees_the_rows_and_what_heads_read(mainstem, small_run):
    said = mainstem("inspect", "attribution", small_run, "the man", "--top", "40")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("why ")
    assert any(line.startswith("  L1H0") and "reads" in line for line in lines)
    assert "closing error" in lines[-1]
    assert max(map(len, lines)) <= 80


def test_a_foil_gives_the_difference(mainstem, small_run):
    flags = ("--token", "e", "--json", "--dtype", "float64")
    one = mainstem("inspect", "attribution", small_run, PROMPT, *flags).json
    other = mainstem("inspect", "attribution", small_run, PROMPT, "--token", "a", *flags[2:]).json
    both = mainstem("inspect", "attribution", small_run, PROMPT, "--foil", "a", *flags).json
    assert math.isclose(both["logit"], one["logit"] - other["logit"], abs_tol=1e-9)
    assert both["closing_error"] < 1e-10


def test_arrays_go_to_a_file(mainstem, small_run, tmp_path):
    said = mainstem("inspect", "stream", small_run, PROMPT, "--points", "*.attn_out", "--npz", "out.npz")
    assert said.code == 0, said.err
    with np.load(tmp_path / "out.npz") as file:
        assert sorted(file) == ["blocks.0.attn_out", "blocks.1.attn_out"]
        assert file["blocks.0.attn_out"].shape[-1] == 32
    for question in (("lens",), ("attribution",), ("ablate",), ("token",)):
        assert mainstem("inspect", *question, small_run, PROMPT, "--npz", "one.npz", "--json").code == 0
        with np.load(tmp_path / "one.npz") as file:
            assert len(list(file)) >= 2


def test_stream_by_depth(mainstem, small_run):
    found = mainstem("inspect", "stream", small_run, PROMPT, "--json", "--points", "blocks.0.hook_resid_pre").json
    assert [row["point"] for row in found["levels"]][-1] == "resid_final"
    assert found["closing_error"] < 1e-4
    assert len(found["points"]["blocks.0.resid_pre"]) == len(found["ids"])


def test_lens_ends_in_the_model(mainstem, small_run):
    found = mainstem("inspect", "lens", small_run, PROMPT, "--json").json
    assert [row["label"] for row in found["rows"]] == ["0_pre", "0_mid", "1_pre", "1_mid", "final"]
    assert found["rows"][-1]["rank"] == 1
    assert abs(found["rows"][-1]["kl"]) < 1e-6
    assert mainstem("inspect", "lens", small_run, PROMPT, "--norm", "ownn").code == 2


def test_tune_then_look_through_it(mainstem, small_run, tmp_path):
    out = tmp_path / "lens.safetensors"
    said = mainstem("inspect", "tune", small_run, "--steps", "8", "--held-out", "2", "--out", out, "--json")
    assert said.code == 0, said.err
    for row in said.json["kl"][:-1]:
        assert row["tuned_lens"] < row["logit_lens"]
    assert mainstem("inspect", "lens", small_run, PROMPT, "--lens", out).code == 0
    missing = mainstem("inspect", "lens", small_run, PROMPT, "--tuned")
    assert missing.code == 2
    assert "inspect tune" in missing.err


def test_token_through_a_block(mainstem, small_run):
    found = mainstem("inspect", "token", small_run, PROMPT, "--token", "doth", "--layer", "1", "--json").json
    assert found["trace"]["layer"] == 1
    assert found["word"]["word"]["text"].strip() == "doth"
    for head in found["word"]["heads"]:
        assert math.isclose(sum(read["weight"] for read in head["reads"]), 1, abs_tol=1e-5)
    assert found["trace"]["attention"]["join"]["checksum"] < 1e-5


def test_korean_words_are_read_by_word(mainstem, small_run):
    said = mainstem("inspect", "token", small_run, "창밖을 보았다", "--token", "보았다")
    assert said.code == 0, said.err
    assert "보았다" in said.out
    assert "창밖을" in said.out
    assert "\ufffd" not in said.out


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_ablate(mainstem, small_run, how):
    reference = ("--reference", "JULIET: O, she doth teach") if how == "resample" else ()
    said = mainstem("inspect", "ablate", small_run, PROMPT, "--how", how, "--by", "branch", "--json", *reference)
    if how == "resample" and said.code == 2:
        assert "same shape" in said.err
        return
    assert said.code == 0, said.err
    assert [row["label"] for row in said.json["rows"]] == ["0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"]


def test_patch(mainstem, small_run, tmp_path):
    line = ("inspect", "patch", small_run, "the man", "the men", "--token", "a", "--foil", "b", "--json")
    whole, fast = mainstem(*line), mainstem(*line, "--fast")
    assert (whole.code, fast.code) == (0, 0), whole.err + fast.err
    assert len(whole.json["rows"]) == 2
    last = whole.json["rows"][0]["values"]
    assert math.isclose(sum(last[:1]), 0, abs_tol=1e-6)  # the first token is the same in both
    path = mainstem(*line, "--send", "0_mlp_out", "--to", "final")
    assert path.code == 0, path.err
    assert math.isfinite(path.json["effect"])
    row = {"clean": "the man", "corrupt": "the men", "answer": "a", "foil": "b"}
    many = mainstem("inspect", "patch", small_run, "--pairs", pairs(tmp_path / "p.jsonl", row, row), "--json")
    assert many.code == 0, many.err
    assert np.allclose(many.json["rows"][1]["values"], whole.json["rows"][1]["values"], atol=1e-4)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["atribution", "run", "x"], ["atribution", "'attribution'"]),
        (["attribution", "run", PROMPT, "--token", "teach them"], ["not one token", "teach"]),
        (["attribution", "run", PROMPT, "--pos", "99"], ["99", "out of range"]),
        (["attribution", "run", ""], ["empty"]),
        (["attribution", "run", PROMPT, "--budget", "0.000001"], ["budget"]),
        (["attribution", "run", PROMPT, "--dtype", "float16"], ["float16", "float32 or float64"]),
        (["attribution", "nowhere", PROMPT], ["nowhere"]),
        (["stream", "run", PROMPT, "--points", "resid_past"], ["resid_past"]),
        (["token", "run", PROMPT, "--token", "Juliet"], ["Juliet"]),
        (["token", "run", PROMPT, "--layer", "7"], ["7"]),
        (["ablate", "run", PROMPT, "--how", "resample"], ["reference"]),
        (["ablate", "run", PROMPT, "--by", "neuron"], ["layers"]),
        (["patch", "run", "the man", "the big man"], ["tokens"]),
        (["patch", "run", "the man", "the men", "--what", "resid_pro"], ["resid_pro", "resid_pre"]),
        (["patch", "run", "the man", "the men", "--send", "L0H0"], ["--to"]),
        (["patch", "run"], ["--pairs"]),
        (["patch", "run", "--pairs", "missing.jsonl"], ["missing.jsonl"]),
    ],
)
def test_one_message_and_exit_2(mainstem, small_run, argv, words):
    argv = [str(small_run) if word == "run" else word for word in argv]
    said = mainstem("inspect", *argv, "--json")
    assert said.code == 2
    assert set(said.json) >= {"error", "exit_code"}
    for word in words:
        assert word in said.json["error"], said.json["error"]


def test_arrays_are_not_for_a_terminal(mainstem, small_run):
    said = mainstem("inspect", "stream", small_run, PROMPT, "--points", "resid_pre")
    assert (said.code, "--npz" in said.err) == (2, True)


def test_without_a_question_it_lists_them(mainstem):
    said = mainstem("inspect")
    assert said.code == 0
    assert "attribution" in said.out
