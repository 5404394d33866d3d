import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mainstem.errors import ConfigError
from mainstem.generation import utf8 as module
from mainstem.generation.utf8 import BROKEN, NEXT, START, TextDecoder, Utf8Guard, utf8_state
from mainstem.text.tokenizer import Bytes

FAMILY = "안녕👩‍👩‍👧 하늘🇰🇷 e\u0301 ﷽ 한 \U0010ffff\ud7ff\ue000\x00"
# Few letters, so that stops are met; and characters of one to four bytes.
texts = st.text(st.sampled_from("aabbc안녕é\u200d👩👧\n"), max_size=30)
stop_sets = st.lists(st.text(st.sampled_from("aabbc안\u200d👩"), min_size=1, max_size=4), max_size=3)
# Bytes that are often UTF-8 and often nearly so.
mixed = st.lists(
    st.one_of(
        st.binary(max_size=3),
        st.characters().map(lambda c: c.encode("utf-8", "surrogatepass")),
        st.sampled_from([bytes([b]) for b in (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0)]),
        st.sampled_from([bytes([b]) for b in (0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF)]),
    ),
    max_size=12,
).map(b"".join)

# Some of these completes every character that can be completed.
ENDINGS = [b"", *(bytes([first]) + b"\x80" * more for first in (0x80, 0x90, 0xA0) for more in range(3))]


def pieces(data, cuts):
    """The bytes cut at these places."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def run(parts, stops=(), before=b""):
    """What a decoder streams for these parts, flush included."""
    decoder = TextDecoder(stops, before)
    out = [decoder.feed(part) for part in parts]
    return [*out, decoder.flush()], decoder


def until_stop(text, stops):
    """The law in its plainest form: the text up to the stop that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def prefix_is_valid(data):
    """Whether these bytes can begin a UTF-8 text: Python's strict decoder takes them with some ending."""
    return any(is_valid(data + ending) for ending in ENDINGS)


def is_valid(data):
    """Whether these bytes are a whole UTF-8 text."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# --- the automaton ---------------------------------------------------------------------------------------------------


def test_every_pair_of_bytes_is_judged_as_python_does():
    for first in range(256):
        for second in range(256):
            data = bytes((first, second))
            assert (utf8_state(data) != BROKEN) == prefix_is_valid(data), data


@given(mixed)
@example("\ud800".encode("utf-8", "surrogatepass"))
@example(b"\xc0\x80")
@example(b"\xe0\x9f\xbf")
@example(b"\xf0\x8f\xbf\xbf")
@example(b"\xf4\x90\x80\x80")
@example(FAMILY.encode())
def test_any_bytes_are_judged_as_python_does(data):
    assert (utf8_state(data) != BROKEN) == prefix_is_valid(data)
    assert (utf8_state(data) == START) == is_valid(data)


# --- the guard -------------------------------------------------------------------------------------------------------


@given(st.lists(mixed, min_size=1, max_size=12), texts, st.integers(0, 3))
def test_a_token_is_forbidden_exactly_if_python_would_refuse_the_text(tokens, text, cut):
    data = text.encode()[: -cut or None]
    _, decoder = run([data])
    state = utf8_state(decoder.pending)
    assert state == utf8_state(data)
    wanted = [token == b"" or not prefix_is_valid(data + token) for token in tokens]
    forbidden = Utf8Guard(tokens).forbidden[state].tolist()
    assert forbidden == (wanted if not all(wanted) else [False] * len(tokens))


@given(st.lists(st.integers(0, 10**9), max_size=40))
def test_a_walk_over_allowed_tokens_is_always_text(choices):
    """Over tokens of one to three bytes, whatever they are cut from."""
    source = FAMILY.encode("utf-8", "surrogatepass")
    tokens = [*Bytes.token_bytes, *(source[i : i + 3] for i in range(len(source)))]
    guard, decoder, data, text = Utf8Guard(tokens, eot_id=256), TextDecoder(), b"", ""
    for choice in choices:
        allowed = np.flatnonzero(~guard.forbidden[utf8_state(decoder.pending)])
        token = tokens[allowed[choice % len(allowed)]]
        data += token
        text += decoder.feed(token)
    assert "\ufffd" not in text or "\ufffd".encode() in data
    assert data[: len(data) - len(decoder.pending)].decode("utf-8") == text


def test_end_of_text_only_between_characters_and_other_special_ids_never():
    guard = Utf8Guard([*Bytes.token_bytes, b""], eot_id=256)
    allowed = ~guard.forbidden
    assert allowed[START, 256]
    assert not allowed[1:, 256].any()
    assert not allowed[:, 257].any()
    assert allowed[START, :0x80].all()


def test_a_state_that_nothing_can_follow_forbids_nothing():
    guard = Utf8Guard([b"a", "é".encode(), b"\xec"], eot_id=None)
    assert not guard.forbidden[utf8_state(b"\xec")].any()
    assert guard.forbidden[START].tolist() == [False, False, False]
    assert Utf8Guard([b"a", b"\x80"]).forbidden[START].tolist() == [False, True]


def test_the_table_of_a_large_vocabulary_takes_a_step_a_byte_of_the_longest_token(monkeypatch):
    """All tokens at once: a step a token would be noticed at each start."""
    rng, steps = np.random.default_rng(0), []
    tokens = [rng.integers(0, 256, rng.integers(1, 16), dtype=np.uint8).tobytes() for _ in range(50_000)]

    class Counted:
        def __getitem__(self, place):
            steps.append(place)
            return NEXT[place]

    monkeypatch.setattr(module, "NEXT", Counted())
    forbidden = Utf8Guard([*tokens, b" " * 128]).forbidden
    assert len(steps) == 128
    sample = range(0, 50_000, 97)
    assert [forbidden[START, i] for i in sample] == [not prefix_is_valid(tokens[i]) for i in sample]


# --- the decoder -----------------------------------------------------------------------------------------------------


def test_characters_over_several_tokens_come_whole():
    """Byte by byte."""
    text = FAMILY.encode("utf-8", "replace").decode()
    streamed, _ = run([bytes([byte]) for byte in text.encode()])
    assert "".join(streamed) == text
    assert all(len(piece) <= 1 for piece in streamed)
    assert run([b"\xec\x95", b"\x88"])[0] == ["", "안", ""]


@given(texts, stop_sets, st.lists(st.integers(0, 200), max_size=20))
def test_the_text_is_the_same_however_the_bytes_are_split(text, stops, cuts):
    """Characters stay whole and stop strings are held back, both at once."""
    streamed, decoder = run(pieces(text.encode(), cuts), stops)
    assert "".join(streamed) == until_stop(text, stops)
    assert decoder.stopped == any(stop in text for stop in stops)


@given(mixed, st.lists(st.integers(0, 200), max_size=20))
@example(b"a\xed\xa0", [2])
@example(b"\xed\xa0\x80", [1, 2])
def test_bytes_that_are_no_text_become_replacement_characters_and_an_open_end_is_left_out(data, cuts):
    streamed, _ = run(pieces(data, cuts))
    tails = [n for n in range(1, min(3, len(data)) + 1) if utf8_state(data[-n:]) not in (START, BROKEN)]
    opened = min(tails, default=0)
    assert "".join(streamed) == data[: len(data) - opened].decode("utf-8", "replace")


@pytest.mark.parametrize("data", [b"a\xed\xa0", b"a\xff", b"a\xf0\x80"])
def test_after_bytes_that_are_no_text_the_guard_starts_anew(data):
    decoder = TextDecoder()
    decoder.feed(data)
    assert decoder.pending == b""


@given(texts, texts, st.integers(0, 3))
def test_a_character_that_the_prompt_left_open_is_completed(prompt, text, cut):
    data = (prompt + text).encode()
    at = max(0, len(prompt.encode()) - cut)
    whole, _ = run([data[at:]], before=data[:at])
    assert "".join(whole) == (prompt + text)[len(data[:at].decode("utf-8", "ignore")) :]


@pytest.mark.parametrize(
    ("parts", "stops", "streamed"),
    [
        (["the br", "own", " f", "ox", "."], ["own fox"], ["the br", "", "", "", "", ""]),
        (["the br", "own", " f", "rog"], ["own fox"], ["the br", "", "", "own frog", ""]),
        (["the br", "own", " f"], ["own fox"], ["the br", "", "", "own f"]),  # the end: nothing valid is lost
        (["ab", "ab", "ac"], ["abac"], ["", "ab", "", ""]),
        (["a\n", "\nb"], ["\n\n"], ["a", "", ""]),
        (["one STOP two"], ["STOP"], ["one ", ""]),
        (["x", "<", "end", ">"], ["<|", "<end>"], ["x", "", "", "", ""]),
        (["abcd"], ["abcd", "bc"], ["a", ""]),  # the one that is complete first
        (["ab", "cd"], ["abcd", "bc"], ["", "a", ""]),
        (["abc"], ["bc", "abc"], ["", ""]),  # both at once: the longest
        (["no wait"], ["xyz"], ["no wait", ""]),  # nothing is held that no stop begins with
        (["안", "녕"], ["안녕"], ["", "", ""]),
    ],
)
def test_stop_strings(parts, stops, streamed):
    assert run([part.encode() for part in parts], stops)[0] == streamed


def test_nothing_comes_after_a_stop():
    decoder = TextDecoder(["."])
    assert [decoder.feed(part) for part in (b"a.b", b"c", "안".encode())] == ["a", "", ""]
    assert decoder.flush() == ""


def test_an_empty_stop_is_refused():
    with pytest.raises(ConfigError, match=r"stop: '' .* at least one character"):
        TextDecoder(["a", ""])
