"""`mainstem data`: bytes in any console, a passport as JSON, and nothing left when it is stopped."""

import os
import signal
import time

import pytest

from mainstem.text import tokens

KOREAN = "\ufeff강물이 바다로 흐른다.\r\n시냇물 👩‍👩‍👧 cafe\u0301\n" * 20


def test_korean_comes_through_a_console_that_knows_no_utf8(process, tmp_path):
    """To the byte, but for the mark at its start."""
    (tmp_path / "한글.txt").write_bytes(KOREAN.encode())
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    out, err = process("data", "한글.txt", "--out", "d", "--vocab-size", "300", env=env).communicate()
    assert b"1 byte order mark(s) were dropped" in err
    assert b"20 CRLF and 0 lone CR line ends were kept" in err
    assert b"d: 1 documents" in out
    made = tokens.load(tmp_path / "d", verify=True)
    assert made.tokenizer.decode_bytes([*made.train, *made.val]) == KOREAN.encode().removeprefix(b"\xef\xbb\xbf")


def test_the_object_is_the_passport(mainstem, text):
    found = mainstem("data", text, "--out", "d", "--vocab-size", "300", "--json").json
    assert found["out"] == "d"
    assert found["counts"]["bytes"] == text.stat().st_size
    assert found["tokenizer"]["vocab_size"] == 300
    assert found["notes"] == []
    assert mainstem("data", text, "--out", "d", "--vocab-size", "300", "--json").json == found


def test_standard_input_separators_and_records(mainstem, tmp_path):
    line = ("data", "-", "--out", "a", "--tokenizer", "byte", "--separator", "<|>", "--json")
    assert mainstem(*line, stdin=b"one<|>two<|>").json["counts"]["documents"] == 2
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"body": "a"}\n{"body": ""}\n{"body": "bc"}\n')
    found = mainstem("data", "b.jsonl", "--out", "b", "--tokenizer", "byte", "--text-field", "body", "--json").json
    assert (found["counts"]["documents"], found["counts"]["skipped_empty"], found["counts"]["tokens"]) == (2, 1, 5)


def test_a_tokenizer_that_is_given_is_used(mainstem, text, small_run, tmp_path):
    found = mainstem("data", text, "--out", "d", "--tokenizer", small_run / "data", "--json").json
    assert found["tokenizer"]["sha256"] == tokens.load(small_run / "data").tokenizer.hash


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(process, tmp_path, signum):
    """128 + its number, one message, and the same line works afterwards."""
    (tmp_path / "long.txt").write_text("".join(f"the {i} river flows {i * i}\n" for i in range(150_000)))
    started = process("data", "long.txt", "--out", "d", "--vocab-size", "300")
    while not any(name.startswith(".d.tmp-") for name in os.listdir(tmp_path)):
        assert started.poll() is None
        time.sleep(0.005)
    started.send_signal(signum)
    out, err = started.communicate()
    assert started.returncode == 128 + signum
    assert err.decode().splitlines()[-1] == f"mainstem: stopped by {signal.Signals(signum).name}"
    assert out == b""
    assert os.listdir(tmp_path) == ["long.txt"]


def test_a_text_of_another_alphabet_is_refused(mainstem, tmp_path):
    """A tokenizer of English characters does not swallow Korean."""
    (tmp_path / "en.txt").write_text("the river flows into the sea. " * 20)
    (tmp_path / "ko.txt").write_text("강물이 바다로 흐른다. " * 20, encoding="utf-8")
    assert mainstem("data", "en.txt", "--out", "en", "--tokenizer", "char").code == 0
    result = mainstem("data", "ko.txt", "--out", "ko", "--tokenizer", "en")
    assert result.code == 2
    assert "%" in result.err
    assert not (tmp_path / "ko").exists()
