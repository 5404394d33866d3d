"""Incremental UTF-8 decoding of tokens, with stop strings, and a guard against invalid UTF-8. No torch."""

import codecs
from collections.abc import Sequence

import numpy as np

from mainstem.errors import ConfigError

# UTF-8 as an automaton (RFC 3629, section 4): state, range of the next byte, next state; any other byte is invalid. A
# state is the number of continuation bytes missing. E0, ED, F0 and F4 restrict the byte after them, which excludes
# overlong forms, surrogates and code points beyond U+10FFFF.
START, ONE, TWO, THREE, AFTER_E0, AFTER_ED, AFTER_F0, AFTER_F4, BROKEN = range(9)
RULES = (
    (START, 0x00, 0x7F, START),
    (START, 0xC2, 0xDF, ONE),
    (START, 0xE0, 0xE0, AFTER_E0),
    (START, 0xE1, 0xEC, TWO),
    (START, 0xED, 0xED, AFTER_ED),
    (START, 0xEE, 0xEF, TWO),
    (START, 0xF0, 0xF0, AFTER_F0),
    (START, 0xF1, 0xF3, THREE),
    (START, 0xF4, 0xF4, AFTER_F4),
    (ONE, 0x80, 0xBF, START),
    (TWO, 0x80, 0xBF, ONE),
    (THREE, 0x80, 0xBF, TWO),
    (AFTER_E0, 0xA0, 0xBF, ONE),
    (AFTER_ED, 0x80, 0x9F, ONE),
    (AFTER_F0, 0x90, 0xBF, TWO),
    (AFTER_F4, 0x80, 0x8F, TWO),
)
NEXT = np.full((BROKEN + 1, 256), BROKEN, dtype=np.uint8)  # (state, byte) -> state
for _state, _first, _last, _next in RULES:
    NEXT[_state, _first : _last + 1] = _next


def utf8_state(pending: bytes) -> int:
    """The UTF-8 state after an incomplete character's bytes (b"": START)."""
    state = START
    for byte in pending:
        state = int(NEXT[state, byte])
    return state


class Utf8Guard:
    """The tokens that would make invalid UTF-8 in each state of the text: `forbidden`, (states, V) bool.

    A token without bytes is forbidden, except end of text between two characters. A state in which every token would
    be forbidden forbids none.

    Args:
        token_bytes: the bytes of each id; b"" for special ones.
        eot_id: the end-of-text token.
    """

    def __init__(self, token_bytes: Sequence[bytes], eot_id: int | None = None):
        lengths = np.array([len(token) for token in token_bytes])
        joined = np.frombuffer(b"".join(token_bytes), dtype=np.uint8)
        starts = lengths.cumsum() - lengths
        self.forbidden = np.tile(lengths == 0, (BROKEN, 1))
        origin, token = np.nonzero(~self.forbidden)  # pairs not decided yet: the text's state, the token
        state, i = origin, 0
        while len(token):
            state = NEXT[state, joined[starts[token] + i]]
            broken = state == BROKEN
            self.forbidden[origin[broken], token[broken]] = True
            i += 1
            going = ~broken & (lengths[token] > i)
            origin, token, state = origin[going], token[going], state[going]
        if eot_id is not None:
            self.forbidden[START, eot_id] = False
        self.forbidden[self.forbidden.all(axis=1)] = False


class TextDecoder:
    """An incremental decoder from token bytes to text: complete characters only, and no part of a stop string.

    The text does not depend on how the bytes are split. It ends just before the stop string that is complete first.
    Invalid bytes become U+FFFD; an incomplete character at the end is dropped.

    Args:
        stops: strings that end the text; none of them empty.
        before: bytes that precede the text; their incomplete last character is completed in the text.
    """

    def __init__(self, stops: Sequence[str] = (), before: bytes = b""):
        if "" in stops:
            raise ConfigError("stop: '' would end every text at once; give at least one character")
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._utf8.decode(before)
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string has ended the text."""

    @property
    def pending(self) -> bytes:
        """The bytes of an incomplete character, at most three."""
        data = self._utf8.getstate()[0]
        return data if utf8_state(data) != BROKEN else b""  # Python holds back half a surrogate, which is invalid

    def feed(self, data: bytes) -> str:
        """The new text after these bytes; "" once stopped."""
        if self.stopped:
            return ""
        text = self._held + self._utf8.decode(data)
        self._held = ""
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            return text[: min(matches)[1]]
        keep = self._tail(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text held back as a possible stop string; call it at the end."""
        if self.stopped:
            return ""
        held, self._held = self._held, ""
        return held + self._utf8.decode(b"", final=not self.pending)

    def _tail(self, text: str) -> int:
        """The start of the longest tail of `text` with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
