"""`mainstem circuits`: what the weights say, to a person, a program and a file."""

import math

import numpy as np
import pytest

from mainstem.columns import width


def trained(text, folder, changes):
    """A run of two steps."""
    from mainstem.cli import main

    line = (
        "--model.n-ctx 16 --model.n-layer 2 --model.d-model 32 --model.vocab-size 300 --steps 2 --batch-size 2 --json"
    )
    assert main(["train", str(folder), "--data", str(text), *line.split(), *changes.split()]) == 0
    return folder


@pytest.fixture(scope="module")
def post_run(text, tmp_path_factory):
    return trained(text, tmp_path_factory.mktemp("circuits") / "post", "--model.residual post")


@pytest.fixture(scope="module")
def rotary_run(text, tmp_path_factory):
    changes = "--model.residual mix --model.n-layer 4 --model.position rotary --model.qk-norm"
    return trained(text, tmp_path_factory.mktemp("circuits") / "rotary", changes)


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
        assert 0 < row["chance"] < 1
    assert found["notes"] == []


def test_heads(mainstem, small_run, tmp_path):
    said = mainstem("circuits", "heads", small_run, "--json", "--npz", "heads.npz")
    assert said.code == 0, said.err
    assert said.json["heads"][0]["label"] == "L0H0"
    assert all(-1 <= row["copying"] <= 1 for row in said.json["heads"])
    with np.load(tmp_path / "heads.npz") as file:
        assert {"induction", "previous", "ov_eigenvalues"} <= set(file)


@pytest.mark.parametrize("unit", ["L1H0", "L0N3"])
def test_contexts(mainstem, small_run, unit):
    found = mainstem("circuits", "contexts", small_run, unit, "--windows", "4", "--top", "3", "--json").json
    assert (found["unit"], found["windows"]) == (unit, 4)
    values = [row["value"] for row in found["contexts"]]
    assert values == sorted(values, reverse=True)
    assert len(values) == 3
    for row in found["contexts"]:
        place = row["tokens"][row["position"] - row["start"]]
        assert set(place) == {"id", "text"}
        assert (row["source"] is None) == (unit[2] == "N")
        assert unit[2] == "N" or set(row["source"]["token"]) == {"id", "text"}
    said = mainstem("circuits", "contexts", small_run, unit, "--windows", "1000000")
    assert "1000000 windows" not in said.out  # but those that there are


def test_virtual_weights_between_units_are_entries(mainstem, small_run):
    found = mainstem("circuits", "virtual", small_run, "0_mlp_out", "unembed", "--json").json
    assert 0 < found["score"] < 1
    values = [abs(entry["value"]) for entry in found["entries"]]
    assert values == sorted(values, reverse=True)
    assert [set(found["entries"][0][end]) for end in ("writes", "reads")] == [{"neuron"}, {"id", "text"}]
    assert "ln_f" in found["notes"][0]


def test_virtual_weights_of_heads_are_directions(mainstem, small_run):
    said = mainstem("circuits", "virtual", small_run, "L0H0", "L1H1.K", "--top", "8", "--npz", "v.npz", "--json")
    assert said.code == 0, said.err
    assert "entries" not in said.json
    assert [row["side"] for row in said.json["directions"]] == [1, -1, 1, -1]
    for row in said.json["directions"]:
        assert all(set(token) == {"id", "text"} for token in row["writes"] + row["reads"])
    pairs = mainstem("circuits", "composition", small_run, "--top", "1000", "--json").json["pairs"]
    (score,) = [p["score"] for p in pairs if (p["writes"], p["reads"], p["mode"]) == ("L0H0", "L1H1", "K")]
    assert math.isclose(said.json["score"], score, rel_tol=1e-4)
    out = mainstem("circuits", "virtual", small_run, "L0H0", "L1H1.K").out
    assert "L0H0 reads" in out
    assert "queries of L1H1" in out


def test_ngrams(mainstem, small_run):
    found = mainstem("circuits", "ngrams", small_run, "--json").json
    assert len(found["bigrams"]) == len(found["skip_trigrams"]) == 10
    gains = [row["gain"] for row in found["skip_trigrams"]]
    assert gains == sorted(gains, reverse=True)
    assert all(set(found["skip_trigrams"][0][name]) == {"id", "text"} for name in ("source", "destination", "out"))
    one = mainstem("circuits", "ngrams", small_run, "--token", "\\n", "--json").json
    assert {row["token"]["text"] for row in one["bigrams"]} == {"\n"}
    assert one["skip_trigrams"] == []


def test_the_offset_and_what_is_left_open_are_in_every_result(mainstem, rotary_run):
    """One line a cause: the first block of `mix` is post, and three pairs of blocks begin there."""
    for argv in (["composition"], ["heads"], ["virtual", "L1H0", "L2H0.Q"], ["ngrams"]):
        said = mainstem("circuits", argv[0], rotary_run, *argv[1:], "--offset", "3", "--json")
        assert said.code == 0, said.err
        assert said.json["offset"] == 3
        assert any(note.startswith("QK at offset 3") for note in said.json["notes"])
        assert argv[0] == "ngrams" or any("direction only" in note for note in said.json["notes"])
        assert all(f"note: {note}" in said.err for note in said.json["notes"])
    causes = [line for line in mainstem("circuits", "composition", rotary_run).err.splitlines() if "ln_add" in line]
    assert len(causes) == 1
    assert "3 of 6 pairs of blocks" in causes[0]


@pytest.mark.parametrize(
    "argv",
    ["composition", "overlap", "heads", "virtual embed unembed", "virtual L0H0 L1H0.V", "ngrams", "contexts L1H0"],
)
def test_tables_are_for_80_columns(mainstem, small_run, argv):
    question, *rest = argv.split()
    said = mainstem("circuits", question, small_run, *rest)
    assert said.code == 0, said.err
    assert max(map(width, said.out.splitlines())) <= 80


def test_through_a_norm_in_the_stream_there_are_no_virtual_weights(mainstem, post_run):
    for argv in (("virtual", "embed", "unembed"), ("composition",), ("ngrams", "--token", "e")):
        said = mainstem("circuits", argv[0], post_run, *argv[1:], "--json")
        assert said.code == 2
        assert "ln_add" in said.json["error"]
    assert mainstem("circuits", "overlap", post_run).code == 0
    assert mainstem("circuits", "heads", post_run).code == 0


def test_skip_trigrams_need_no_direct_path(mainstem, post_run):
    found = mainstem("circuits", "ngrams", post_run, "--json").json
    assert found["bigrams"] == []
    assert len(found["skip_trigrams"]) == 10
    assert found["notes"][0].startswith("no bigrams: embed -> unembed: no virtual weights")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["virtual", "run", "L0H9", "unembed"], ["L0H9", "L0H"]),
        (["virtual", "run", "L0H0", "L1H0.Z"], ["L1H0.Z", "L1H0"]),
        (["virtual", "run", "L1H0", "L0H0.Q"], ["before"]),
        (["composition", "run", "--modes", "X"], ["'X'"]),
        (["composition", "run", "--offset", "1"], ["rotary"]),
        (["virtual", "run", "L0H0", "L1H0.K", "--offset", "1"], ["rotary"]),
        (["contexts", "run", "L9H0"], ["9"]),
        (["contexts", "run", "head 1"], ["L1H3"]),
        (["heads", "run", "--period", "1000"], ["1000"]),
        (["ngrams", "run", "--token", "xyzzy"], ["xyzzy"]),
        (["ngrams", "run", "--layer", "5"], ["5"]),
        (["ngrams", "run", "--token", "e", "--layer", "0"], ["--token", "--layer"]),
        (["ngrams", "run", "--token", "e", "--offset", "1"], ["--token", "--offset"]),
        (["overlaps", "run"], ["'overlap'"]),
    ],
)
def test_one_message_and_exit_2(mainstem, small_run, argv, words):
    said = mainstem("circuits", *(str(small_run) if word == "run" else word for word in argv), "--json")
    assert said.code == 2, said.out
    for word in words:
        assert word in said.json["error"]
