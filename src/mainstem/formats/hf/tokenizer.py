"""The tokenizer files of a Hugging Face folder, to a tokenizer of ours and back. No torch.

`tokenizer.json` says how text is split and is enough; GPT-2's older `vocab.json` and `merges.txt` leave that to GPT-2's
own pattern.
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
"""GPT-2's two files as Hugging Face calls them, and as OpenAI did."""
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""GPT-2's pattern, then bytes."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pattern, where a file writes it out."""
_PER_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
_BRACKETED = re.compile(r"[<\[].*[>\]]$")
"""How trainers write what they add to a vocabulary, which no merge makes."""
_CHANGE_IDS = ("add_prefix_space", "add_bos_token", "add_eos_token")
"""Settings that put something before or after every text."""


def read(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where it has no such file. DataError for one that cannot be used as it is.

    Beside a model it must give the ids that the model was trained on, so what adds to every text is refused there.
    """
    named, settings = _object(folder / SPECIAL), _object(folder / SETTINGS)
    file, with_model = folder / TOKENIZER, (folder / CONFIG).is_file()
    for name in _CHANGE_IDS:
        if with_model and settings.get(name):
            raise DataError(f"{folder / SETTINGS}: {name} adds to every text, which is not done here; set it to false")
    if file.is_file():
        if with_model and _adds(_object(file).get("post_processor")):
            raise DataError(f"{file}: its post_processor adds to every text, which is not done here; remove it")
        found = open_file(file)
    elif (names := _names(folder)) is None:
        return None
    else:
        found = _from_pairs(folder, names, _special(named | settings))
    where = folder / (SETTINGS if "eos_token" in settings else SPECIAL)
    return _ending(found, _text((named | settings).get("eos_token")), where)


def _adds(post_processor: Any) -> bool:
    """Whether it puts tokens before or after a text."""
    text = json.dumps(post_processor)
    return '"SpecialToken"' in text or '"cls"' in text


def _names(folder: Path) -> tuple[str, str] | None:
    """What the two files are called there; None where neither is. DataError for one without the other."""
    for names in _PAIRS:
        missing = [name for name in names if not (folder / name).is_file()]
        if len(missing) == 1:
            there = next(name for name in names if name not in missing)
            raise DataError(f"{folder / missing[0]}: not found beside {there}; both are needed, or a {TOKENIZER}")
        if not missing:
            return names
    return None


def has_files(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer; they may still be damaged."""
    return any((folder / name).is_file() for name in (TOKENIZER, *(name for names in _PAIRS for name in names)))


def open_file(file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, those that `content` made for bytes and characters included."""
    said = _json(file)
    if isinstance(said, dict):
        if said == json.loads(content(tokenizers.Bytes())):
            return tokenizers.Bytes()
        model = said.get("model")
        if isinstance(model, dict) and model.get("type") == "WordLevel" and said.get("pre_tokenizer") == _PER_CHARACTER:
            return _characters(model.get("vocab"), file)
    return tokenizers.load(file)


def _json(file: Path) -> Any:
    try:
        return read_json(file)
    except RunError as error:
        raise DataError(str(error)) from None


def _object(file: Path) -> dict[str, Any]:
    """The object in a file that need not be there."""
    said = _json(file) if file.is_file() else {}
    if not isinstance(said, dict):
        raise DataError(f"{file}: no settings; it should be one JSON object")
    return said


def _text(token: Any) -> str | None:
    """A special token as settings have it, its text or an object with it."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _special(settings: dict[str, Any]) -> set[str]:
    """The tokens that settings call special; all others that were added are matched in a text as they are written."""
    lists = (settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens"))
    named = [value for name, value in settings.items() if name.endswith("_token")]
    many = [token for each in lists if isinstance(each, list) for token in each]
    decoder = settings.get("added_tokens_decoder")
    rows = [row for row in decoder.values() if isinstance(row, dict)] if isinstance(decoder, dict) else []
    found = map(_text, [*named, *many, *(row for row in rows if row.get("special"))])
    return {END_OF_TEXT, *filter(None, found)}


def _ending(found: Tokenizer, end: str | None, file: Path) -> Tokenizer:
    """The tokenizer, texts ended by the token that the folder names."""
    if end in (None, found.end_of_text) or not isinstance(found, tokenizers.BPE):
        return found
    ending = tokenizers.BPE(json.dumps({**json.loads(found.file), "end_of_text": end}, ensure_ascii=False, indent=2))
    if ending.eot_id is None:
        raise DataError(f"{file}: eos_token {end!r} is no token of the vocabulary; name one that is")
    return ending


def _characters(vocabulary: Any, file: Path) -> Tokenizer:
    ids = vocabulary if isinstance(vocabulary, dict) else {}
    characters = [each for each in ids if each != END_OF_TEXT]
    ends = END_OF_TEXT in ids
    sound = all(len(each) == 1 and not "\ud800" <= each <= "\udfff" for each in characters)
    sound &= [*ids] == characters + [END_OF_TEXT] * ends and all(type(i) is int for i in ids.values())
    if not sound or not characters or [*ids.values()] != [*range(len(ids))]:
        raise DataError(f"{file}: not one id a character, from 0 on; only byte-level BPE or characters can be used")
    return tokenizers.Characters("".join(characters), ends)


def _ids(file: Path) -> dict[str, int]:
    """Tokens and the id of each. DataError for a file that holds something else."""
    said = _json(file)
    sound = isinstance(said, dict) and all(type(i) is int and 0 <= i < tokenizers.MOST for i in said.values())
    if not sound or len(set(said.values())) < len(said):
        raise DataError(f"{file}: no tokens; it should be one JSON object, each with an id of its own, from 0 on")
    return said


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
            raise DataError(f"{merges}, line {number}: {line!r} is no pair of tokens of {vocabulary.name}")
        pairs.append(pair)
    made = {"".join(pair) for pair in pairs} | special
    if lost := [token for token in ids if len(token) > 1 and token not in made and not _BRACKETED.match(token)]:
        raise DataError(f"{merges}: no line makes {lost[0]!r}, a token of {vocabulary.name}; fetch both files again")
    added = {END_OF_TEXT: ids[END_OF_TEXT]} if END_OF_TEXT in ids else {}
    added |= _ids(folder / ADDED) if (folder / ADDED).is_file() else {}
    named = {token: ids[token] for token in special & ids.keys()}
    file = _file(_bpe(ids, pairs), _BYTE_LEVEL, {"type": "ByteLevel"}, named | added, special)
    try:
        return tokenizers.BPE(file)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{vocabulary}: not a tokenizer that can be opened ({error})") from None


def _bpe(ids: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": ids, "merges": merges,
    }  # fmt: skip


def _file(
    model: dict[str, Any], splits: dict[str, Any], decoder: dict[str, Any], added: dict[str, int], special: set[str]
) -> str:
    """The text of a tokenizer.json."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    if decoder["type"] == "ByteLevel":
        decoder = {**decoder, "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    said = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": name, **plain, "special": name in special} for name, i in added.items()],
        "normalizer": None, "pre_tokenizer": splits, "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip
    return json.dumps(said, ensure_ascii=False, indent=2)


def content(tokenizer: Tokenizer) -> str:
    """The text of a `tokenizer.json` that gives the same ids: a BPE's own; made for characters and for bytes.

    A character outside the alphabet is an error there too: the token for it, which the library asks for, has no id.
    """
    if isinstance(tokenizer, tokenizers.BPE):
        said = json.loads(tokenizer.file)
        plain = said | dict.fromkeys(("truncation", "padding"))  # which are not done here
        plain.pop("end_of_text", None)  # no other program knows it; `write` says it in its own way
        if _adds(said.get("post_processor")):
            plain["post_processor"] = None
        changed = any(said.get(name) != plain.get(name) for name in (*said, *plain))
        return json.dumps(plain, ensure_ascii=False, indent=2) if changed else tokenizer.file
    end = {} if tokenizer.eot_id is None else {END_OF_TEXT: tokenizer.eot_id}
    if tokenizer.kind == "byte":
        splits = {**_BYTE_LEVEL, "use_regex": False}
        return _file(_bpe(byte_alphabet() | end, []), splits, {"type": "ByteLevel"}, end, {END_OF_TEXT})
    ids = {piece.decode(): i for i, piece in enumerate(tokenizer.token_bytes) if piece} | end
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "<|unknown|>"}
    return _file(model, _PER_CHARACTER, {"type": "Fuse"}, end, {END_OF_TEXT})


def added(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    """The tokens that no merge makes, by id: as they are written, and whether they are special."""
    if isinstance(tokenizer, tokenizers.BPE):
        return tokenizer.added
    return {} if tokenizer.eot_id is None else {tokenizer.eot_id: (END_OF_TEXT, True)}


def pairs(tokenizer: Tokenizer) -> tuple[dict[str, int], list[str]] | None:
    """GPT-2's own two files, ids by token and merges, a line each; None for a tokenizer that they do not tell whole."""
    said, plain = json.loads(content(tokenizer)), {(END_OF_TEXT, True)}
    splits = said["pre_tokenizer"] or {}
    if said["normalizer"] is not None or said["model"]["type"] != "BPE" or said["model"].get("ignore_merges"):
        return None
    if (
        set(added(tokenizer).values()) != plain
        or tokenizer.end_of_text != END_OF_TEXT
        or any(splits.get(name) != _BYTE_LEVEL[name] for name in ("type", "use_regex"))
    ):
        return None
    return said["model"]["vocab"] | {END_OF_TEXT: tokenizer.eot_id}, merges(tokenizer)


def unlike_gpt2(tokenizer: Tokenizer) -> str | None:
    """What makes it give other ids than GPT-2's pattern and its merges do; None where only marks and long pieces do.

    Where nothing is merged, no pattern matters.
    """
    said = json.loads(content(tokenizer))
    splits, model = said["pre_tokenizer"] or {}, said["model"]
    first = (splits.get("pretokenizers") or [splits])[0]
    if said["normalizer"] is not None:
        return f"a normalizer ({said['normalizer']['type']})"
    if model.get("ignore_merges"):
        return "whole words besides (ignore_merges)"
    if any(token.get("single_word") for token in said["added_tokens"]):
        return "tokens that are found as whole words alone (single_word)"
    known = first.get("use_regex") or first.get("pattern") in ({"Regex": tokenizers.PIECES}, {"Regex": _GPT2})
    if merges(tokenizer) and not known:
        return "a pattern of its own"
    return None


def merges(tokenizer: Tokenizer) -> list[str]:
    """The merges of a byte-level BPE, first to last, each its two tokens and a space between; [] for bytes."""
    found = json.loads(content(tokenizer))["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in found]


def write(folder: Path, tokenizer: Tokenizer, n_ctx: int) -> None:
    """Write the files that `AutoTokenizer` opens."""
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
