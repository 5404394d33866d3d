"""`mainstem circuits`: what the weights say, to a person, a program and a file."""

import math

import numpy as np
import pytest


@pytest.fixture(scope="module")
def post_run(text, tmp_path_factory):
    from mainstem.cli import main

    folder = tmp_path_factory.mktemp("circuits") / "post"
    line = "--model.residual post --model.n-ctx 16 --model.n-layer 2 --model.d-model 32 --model.vocab-size 300"
    pace = "--steps 2 --batch-size 2 --json"
    assert main(["train", str(folder), "--data", str(text), *line.split(), *pace.split()]) == 0
    return folder


def test_composition(mainstem, small_run):
    said = mainstem("circuits", "composition", small_run, "--modes", "KV", "--top", "6", "--json")
    assert said.code == 0, said.err
    found = said.json
    assert len(found["pairs"]) == 6
    assert {pair["mode"] for pair in found["pairs"]} <= {"K", "V"}
    assert all(pair["writes"] < pair["reads"] for pair in found["pairs"])
    assert math.isclose(found["chance"], 31**-0.5)  # LayerNorm reads all but the mean
    assert len(found["scores"]["Q"]) == len(found["labels"])
    assert found["scores"]["Q"][-1][0] is None  # no path backwards


def test_overlap(mainstem, small_run):
    found = mainstem("circuits", "overlap", small_run, "--json").json
    assert [row["roles"] for row in found["roles"]][:3] == ["Q-Q", "Q-K", "Q-V"]
    for row in found["roles"]:
        assert 0 < row["share"] < 1
        assert 0 < row["random"] < 1


def test_heads(mainstem, small_run, tmp_path):
    said = mainstem("circuits", "heads", small_run, "--json", "--npz", "heads.npz")
    assert said.code == 0, said.err
    assert said.json["heads"][0]["label"] == "L0H0"
    assert all(-1 <= row["copying"] <= 1 for row in said.json["heads"])
    with np.load(tmp_path / "heads.npz") as file:
        assert {"induction", "previous", "ov_eigenvalues"} <= set(file)


@pytest.mark.parametrize("unit", ["L1H0", "L0N3"])
def test_contexts(mainstem, small_run, unit):
    found = mainstem("circuits", "heads", small_run, "--contexts", unit, "--windows", "4", "--top", "3", "--json").json
    values = [row["value"] for row in found["contexts"]]
    assert values == sorted(values, reverse=True)
    assert len(values) == 3
    assert (found["contexts"][0]["source"] is None) == (unit[2] == "N")


def test_virtual(mainstem, small_run):
    found = mainstem("circuits", "virtual", small_run, "0_mlp_out", "L1H0.Q", "--json").json
    assert 0 < found["score"] < 1
    weights = [abs(entry["weight"]) for entry in found["entries"]]
    assert weights == sorted(weights, reverse=True)
    assert "ln_in" in found["notes"][0]


def test_ngrams(mainstem, small_run):
    found = mainstem("circuits", "ngrams", small_run, "--json").json
    assert len(found["bigrams"]) == len(found["skip_trigrams"]) == 10
    gains = [row["gain"] for row in found["skip_trigrams"]]
    assert gains == sorted(gains, reverse=True)
    one = mainstem("circuits", "ngrams", small_run, "--token", "e", "--json").json
    assert {row["text"][0] for row in one["bigrams"]} == {"e"}


@pytest.mark.parametrize("argv", ["composition", "overlap", "heads", "virtual embed unembed", "ngrams"])
def test_tables_are_for_80_columns(mainstem, small_run, argv):
    question, *rest = argv.split()
    said = mainstem("circuits", question, small_run, *rest)
    assert said.code == 0, said.err
    assert max(map(len, said.out.splitlines())) <= 80


def test_through_a_norm_in_the_stream_there_are_no_virtual_weights(mainstem, post_run):
    for argv in (("virtual", "embed", "unembed"), ("composition",), ("ngrams",)):
        said = mainstem("circuits", argv[0], post_run, *argv[1:], "--json")
        assert said.code == 2
        assert "ln_add" in said.json["error"]
    assert mainstem("circuits", "overlap", post_run).code == 0
    assert mainstem("circuits", "heads", post_run).code == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["virtual", "run", "L0H9", "unembed"], ["L0H9", "L0H"]),
        (["virtual", "run", "L0H0", "L1H0.Z"], ["L1H0.Z", "L1H0"]),
        (["virtual", "run", "L1H0", "L0H0.Q"], ["before"]),
        (["composition", "run", "--modes", "X"], ["'X'"]),
        (["composition", "run", "--offset", "1"], ["rotary"]),
        (["heads", "run", "--contexts", "L9H0"], ["9"]),
        (["heads", "run", "--contexts", "head 1"], ["L1H3"]),
        (["heads", "run", "--period", "1000"], ["1000"]),
        (["ngrams", "run", "--token", "xyzzy"], ["xyzzy"]),
        (["ngrams", "run", "--layer", "5"], ["5"]),
        (["overlaps", "run"], ["'overlap'"]),
    ],
)
def test_one_message_and_exit_2(mainstem, small_run, argv, words):
    said = mainstem("circuits", *(str(small_run) if word == "run" else word for word in argv), "--json")
    assert said.code == 2, said.out
    for word in words:
        assert word in said.json["error"]
