"""`mainstem inspect`: every question answers a person, a program and a file; and says what it cannot."""

import json
import math
import re

import numpy as np
import pytest
import torch

from mainstem.columns import width
from mainstem.formats.load import load
from models import Change, record

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


def test_nothing_is_escaped_twice_and_lines_are_counted_in_columns(mainstem, small_run):
    flags = ("--token", r"\n", "--foil", r"\t")
    said = mainstem("inspect", "attribution", small_run, "대한민국의 주권은\n국민에게\n", *flags)
    first = said.out.splitlines()[0]
    assert first.startswith(r"why '\n' over '\t'")
    assert first.endswith(r"국민에게\n'")
    assert "\\\\" not in said.out
    assert max(map(width, said.out.splitlines())) <= 80
    found = mainstem("inspect", "attribution", small_run, "O", *flags, "--json").json
    assert (found["token"]["text"], found["foil"]["text"]) == ("\n", "\t")


def test_a_part_of_a_character_is_named_by_its_id(mainstem, small_run):
    refused = mainstem("inspect", "lens", small_run, PROMPT, "--token", "보")
    first = re.search(r"'보\(1/3\)' \((id:(\d+))\)", refused.err)
    assert first is not None, refused.err
    found = mainstem("inspect", "lens", small_run, PROMPT, "--token", first[1], "--json").json
    assert found["token"] == {"id": int(first[2]), "text": "<EB>"}


def test_arrays_go_to_a_file(mainstem, small_run, tmp_path):
    said = mainstem("inspect", "stream", small_run, PROMPT, "--points", "*.attn_out", "--npz", "out.npz")
    assert said.code == 0, said.err
    with np.load(tmp_path / "out.npz") as file:
        assert sorted(file) == ["blocks.0.attn_out", "blocks.1.attn_out"]
        assert file["blocks.0.attn_out"].shape[-1] == 32
    for question in (("lens",), ("attribution",), ("ablate",), ("token",), ("flow",)):
        assert mainstem("inspect", *question, small_run, PROMPT, "--npz", "one.npz", "--json").code == 0
        with np.load(tmp_path / "one.npz") as file:
            assert len(list(file)) >= 2


def test_stream_by_depth(mainstem, small_run):
    found = mainstem("inspect", "stream", small_run, PROMPT, "--json", "--points", "blocks.0.hook_resid_pre").json
    assert [row["point"] for row in found["levels"]][-1] == "resid_final"
    assert found["closing_error"] < 1e-4
    assert len(found["points"]["blocks.0.resid_pre"]) == len(found["tokens"])


def test_the_budget_counts_the_points_that_were_asked_for(mainstem, small_run):
    line = ("inspect", "stream", small_run, PROMPT, "--budget", "0.00003", "--json")
    assert mainstem(*line).code == 0
    refused = mainstem(*line, "--points", "pattern", "mlp.post")
    assert (refused.code, "budget" in refused.json["error"]) == (2, True)


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
    for row in said.json["rows"][:-1]:
        assert row["tuned_lens"] < row["logit_lens"]
    assert mainstem("inspect", "lens", small_run, PROMPT, "--lens", out).code == 0
    missing = mainstem("inspect", "lens", small_run, PROMPT, "--lens", "tuned")
    assert missing.code == 2
    assert "inspect tune" in missing.err


def test_token_through_a_block(mainstem, small_run):
    found = mainstem("inspect", "token", small_run, PROMPT, "--token", "doth", "--layer", "1", "--json").json
    assert found["trace"]["layer"] == 1
    assert found["word"]["word"]["text"].strip() == "doth"
    for head in found["word"]["heads"]:
        assert math.isclose(sum(read["weight"] for read in head["reads"]), 1, abs_tol=1e-5)
    assert found["trace"]["attention"]["join"]["checksum"] < 1e-5
    assert found["token"]["text"] == found["trace"]["tokens"][found["trace"]["pos"]]


@pytest.mark.parametrize(("row", "slots"), [("post", ["ln_add"]), ("sandwich", ["ln_in", "ln_out"])])
def test_each_norm_of_a_row_is_shown_before_and_after(mainstem, text, tmp_path, row, slots):
    shape = "--model.n-ctx 16 --model.n-layer 1 --model.d-model 32 --model.vocab-size 300 --batch-size 2 --steps 1"
    made = mainstem("train", "other", "--data", text, *shape.split(), "--model.residual", row, "--json")
    assert made.code == 0, made.err
    said = mainstem("inspect", "token", "other", "the man")
    assert said.code == 0, said.err
    for join in ("res_1", "res_2"):
        shown = [line.split()[:2] for line in said.out.splitlines() if f" {join}." in line]
        assert shown == [[side, f"{join}.{slot}"] for slot in slots for side in ("before", "after")]
    assert max(map(width, said.out.splitlines())) <= 80


def test_korean_words_are_read_by_word(mainstem, small_run):
    said = mainstem("inspect", "token", small_run, "창밖을 보았다", "--token", "보았다")
    assert said.code == 0, said.err
    assert "보았다" in said.out
    assert "창밖을" in said.out
    assert "\ufffd" not in said.out


def opened(run, *prompts):
    """The model of a run in float64, and the ids of prompts, (1, T) each."""
    model, tokenizer = load(run)
    return model.double(), *(torch.tensor([tokenizer.encode(prompt)]) for prompt in prompts)


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
@torch.no_grad()
def test_ablate(mainstem, small_run, how):
    """The log-probability of the first choice, with each write changed by hand."""
    reference = ("--reference", "the men") if how == "resample" else ()
    line = ("inspect", "ablate", small_run, "the man", "--how", how, "--by", "branch", "--dtype", "float64", "--json")
    said = mainstem(*line, *reference)
    assert said.code == 0, said.err
    model, ids, other = opened(small_run, "the man", "the men")
    own, others = record(model, ids), record(model, other)
    put = {
        "zero": lambda point: torch.zeros_like(own[point]),
        "mean": lambda point: own[point].mean(1, keepdim=True).expand_as(own[point]),
        "resample": lambda point: others[point],
    }[how]
    token = own["logits"][0, -1].argmax()
    expected = {}
    for label in ("0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"):
        point = f"blocks.{label.replace('_', '.', 1)}"
        change = Change({point: lambda write, point=point: put(point)})
        changed = model(ids, tap=change).log_softmax(-1)[0, -1, token] - own["logits"].log_softmax(-1)[0, -1, token]
        expected[label] = pytest.approx(changed.item(), abs=1e-9)
    assert {row["label"]: row["value"] for row in said.json["rows"]} == expected


def test_what_is_resampled_from_the_prompt_itself_changes_nothing(mainstem, small_run):
    line = ("inspect", "ablate", small_run, "the man", "--how", "resample", "--reference", "the man", "--json")
    assert all(abs(row["value"]) < 1e-5 for row in mainstem(*line).json["rows"])


@pytest.mark.parametrize("by", ["word", "token"])
def test_flow(mainstem, small_run, by):
    found = mainstem("inspect", "flow", small_run, "O, she doth", "--by", by, "--json").json
    assert found["layers"] == [0, 1]
    assert "".join(unit["text"] for unit in found["units"]) == "O, she doth"
    for row in (row for block in (*found["together"], found["rollout"]) for row in block):
        assert math.isclose(sum(row), 1, abs_tol=1e-5)
    for move in found["rows"]:
        assert move["from"] < move["to"]
    value = mainstem("inspect", "flow", small_run, PROMPT, "--by", by, "--weighting", "value", "--layer", "1", "--json")
    assert value.json["layers"] == [1]
    assert {move["label"][:2] for move in value.json["rows"]} == {"L1"}
    for prompt in (PROMPT, "대한민국의 주권", "a"):
        said = mainstem("inspect", "flow", small_run, prompt, "--by", by)
        assert said.code == 0, said.err
        assert max(map(width, said.out.splitlines())) <= 80


@torch.no_grad()
def test_each_cell_of_a_patch_is_a_pass_with_that_position_put_in(mainstem, small_run):
    """The share of the difference between answer and foil that comes back, by hand."""
    line = ("inspect", "patch", small_run, "the man", "the men", "--token", "a", "--foil", "b", "--dtype", "float64")
    found = mainstem(*line, "--json").json["rows"]
    model, clean, corrupt, answer, foil = opened(small_run, "the man", "the men", "a", "b")

    def difference(ids, tap=None):
        logits = model(ids, tap=tap)[0, -1]
        return (logits[answer[0, 0]] - logits[foil[0, 0]]).item()

    points, low, high = record(model, clean), difference(corrupt), difference(clean)
    for row in found:
        point = f"blocks.{row['layer']}.resid_pre"
        for position, value in enumerate(row["values"]):
            at = torch.arange(clean.shape[1])[:, None] == position
            change = Change({point: lambda x, point=point, at=at: torch.where(at, points[point], x)})
            assert math.isclose(value, (difference(corrupt, change) - low) / (high - low), abs_tol=1e-9)
    assert [row["layer"] for row in found] == [0, 1]
    assert len(found[0]["values"]) == clean.shape[1] == corrupt.shape[1]


def test_patch(mainstem, small_run, tmp_path):
    line = ("inspect", "patch", small_run, "the man", "the men", "--token", "a", "--foil", "b", "--json")
    whole, fast = mainstem(*line), mainstem(*line, "--fast")
    assert (whole.code, fast.code) == (0, 0), whole.err + fast.err
    path = mainstem(*line, "--send", "0_mlp_out", "--to", "final")
    assert path.code == 0, path.err
    assert math.isfinite(path.json["value"])
    row = {"clean": "the man", "corrupt": "the men", "answer": "a", "foil": "b"}
    many = mainstem("inspect", "patch", small_run, "--pairs", pairs(tmp_path / "p.jsonl", row, row), "--json")
    assert many.code == 0, many.err
    assert np.allclose(many.json["rows"][1]["values"], whole.json["rows"][1]["values"], atol=1e-4)
    assert [many.json["pairs"][1][name]["text"] for name in ("answer", "foil")] == ["a", "b"]
    assert "".join(token["text"] for token in many.json["pairs"][1]["corrupt"]) == "the men"


def test_patch_some_cells(mainstem, small_run):
    line = ("inspect", "patch", small_run, "the man", "the men", "--token", r"\n", "--foil", "b", "--json")
    whole = mainstem(*line).json
    some = mainstem(*line, "--layers", "1", "--positions", "-1", "-2").json
    assert whole["pairs"][0]["answer"]["text"] == "\n"
    assert some["columns"] == whole["columns"][-2:]
    assert [row["layer"] for row in some["rows"]] == [1]
    assert np.allclose(some["rows"][0]["values"], whole["rows"][1]["values"][-2:], atol=1e-4)


def test_pairs_of_unequal_length_are_patched_by_head(mainstem, small_run, tmp_path):
    rows = [
        {"clean": f"{start} man", "corrupt": f"{start} men", "answer": "a", "foil": "b"} for start in ("the", "and the")
    ]
    line = ("inspect", "patch", small_run, "--json", "--what", "head", "--pairs")
    both = mainstem(*line, pairs(tmp_path / "both.jsonl", *rows))
    assert both.code == 0, both.err
    alone = [mainstem(*line, pairs(tmp_path / f"{at}.jsonl", row)).json for at, row in enumerate(rows)]
    for side in ("clean", "corrupt"):
        expected = [each["logit_difference"][side][0] for each in alone]
        assert np.allclose(both.json["logit_difference"][side], expected, atol=1e-4)
    refused = mainstem("inspect", "patch", small_run, "--pairs", tmp_path / "both.jsonl")
    assert "no positions in common" in refused.err


def test_a_small_difference_is_noted(mainstem, small_run, tmp_path):
    rows = [{"clean": "a", "corrupt": "b", "answer": "a", "foil": "b"}]
    rows.append({**rows[0], "clean": "b", "corrupt": "a"})  # what one restores, the other takes
    both = mainstem("inspect", "patch", small_run, "--pairs", pairs(tmp_path / "p.jsonl", *rows * 20, rows[0]))
    assert both.code == 0, both.err
    one = mainstem("inspect", "patch", small_run, "--pairs", pairs(tmp_path / "one.jsonl", rows[0]))
    assert "is small beside" in both.err
    assert "is small beside" not in one.err
    assert "41 pairs" in both.out
    assert "0 a" in one.out
    assert "0 a" not in both.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["atribution", "run", "x"], ["atribution", "'attribution'"]),
        (["attribution", "run", PROMPT, "--token", "teach them"], ["not one token", "teach"]),
        (["attribution", "run", PROMPT, "--pos", "99"], ["99", "out of range"]),
        (["attribution", "run", ""], ["empty"]),
        (["attribution", "run", PROMPT, "--budget", "0.000001"], ["budget"]),
        (["attribution", "run", PROMPT, "--budget", "nan"], ["--budget"]),
        (["attribution", "run", PROMPT, "--npz", ""], ["not a file"]),
        (["attribution", "run", PROMPT, "--npz", "/dev/null"], ["/dev/null", "not a file"]),
        (["tune", "run", "--batch-size", "0"], ["--batch-size 0"]),
        (["tune", "run", "--seed", "-1"], ["--seed -1"]),
        (["tune", "run", "--out", "."], ["not a file"]),
        (["attribution", "run", "\udcff\udcfe"], ["0xff", "not UTF-8"]),
        (["attribution", "run", PROMPT, "--dtype", "float16"], ["float16", "float32", "float64"]),
        (["attribution", "nowhere", PROMPT], ["nowhere"]),
        (["stream", "run", PROMPT, "--points", "resid_past"], ["resid_past"]),
        (["token", "run", PROMPT, "--token", "Juliet"], ["Juliet"]),
        (["token", "run", PROMPT, "--layer", "7"], ["7"]),
        (["ablate", "run", PROMPT, "--how", "resample"], ["reference"]),
        (["ablate", "run", PROMPT, "--by", "neuron"], ["layers"]),
        (["patch", "run", "the man", "the big man"], ["tokens"]),
        (["patch", "run", "the man", "the men", "--what", "resid_pro"], ["resid_pro", "resid_pre"]),
        (["patch", "run", "the man"], ["a clean and a corrupt prompt"]),
        (["patch", "run", "the man", "the men", "--token", "a", "--foil", "a"], ["both 'a' (id:", "must differ"]),
        (["patch", "run", "--pairs", "p.jsonl", "--foil", "a"], ["--pairs and --foil"]),
        (["patch", "run", "the man", "--pairs", "p.jsonl"], ["--pairs and typed prompts"]),
        (["patch", "run", "a", "b", "--send", "L0H0", "--to", "final", "--fast"], ["--send and --fast"]),
        (["patch", "run", "a", "b", "--send", "L0H0", "--to", "final", "--what", "q"], ["--send and --what"]),
        (["token", "run", PROMPT, "--token", "doth", "--pos", "3"], ["--token and --pos"]),
        (["ablate", "run", PROMPT, "--budget", "1"], ["--budget"]),
        (["ablate", "run", PROMPT, "--how", "zero", "--reference", "a"], ["--how zero and --reference"]),
        (["lens", "run", PROMPT, "--top", "0"], ["--top 0"]),
        (["flow", "run", PROMPT, "--top", "-1"], ["--top -1"]),
        (["flow", "run", PROMPT, "--layer", "5"], ["5"]),
        (["flow", "run"], ["PROMPT"]),
        (["tune", "run", "--held-out", "-1"], ["--held-out -1"]),
        (["lens", "run", PROMPT, "--token", "id:999"], ["999"]),
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
