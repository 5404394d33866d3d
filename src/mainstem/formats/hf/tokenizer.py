"""Read and write the tokenizer files of a Hugging Face folder. No torch.

`tokenizer.json` describes a tokenizer completely. The older `vocab.json` and `merges.txt` imply GPT-2's pattern for
splitting text.
"""

import json
import re
from pathlib import Path
from typing import Any

from mainstem.atomic import read_json, to_json
from mainstem.errors import DataError, RunError
from mainstem.runs.folder import CONFIG
from mainstem.text import tokenizer as tokenizers
from mainstem.text.tokenizer import END_OF_TEXT, Tokenizer, byte_alphabet
from mainstem.text.tokens import TOKENIZER

VOCABULARY, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"
_PAIRS = ((VOCABULARY, MERGES), ("encoder.json", "vocab.bpe"))
"""The names of GPT-2's two files, by Hugging Face and by OpenAI."""
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""The pre-tokenizer that splits by GPT-2's pattern and then into bytes."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pattern as a regular expression, which some files contain."""
_PER_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
_BRACKETED = re.compile(r"[<\[].*[>\]]$")
"""The usual form of added tokens, which no merge produces."""
_CHANGE_IDS = ("add_prefix_space", "add_bos_token", "add_eos_token")
"""Settings that add tokens or spaces to every text."""


def read(folder: Path) -> Tokenizer | None:
    """Read the tokenizer of a folder; None if it has no tokenizer files. DataError for one that is not supported.

    In a folder with a model, settings that add tokens to every text are refused, since ids would differ.
    """
    named, settings = _object(folder / SPECIAL), _object(folder / SETTINGS)
    file, with_model = folder / TOKENIZER, (folder / CONFIG).is_file()
    for name in _CHANGE_IDS:
        if with_model and settings.get(name):
            raise DataError(f"{folder / SETTINGS}: {name} is not supported, it adds to every text; set it to false")
    if file.is_file():
        if with_model and _adds(_object(file).get("post_processor")):
            raise DataError(f"{file}: a post_processor that adds tokens to every text is not supported; remove it")
        tokenizer = open_file(file)
    elif (names := _names(folder)) is None:
        return None
    else:
        tokenizer = _from_pairs(folder, names, _special(named | settings))
    where = folder / (SETTINGS if "eos_token" in settings else SPECIAL)
    return _with_end(tokenizer, _text((named | settings).get("eos_token")), where)


def _adds(post_processor: Any) -> bool:
    """Whether a post-processor adds tokens to a text."""
    text = json.dumps(post_processor)
    return '"SpecialToken"' in text or '"cls"' in text


def _names(folder: Path) -> tuple[str, str] | None:
    """The names of the folder's two files; None if there are none. DataError for one without the other."""
    for names in _PAIRS:
        missing = [name for name in names if not (folder / name).is_file()]
        if len(missing) == 1:
            present = next(name for name in names if name not in missing)
            raise DataError(f"{folder / missing[0]}: not found beside {present}; both are needed, or a {TOKENIZER}")
        if not missing:
            return names
    return None


def has_files(folder: Path) -> bool:
    """Whether a folder has tokenizer files, valid or not."""
    return any((folder / name).is_file() for name in (TOKENIZER, *(name for names in _PAIRS for name in names)))


def open_file(file: Path) -> Tokenizer:
    """Read a tokenizer.json, also one that `content` wrote for bytes or characters."""
    fields = _json(file)
    if isinstance(fields, dict):
        if fields == json.loads(content(tokenizers.Bytes())):
            return tokenizers.Bytes()
        model, splits = fields.get("model"), fields.get("pre_tokenizer")
        if isinstance(model, dict) and model.get("type") == "WordLevel" and splits == _PER_CHARACTER:
            return _characters(model.get("vocab"), file)
    return tokenizers.load(file)


def _json(file: Path) -> Any:
    try:
        return read_json(file)
    except RunError as error:
        raise DataError(str(error)) from None


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    fields = _json(file) if file.is_file() else {}
    if not isinstance(fields, dict):
        raise DataError(f"{file}: not valid settings; it should be one JSON object")
    return fields


def _text(token: Any) -> str | None:
    """The text of a special token in settings, where it is a string or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _special(settings: dict[str, Any]) -> set[str]:
    """The special tokens of the settings; other added tokens are matched in a text literally."""
    lists = (settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens"))
    named = [value for name, value in settings.items() if name.endswith("_token")]
    many = [token for each in lists if isinstance(each, list) for token in each]
    decoder = settings.get("added_tokens_decoder")
    rows = [row for row in decoder.values() if isinstance(row, dict)] if isinstance(decoder, dict) else []
    texts = map(_text, [*named, *many, *(row for row in rows if row.get("special"))])
    return {END_OF_TEXT, *filter(None, texts)}


def _with_end(tokenizer: Tokenizer, end: str | None, file: Path) -> Tokenizer:
    """The tokenizer with `end` as its end-of-text token."""
    if end in (None, tokenizer.end_of_text) or not isinstance(tokenizer, tokenizers.BPE):
        return tokenizer
    fields = json.loads(tokenizer.file) | {"end_of_text": end}
    ending = tokenizers.BPE(json.dumps(fields, ensure_ascii=False, indent=2))
    if ending.eot_id is None:
        raise DataError(f"{file}: eos_token {end!r} is not in the vocabulary; name a token that is")
    return ending


def _characters(vocabulary: Any, file: Path) -> Tokenizer:
    ids = vocabulary if isinstance(vocabulary, dict) else {}
    characters = [each for each in ids if each != END_OF_TEXT]
    ends = END_OF_TEXT in ids
    valid = all(len(each) == 1 and not "\ud800" <= each <= "\udfff" for each in characters)
    valid &= [*ids] == characters + [END_OF_TEXT] * ends and all(type(i) is int for i in ids.values())
    if not valid or not characters or [*ids.values()] != [*range(len(ids))]:
        raise DataError(f"{file}: not one id per character from 0 on; only byte-level BPE and characters are supported")
    return tokenizers.Characters("".join(characters), ends)


def _ids(file: Path) -> dict[str, int]:
    """Read a JSON object of tokens and their ids. DataError for a file that holds something else."""
    ids = _json(file)
    valid = isinstance(ids, dict) and all(type(i) is int and 0 <= i < tokenizers.MOST for i in ids.values())
    if not valid or len(set(ids.values())) < len(ids):
        raise DataError(f"{file}: not a vocabulary; it should be one JSON object of tokens with distinct ids from 0 on")
    return ids


def _from_pairs(folder: Path, names: tuple[str, str], special: set[str]) -> Tokenizer:
    vocabulary, merges = (folder / name for name in names)
    ids = _ids(vocabulary)
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{merges}: not readable ({error}); restore the file from a copy") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#version") or not line.strip():
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not {pair[0], pair[1], "".join(pair)} <= ids.keys():
            raise DataError(f"{merges}, line {number}: {line!r} is not a pair of tokens of {vocabulary.name}")
        pairs.append(pair)
    merged = {"".join(pair) for pair in pairs} | special
    if lost := [token for token in ids if len(token) > 1 and token not in merged and not _BRACKETED.match(token)]:
        raise DataError(f"{merges}: no merge produces {lost[0]!r}, a token of {vocabulary.name}; download both again")
    added = {END_OF_TEXT: ids[END_OF_TEXT]} if END_OF_TEXT in ids else {}
    added |= _ids(folder / ADDED) if (folder / ADDED).is_file() else {}
    named = {token: ids[token] for token in special & ids.keys()}
    file = _file(_bpe(ids, pairs), _BYTE_LEVEL, {"type": "ByteLevel"}, named | added, special)
    try:
        return tokenizers.BPE(file)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{vocabulary}: not a supported tokenizer ({error})") from None


def _bpe(ids: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": ids, "merges": merges,
    }  # fmt: skip


def _file(
    model: dict[str, Any], splits: dict[str, Any], decoder: dict[str, Any], added: dict[str, int], special: set[str]
) -> str:
    """The contents of a tokenizer.json."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    if decoder["type"] == "ByteLevel":
        decoder = {**decoder, "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    fields = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": name, **plain, "special": name in special} for name, i in added.items()],
        "normalizer": None, "pre_tokenizer": splits, "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip
    return json.dumps(fields, ensure_ascii=False, indent=2)


def content(tokenizer: Tokenizer) -> str:
    """The contents of a `tokenizer.json` with the same ids, for any tokenizer.

    A character outside the alphabet is an error there too, since the required unknown token has no id.
    """
    if isinstance(tokenizer, tokenizers.BPE):
        fields = json.loads(tokenizer.file)
        plain = fields | dict.fromkeys(("truncation", "padding"))  # which are not supported
        plain.pop("end_of_text", None)  # mainstem's key; `write` puts it into tokenizer_config.json
        if _adds(fields.get("post_processor")):
            plain["post_processor"] = None
        changed = any(fields.get(name) != plain.get(name) for name in (*fields, *plain))
        return json.dumps(plain, ensure_ascii=False, indent=2) if changed else tokenizer.file
    end = {} if tokenizer.eot_id is None else {END_OF_TEXT: tokenizer.eot_id}
    if tokenizer.kind == "byte":
        splits = {**_BYTE_LEVEL, "use_regex": False}
        return _file(_bpe(byte_alphabet() | end, []), splits, {"type": "ByteLevel"}, end, {END_OF_TEXT})
    ids = {piece.decode(): i for i, piece in enumerate(tokenizer.token_bytes) if piece} | end
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "<|unknown|>"}
    return _file(model, _PER_CHARACTER, {"type": "Fuse"}, end, {END_OF_TEXT})


def added(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    """The added tokens by id: their text, and whether they are special."""
    if isinstance(tokenizer, tokenizers.BPE):
        return tokenizer.added
    return {} if tokenizer.eot_id is None else {tokenizer.eot_id: (END_OF_TEXT, True)}


def pairs(tokenizer: Tokenizer) -> tuple[dict[str, int], list[str]] | None:
    """The contents of GPT-2's two files, vocabulary and merges; None if they do not suffice."""
    fields, plain = json.loads(content(tokenizer)), {(END_OF_TEXT, True)}
    splits = fields["pre_tokenizer"] or {}
    if fields["normalizer"] is not None or fields["model"]["type"] != "BPE" or fields["model"].get("ignore_merges"):
        return None
    if (
        set(added(tokenizer).values()) != plain
        or tokenizer.end_of_text != END_OF_TEXT
        or any(splits.get(name) != _BYTE_LEVEL[name] for name in ("type", "use_regex"))
    ):
        return None
    return fields["model"]["vocab"] | {END_OF_TEXT: tokenizer.eot_id}, merges(tokenizer)


def unlike_gpt2(tokenizer: Tokenizer) -> str | None:
    """Why ids may differ from those by GPT-2's pattern and the merges; None if only marks and long runs differ.

    Without merges the pattern does not matter.
    """
    fields = json.loads(content(tokenizer))
    splits, model = fields["pre_tokenizer"] or {}, fields["model"]
    first = (splits.get("pretokenizers") or [splits])[0]
    if fields["normalizer"] is not None:
        return f"a normalizer ({fields['normalizer']['type']})"
    if model.get("ignore_merges"):
        return "tokens that need no merges (ignore_merges)"
    if any(token.get("single_word") for token in fields["added_tokens"]):
        return "tokens that match whole words only (single_word)"
    known = first.get("use_regex") or first.get("pattern") in ({"Regex": tokenizers.PIECES}, {"Regex": _GPT2})
    if merges(tokenizer) and not known:
        return "another pattern"
    return None


def merges(tokenizer: Tokenizer) -> list[str]:
    """The merges of a byte-level BPE in order, each as two tokens with a space between; empty for bytes."""
    pairs = json.loads(content(tokenizer))["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]


def write(folder: Path, tokenizer: Tokenizer, n_ctx: int) -> None:
    """Write the tokenizer files that `AutoTokenizer` loads."""
    (folder / TOKENIZER).write_text(content(tokenizer), encoding="utf-8", newline="\n")
    both = pairs(tokenizer)
    if both is not None:
        ids, lines = both
        (folder / VOCABULARY).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
        (folder / MERGES).write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8", newline="\n")
    names = ("bos_token", "eos_token")
    ends = {} if tokenizer.eot_id is None else dict.fromkeys(names, tokenizer.end_of_text)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast" if both is None else "GPT2Tokenizer",
        "add_prefix_space": False, "clean_up_tokenization_spaces": False, "model_max_length": n_ctx, **ends,
    }  # fmt: skip
    (folder / SETTINGS).write_text(to_json(settings), encoding="utf-8")
