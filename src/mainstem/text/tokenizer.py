"""Three tokenizers with one face: byte-level BPE, characters, bytes.

Every one of them is lossless for the text it knows, keeps `<|endoftext|>` in a user's text as text, and is one JSON
file. The end-of-text token is the last id of those made here.
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
"""Tokens of a vocabulary, at most."""

PROBE = "a 가\n"
KEEP_TEXT = ("NFC",)
"""Normalizers that write the same characters in another way."""

# GPT-2's pattern, which other programs know by its name, but for two things: a mark stays with its letter, and no piece
# is longer than its bound, since BPE's time grows faster than a piece, and its memory with the number of long ones.
# A non-space character followed by white space is always a boundary; `corpus` cuts long texts there and nowhere else.
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
    """Text to ids and back. `vocab_size` counts the end-of-text id."""

    kind: str
    vocab_size: int
    end_of_text: str = END_OF_TEXT  # the name of the token that ends a text
    eot_id: int | None  # its id; None only for a foreign tokenizer that has no such token
    token_bytes: list[bytes]  # the raw bytes of each id; b"" for special ids

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts, one text after the other, and how many each has: (N,) and (len(texts),) integers.

        None of them is special. DataError for text that this tokenizer cannot write.
        """

    @property
    @abstractmethod
    def file(self) -> str:
        """The text of the saved file."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text, none of them special."""
        return self.encode_batch([text])[0].tolist()

    def unknown(self, text: str) -> set[str]:
        """The characters of `text` that `encode` refuses; none where every byte has a token."""
        return set()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`: exact, though not always whole characters. DataError for an id out of range."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise DataError(f"token id {i} is outside the tokenizer's 0..{self.vocab_size - 1}; was it another's?")
        return b"".join([self.token_bytes[i] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, with U+FFFD for bytes that make no character."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Write one JSON file, the same bytes each time; whole or not at all."""
        write_text(Path(path), self.file)

    @cached_property
    def hash(self) -> str:
        """The sha256 (hex) of the bytes that `save` writes."""
        return hashlib.sha256(self.file.encode()).hexdigest()


class BPE(Tokenizer):
    """Byte-level BPE, run by the `tokenizers` library from its own file format (`tokenizer.json`).

    One key more may be in the file: `end_of_text`, the name of the token that ends a text, if that is not the usual.
    """

    kind = "bpe"

    def __init__(self, file: str):
        """`file` is the text of a tokenizer.json; DataError unless it is a byte-level BPE."""
        self._text = file  # kept as it came, so that `hash` outlives a new version of the library
        said = json.loads(file)
        self.end_of_text = said.pop("end_of_text", END_OF_TEXT)
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            if said["model"].get("type") == "BPE" and said["model"].get(name):  # the library aborts on some of these
                raise DataError(f"a {name} marks its tokens, which are bytes; it should be empty")
        self._inner = tokenizers.Tokenizer.from_str(json.dumps(said))
        self._inner.encode_special_tokens = True  # a user's "<|endoftext|>" is thirteen characters, not a token
        self._inner.no_truncation()
        self._inner.no_padding()
        vocabulary = self._inner.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        if self.vocab_size > MOST:
            raise DataError(f"an id of {self.vocab_size - 1:,}; ids are below {MOST:,}")
        if len(set(vocabulary.values())) < len(vocabulary):
            raise DataError("two of its tokens have one id; each id is one token's")
        self.eot_id = vocabulary.get(self.end_of_text)
        read = json.loads(self._inner.to_str())
        self.added = {token["id"]: (token["content"], token["special"]) for token in read["added_tokens"]}
        """Tokens that no merge makes, by id: as they are written, and whether they are special."""
        for token in said.get("added_tokens") or ():
            if self.added.get(token["id"], ("",))[0] != token["content"]:
                raise DataError(f"its added token {token['content']!r} cannot have id {token['id']}; ids have no gaps")
        self.token_bytes = _token_bytes(read, self.vocab_size)
        if PROBE.encode() not in self.decode_bytes(self.encode(PROBE)):  # its tokens are bytes, but not its pieces
            raise DataError("a BPE that does not split text into bytes first; only byte-level BPE can be used")

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts, and how many each has. Runs on all cores, and other threads of Python run meanwhile.

        DataError for a lone surrogate, which no UTF-8 can hold.
        """
        for text in texts:
            _utf8(text)
        try:
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:  # the library's own kind, for a pattern without end, is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"the tokenizer cannot split this text ({error}); use another tokenizer") from None
        lengths = _lengths(encodings)
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(ids, np.uint32, lengths.sum()), lengths

    @property
    def file(self) -> str:
        """The text that it was made from."""
        return self._text


class Characters(Tokenizer):
    """One id a character. A character outside the alphabet is an error, never dropped.

    Args:
        characters: the alphabet, in the order of its ids; in code-point order when it is made here.
        end_of_text: whether the next id ends a text; without it no id does.
    """

    kind = "char"

    def __init__(self, characters: str, end_of_text: bool = True):
        self._characters = characters
        self._ids = np.full(sys.maxunicode + 1, -1, np.int32)  # of each code point
        self._ids[_code_points(characters)] = np.arange(len(characters))
        self.vocab_size = len(characters) + end_of_text
        self.eot_id = len(characters) if end_of_text else None
        self.token_bytes = [character.encode() for character in characters] + [b""] * end_of_text

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts, and how many each has. DataError names the characters that the alphabet lacks."""
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
        """Its kind and alphabet."""
        ends = {} if self.eot_id is not None else {"end_of_text": False}
        return _own_file(kind=self.kind, characters=self._characters, **ends)


class Bytes(Tokenizer):
    """The id is the byte; 256 ends a text."""

    kind = "byte"
    vocab_size = 257
    eot_id = 256
    token_bytes = [bytes([i]) for i in range(256)] + [b""]

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The UTF-8 bytes of the texts, and how many each has. DataError for a lone surrogate."""
        encoded = [_utf8(text) for text in texts]
        return np.frombuffer(b"".join(encoded), np.uint8), _lengths(encoded)

    @property
    def file(self) -> str:
        """Its kind."""
        return _own_file(kind=self.kind)


def train(kind: str, texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer of `kind` made from `texts`: the same one for the same texts, on any machine.

    `vocab_size` (end of text included) is met exactly by `bpe` unless the texts are too short to hold that many pairs;
    the alphabet sets it for `char`, and it is 257 for `byte`. Callers compare with what they asked for.
    """
    if kind == "byte":
        return Bytes()
    if kind == "char":
        alphabet: set[str] = set()
        for text in texts:
            alphabet.update(text)
        return Characters("".join(sorted(alphabet)))
    if kind != "bpe":
        raise DataError(f"no tokenizer of kind {kind!r}: {nearest(kind, KINDS)}")
    vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    if vocab_size > MOST:
        raise DataError(f"vocab_size {vocab_size:,}: no text fills more than {MOST:,} pieces; lower it")
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
    """The tokenizer of a file that `save` or Hugging Face wrote. DataError if it is missing, corrupt or foreign."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
        content = json.loads(text)
    except OSError as error:
        raise DataError(f"{path}: no tokenizer can be read here ({error.strerror}); give a tokenizer.json") from None
    except ValueError as error:
        raise DataError(f"{path}: not a tokenizer file, for it is not JSON ({error})") from None
    try:
        if isinstance(content, dict) and "format" in content:
            return _from_own(content)
        return BPE(text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: not a tokenizer file that can be opened ({error})") from None


def _from_own(content: dict) -> Tokenizer:
    if content["format"] != FORMAT:
        raise DataError(f"format {content['format']!r} is not {FORMAT!r}; it is a later version's or no tokenizer")
    if content.get("kind") == "byte":
        return Bytes()
    characters, ends = content.get("characters"), content.get("end_of_text", True)
    sound = content.get("kind") == "char" and isinstance(ends, bool)
    if not sound or not isinstance(characters, str) or len(set(characters)) != len(characters):
        raise DataError(f"kind {content.get('kind')!r} with a damaged alphabet; train the tokenizer again")
    return Characters(characters, ends)


def _own_file(**fields: str | bool) -> str:
    return json.dumps({"format": FORMAT, **fields}, indent=1) + "\n"


def _token_bytes(content: dict, vocab_size: int) -> list[bytes]:
    """The raw bytes of each id of a tokenizer.json; DataError unless its tokens are written in the byte alphabet."""
    model = content["model"]
    if model["type"] != "BPE":
        raise DataError(f"a {model['type']} tokenizer; only byte-level BPE (GPT-2's kind) can be used")
    if model["dropout"]:
        raise DataError(f"a BPE with dropout {model['dropout']:g}, which gives other ids each time; set it to null")
    splits = content["pre_tokenizer"] or {}
    if any(each.get("add_prefix_space") for each in [splits, *splits.get("pretokenizers", [])]):
        raise DataError("add_prefix_space puts a space before every text; only false can be used")
    if (normalizer := content["normalizer"]) is not None and normalizer["type"] not in KEEP_TEXT:
        raise DataError(f"a normalizer of type {normalizer['type']} changes the text; only {KEEP_TEXT[0]} can be used")
    for token in content["added_tokens"]:
        if not token["special"] and (token.get("lstrip") or token.get("rstrip")):
            raise DataError(f"its added token {token['content']!r} takes the spaces beside it (lstrip, rstrip)")
    byte_of = byte_alphabet()
    added = {token["id"]: token for token in content["added_tokens"]}
    table = [b""] * vocab_size
    for token, i in model["vocab"].items():
        if i not in added:
            try:
                table[i] = bytes(byte_of[character] for character in token)
            except KeyError:
                raise DataError(f"token {i} is {token!r}, not bytes; only byte-level BPE can be used") from None
    for i, token in added.items():
        table[i] = b"" if token["special"] else token["content"].encode()
    missing = byte_of.keys() - model["vocab"].keys()
    if missing:
        raise DataError(f"the vocabulary lacks {len(missing)} of the 256 bytes, so some text would be lost")
    return table


def spelled(piece: bytes) -> str:
    """Bytes as GPT-2's files write them."""
    return "".join(_SPELLING[byte] for byte in piece)


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in GPT-2's files, to that byte; in the order of bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return dict(sorted(found.items(), key=lambda item: item[1]))


_SPELLING = list(byte_alphabet())


def _lengths(rows: Sequence[Sized]) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int64, len(rows))


def _code_points(text: str) -> np.ndarray:
    """(N,) uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _utf8(text: str) -> bytes:
    """The bytes of a text. DataError for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        what = "half of a UTF-16 pair, which no text can hold alone"
        if "\udc80" <= found <= "\udcff":  # how Python keeps a byte of an argument that it could not decode
            what = f"the byte {ord(found) - 0xDC00:#04x}, which is not UTF-8 here"
        raise DataError(f"character {error.start} is {what}; the text was cut or wrongly decoded") from None
