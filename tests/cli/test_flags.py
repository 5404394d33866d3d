"""Messages name fields; the command line shows the flags of the command that was typed."""

import importlib

import pytest

from mainstem.cli.generate import Generate
from mainstem.cli.parts import flags
from mainstem.cli.train import Train
from mainstem.errors import ConfigError, RunError

nanogpt = importlib.import_module("mainstem.cli.import.nanogpt")


@pytest.fixture(autouse=True)
def _nothing_typed():
    yield
    flags.remember(None)


@pytest.mark.parametrize(
    ("command", "field", "flag"),
    [
        (Train, "run", "RUN"),
        (Train, "micro_batch", "--micro-batch"),
        (Train, "n_ctx", "--model.n-ctx"),
        (Train, "text_field", "--text-field"),
        (Generate, "top_k", "--top-k"),
        (nanogpt.NanoGPT, "n_head", "--n-head"),
        (Generate, "n_ctx", None),
    ],
)
def test_the_flag_of_a_field(command, field, flag):
    assert flags.of(command).get(field) == flag


def test_names_in_backticks_are_spelled_and_other_backticks_stay():
    text = "lower `micro_batch` or `n_ctx`; see `mainstem data FILE`, `transformer.` and `nothing_of_ours`"
    assert flags.spelled(text) == text
    spoken = "lower --micro-batch or --model.n-ctx; see `mainstem data FILE`, `transformer.` and `nothing_of_ours`"
    assert flags.spelled(text, Train) == spoken
    flags.remember(Train)
    assert flags.spelled(text) == spoken


def test_the_field_at_fault_is_spelled_only_where_it_is_one():
    flags.remember(Train)
    assert flags.message(ConfigError("n_head: 3 heads; set `d_head`")) == "--model.n-head: 3 heads; set --model.d-head"
    assert flags.message(RunError("data: not found")) == "data: not found"  # a folder of that name


def test_running_out_of_memory_names_the_knobs_that_a_command_has():
    flags.remember(Train)
    assert "lower --micro-batch, --model.n-ctx or" in flags.out_of_memory()
    flags.remember(Generate)
    assert "--" not in flags.out_of_memory()


def test_a_program_is_told_the_field(mainstem):
    failed = mainstem("train", "--lr", "0", "--json")
    assert failed.json["field"] == "lr"
    assert failed.json["error"].startswith("--lr: 0.0 is not possible")
