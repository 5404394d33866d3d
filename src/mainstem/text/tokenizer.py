"""Three tokenizers with one interface: byte-level BPE, characters, bytes.

Each is lossless for text in its vocabulary, encodes `<|endoftext|>` in a text as plain characters, and is saved as one
JSON file. The end-of-text token is the last id of a tokenizer that `train` returns.
"""

import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Sized
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mainstem.atomic import write_text
from mainstem.errors import DataError, nearest

END_OF_TEXT = "<|endoftext|>"
FORMAT = "mainstem-tokenizer/1"
KINDS = ("bpe", "char", "byte")
DEFAULT_VOCAB_SIZE = 8192
MOST = 1 << 24
"""The largest vocabulary size that is supported."""

PROBE = "a 가\n"
KEEP_TEXT = ("NFC",)
"""The supported normalizers, which change only how the same characters are encoded."""

# GPT-2's pattern with two changes: a combining mark stays with its letter, and the length of a piece is bounded, since
# BPE's time grows faster than linearly with the length, and its memory with the number of long pieces.
# A non-space character followed by white space is always a boundary; `corpus` cuts long texts only there.
PIECES = "|".join(
    [
        r"'(?:s|t|re|ve|m|ll|d)",
        r" ?\p{L}[\p{L}\p{M}]{0,31}",
        r" ?\p{N}{1,16}",
        r" ?[^\s\p{L}\p{N}]{1,16}",
        r"\s{1,16}(?!\S)",
        r"\s{1,16}",
    ]
)


class Tokenizer(ABC):
    """Base class of the tokenizers: text to ids and back. `vocab_size` includes the end-of-text id.

    >>> tokenizer = mainstem.text.tokenizer.load("tokenizer.json")
    >>> tokenizer.decode(tokenizer.encode("ROMEO:"))
    'ROMEO:'
    """

    kind: str
    vocab_size: int
    end_of_text: str = END_OF_TEXT  # the name of the token that ends a text
    eot_id: int | None  # the id of the end-of-text token; None for a tokenizer without one
    token_bytes: list[bytes]  # the raw bytes of each id; b"" for special ids

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts, concatenated, and the number of ids of each text: (N,) and (len(texts),) integers.

        No id is special. Raises DataError for text that this tokenizer cannot encode.
        """

    @property
    @abstractmethod
    def file(self) -> str:
        """The contents of the JSON file that `save` writes."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text; no id is special."""
        return self.encode_batch([text])[0].tolist()

    def unknown(self, text: str) -> set[str]:
        """The characters of `text` that are not in the vocabulary; always empty for byte-level tokenizers."""
        return set()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of `ids`, which may end inside a character. DataError for an id out of range."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise DataError(f"token id {i} is outside the tokenizer's 0..{self.vocab_size - 1}; is it another's?")
        return b"".join([self.token_bytes[i] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, with U+FFFD for bytes that are not valid UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Write the tokenizer to one JSON file, atomically and with reproducible bytes."""
        write_text(Path(path), self.file)

    @cached_property
    def hash(self) -> str:
        """The sha256 (hex) of the bytes that `save` writes."""
        return hashlib.sha256(self.file.encode()).hexdigest()


class BPE(Tokenizer):
    """Byte-level BPE, run by the `tokenizers` library from its file format (`tokenizer.json`).

    The file may have one more key: `end_of_text`, the name of the end-of-text token where it is not `<|endoftext|>`.
    """

    kind = "bpe"

    def __init__(self, file: str):
        """`file` is the text of a tokenizer.json; DataError unless it is a byte-level BPE."""
        self._text = file  # unchanged, so that `hash` does not depend on the version of the library
        content = json.loads(file)
        self.end_of_text = content.pop("end_of_text", END_OF_TEXT)
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):  # the library aborts on some of these
            if content["model"].get("type") == "BPE" and content["model"].get(name):
                raise DataError(f"{name} is not supported for byte-level BPE; it must be empty")
        self._inner = tokenizers.Tokenizer.from_str(json.dumps(content))
        self._inner.encode_special_tokens = True  # a user's "<|endoftext|>" is thirteen characters, not a token
        self._inner.no_truncation()
        self._inner.no_padding()
        vocabulary = self._inner.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        if self.vocab_size > MOST:
            raise DataError(f"token id {self.vocab_size - 1:,} is too large; ids must be below {MOST:,}")
        if len(set(vocabulary.values())) < len(vocabulary):
            raise DataError("two tokens have the same id; each token needs its own")
        self.eot_id = vocabulary.get(self.end_of_text)
        parsed = json.loads(self._inner.to_str())
        self.added = {token["id"]: (token["content"], token["special"]) for token in parsed["added_tokens"]}
        """The added tokens by id: their text, and whether they are special."""
        for token in content.get("added_tokens") or ():
            if self.added.get(token["id"], ("",))[0] != token["content"]:
                raise DataError(f"added token {token['content']!r} cannot have id {token['id']}; ids must have no gaps")
        self.token_bytes = _token_bytes(parsed, self.vocab_size)
        if PROBE.encode() not in self.decode_bytes(self.encode(PROBE)):  # tokens are bytes, pieces are not
            raise DataError("this BPE does not split text into bytes first; only byte-level BPE is supported")

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts, concatenated, and the number of ids of each text. Uses all cores and releases the GIL.

        Raises DataError for a lone surrogate, which UTF-8 cannot encode.
        """
        for text in texts:
            _utf8(text)
        try:
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:  # the library's PanicException is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"the tokenizer cannot split this text ({error}); use another tokenizer") from None
        lengths = _lengths(encodings)
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(ids, np.uint32, lengths.sum()), lengths

    @property
    def file(self) -> str:
        return self._text


class Characters(Tokenizer):
    """One id per character. A character outside the alphabet is an error, never dropped.

    Args:
        characters: the alphabet, in the order of ids.
        end_of_text: whether the next id is the end-of-text token.
    """

    kind = "char"

    def __init__(self, characters: str, end_of_text: bool = True):
        self._characters = characters
        self._ids = np.full(sys.maxunicode + 1, -1, np.int32)  # id of each code point, or -1
        self._ids[_code_points(characters)] = np.arange(len(characters))
        self.vocab_size = len(characters) + end_of_text
        self.eot_id = len(characters) if end_of_text else None
        self.token_bytes = [character.encode() for character in characters] + [b""] * end_of_text

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts, concatenated, and the number of each. DataError names unknown characters."""
        text = "".join(texts)
        ids = self._ids[_code_points(text)]
        if ids.min(initial=0) < 0:
            missing = sorted(self.unknown(text))
            raise DataError(
                f"{len(missing)} character(s) are not in this tokenizer's alphabet of {len(self._characters)}: "
                f"{', '.join(map(repr, missing[:8]))}; remove them, or use a tokenizer of kind bpe or byte"
            )
        return ids, _lengths(texts)

    def unknown(self, text: str) -> set[str]:
        """The characters of `text` outside the alphabet."""
        codes = _code_points(text)
        return {chr(code) for code in np.unique(codes[self._ids[codes] < 0])}

    @property
    def file(self) -> str:
        ends = {} if self.eot_id is not None else {"end_of_text": False}
        return _own_file(kind=self.kind, characters=self._characters, **ends)


class Bytes(Tokenizer):
    """One id per byte of UTF-8; id 256 is the end-of-text token."""

    kind = "byte"
    vocab_size = 257
    eot_id = 256
    token_bytes = [bytes([i]) for i in range(256)] + [b""]

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The UTF-8 bytes of the texts, concatenated, and the number of each. DataError for a lone surrogate."""
        encoded = [_utf8(text) for text in texts]
        return np.frombuffer(b"".join(encoded), np.uint8), _lengths(encoded)

    @property
    def file(self) -> str:
        return _own_file(kind=self.kind)


def train(kind: str, texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """Train a tokenizer of `kind` on `texts`. The result is the same on any machine.

    `vocab_size` includes the end-of-text token. A `bpe` may have fewer tokens if the texts have too few pairs; for
    `char` the alphabet sets the size, and for `byte` it is 257.

    >>> train("bpe", ["To be, or not to be"], vocab_size=260).vocab_size
    260
    """
    if kind == "byte":
        return Bytes()
    if kind == "char":
        alphabet: set[str] = set()
        for text in texts:
            alphabet.update(text)
        return Characters("".join(sorted(alphabet)))
    if kind != "bpe":
        raise DataError(f"kind: unknown value {kind!r}; {nearest(kind, KINDS)}")
    vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    if vocab_size > MOST:
        raise DataError(f"vocab_size {vocab_size:,}: at most {MOST:,} is supported; lower it")
    if vocab_size < 257:
        raise DataError(f"vocab_size {vocab_size}: a byte-level BPE needs at least 257 (256 bytes, end of text)")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([END_OF_TEXT])  # after training, so that its id is the last
    return BPE(inner.to_str(pretty=True))


def load(path: Path) -> Tokenizer:
    """Load a tokenizer file of mainstem or Hugging Face. DataError if it is missing, damaged or not supported."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
        content = json.loads(text)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a tokenizer.json") from None
    except ValueError as error:
        raise DataError(f"{path}: not a tokenizer file: not JSON ({error})") from None
    try:
        if isinstance(content, dict) and "format" in content:
            return _from_own(content)
        return BPE(text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: not a supported tokenizer file ({error})") from None


def _from_own(content: dict) -> Tokenizer:
    if content["format"] != FORMAT:
        raise DataError(f"format {content['format']!r} is not {FORMAT!r}; it is of a later version, or not a tokenizer")
    if content.get("kind") == "byte":
        return Bytes()
    characters, ends = content.get("characters"), content.get("end_of_text", True)
    valid = content.get("kind") == "char" and isinstance(ends, bool)
    if not valid or not isinstance(characters, str) or len(set(characters)) != len(characters):
        raise DataError(f"kind {content.get('kind')!r} with a damaged alphabet; train the tokenizer again")
    return Characters(characters, ends)


def _own_file(**fields: str | bool) -> str:
    return json.dumps({"format": FORMAT, **fields}, indent=1) + "\n"


def _token_bytes(content: dict, vocab_size: int) -> list[bytes]:
    """The raw bytes of each id of a tokenizer.json. DataError if the tokens are not in GPT-2's byte alphabet."""
    model = content["model"]
    if model["type"] != "BPE":
        raise DataError(f"{model['type']} tokenizers are not supported; only byte-level BPE (as GPT-2's) is")
    if model["dropout"]:
        raise DataError(f"BPE dropout {model['dropout']:g} is not supported, since ids would be random; set it to null")
    splits = content["pre_tokenizer"] or {}
    if any(each.get("add_prefix_space") for each in [splits, *splits.get("pretokenizers", [])]):
        raise DataError("add_prefix_space true is not supported; set it to false")
    if (normalizer := content["normalizer"]) is not None and normalizer["type"] not in KEEP_TEXT:
        raise DataError(f"normalizer {normalizer['type']} is not supported, for it changes the text; {KEEP_TEXT[0]} is")
    for token in content["added_tokens"]:
        if not token["special"] and (token.get("lstrip") or token.get("rstrip")):
            raise DataError(f"added token {token['content']!r}: lstrip and rstrip are not supported; set them to false")
    byte_of = byte_alphabet()
    added = {token["id"]: token for token in content["added_tokens"]}
    table = [b""] * vocab_size
    for token, i in model["vocab"].items():
        if i not in added:
            try:
                table[i] = bytes(byte_of[character] for character in token)
            except KeyError:
                raise DataError(f"token {i} is {token!r}, not bytes; only byte-level BPE is supported") from None
    for i, token in added.items():
        table[i] = b"" if token["special"] else token["content"].encode()
    missing = byte_of.keys() - model["vocab"].keys()
    if missing:
        raise DataError(f"the vocabulary lacks {len(missing)} of the 256 bytes, so some text could not be encoded")
    return table


def spelled(piece: bytes) -> str:
    """Bytes in GPT-2's byte alphabet, as tokenizer files store them."""
    return "".join(_SPELLING[byte] for byte in piece)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable character -> the byte that it stands for, in the order of bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return dict(sorted(alphabet.items(), key=lambda item: item[1]))


_SPELLING = list(byte_alphabet())


def _lengths(rows: Sequence[Sized]) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int64, len(rows))


def _code_points(text: str) -> np.ndarray:
    """The code points of a text, (N,) uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text. DataError for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        character = text[error.start]
        what = "a lone UTF-16 surrogate"
        if "\udc80" <= character <= "\udcff":  # surrogateescape: a byte of an argument that is not UTF-8
            what = f"the byte {ord(character) - 0xDC00:#04x}, which is not UTF-8 here"
        raise DataError(f"character {error.start} is {what}; the text was truncated or wrongly decoded") from None
