"""Text that never cuts a character: an incremental decoder, and a guard over what may be chosen. No torch."""

import codecs
from collections.abc import Sequence

import numpy as np

from mainstem.errors import ConfigError

# UTF-8 as an automaton (RFC 3629, section 4): in a state, a byte of this range leads to that state; any other breaks
# the text. A state is what is still missing. E0, ED, F0 and F4 narrow the byte after them, which keeps out overlong
# forms, surrogates and what lies beyond U+10FFFF.
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
    """The state of a text that ends in these bytes, the last of them an incomplete character (b"": START)."""
    state = START
    for byte in pending:
        state = int(NEXT[state, byte])
    return state


class Utf8Guard:
    """Which tokens leave the text valid UTF-8, whole or still to be completed, after a text that ends in a state.

    `forbidden` is (states, V) bool. A token without bytes is forbidden, except end of text between two characters. A
    state in which no token could follow forbids nothing: a broken character is better than no text.

    Args:
        token_bytes: the bytes of each id; b"" for special ones.
        eot_id: the end-of-text token.
    """

    def __init__(self, token_bytes: Sequence[bytes], eot_id: int | None = None):
        lengths = np.array([len(token) for token in token_bytes])
        joined = np.frombuffer(b"".join(token_bytes), dtype=np.uint8)
        starts = lengths.cumsum() - lengths
        self.forbidden = np.tile(lengths == 0, (BROKEN, 1))
        origin, token = np.nonzero(~self.forbidden)  # what is still open: the text's state, the token
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


class Decoder:
    """Token bytes in, text out, as soon as it is certain: whole characters only, and nothing of a stop string.

    The text is the same however the bytes are split. It ends where the first stop string would be complete, just
    before that string. Bytes that can be no part of a character become U+FFFD; a character that is still incomplete
    at the end is left out.

    Args:
        stops: strings that end the text; none of them empty.
        before: bytes that precede the text; a character that they leave open is completed in it.
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
        """The bytes of a character that is not complete yet, at most three."""
        data = self._utf8.getstate()[0]
        return data if utf8_state(data) != BROKEN else b""  # Python waits on half a surrogate, which nothing completes

    def feed(self, data: bytes) -> str:
        """The text that has become certain with these bytes; "" once stopped."""
        if self.stopped:
            return ""
        text = self._held + self._utf8.decode(data)
        self._held = ""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        keep = self._tail(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text that was held back in case a stop string followed; call it at the end."""
        if self.stopped:
            return ""
        held, self._held = self._held, ""
        return held + self._utf8.decode(b"", final=not self.pending)

    def _tail(self, text: str) -> int:
        """Where the longest tail of `text` begins that a stop string begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
