"""The tokenizer files of a Hugging Face folder, to a tokenizer of ours and back. No torch.

`tokenizer.json` says how text is split and is enough; GPT-2's older `vocab.json` and `merges.txt` leave that to GPT-2's
own pattern.
"""

import json
import re
from pathlib import Path
from typing import Any

from mainstem.durable import read_json, to_json
from mainstem.errors import DataError, RunError
from mainstem.text import tokenizer as tokenizers
from mainstem.text.tokenizer import END_OF_TEXT, Tokenizer, byte_alphabet

TOKENIZER, VOCABULARY, MERGES, ADDED = "tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"
SETTINGS = "tokenizer_config.json"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""GPT-2's pattern, then bytes."""
_BRACKETED = re.compile(r"[<\[].*[>\]]$")
"""How trainers write what they add to a vocabulary, which no merge makes."""
_PER_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}


def read(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where it has no such file. DataError for one that cannot be used as it is."""
    _refuse_settings(folder / SETTINGS)
    file = folder / TOKENIZER
    if file.is_file():
        return _characters(file) or tokenizers.load(file)
    present = [name for name in (VOCABULARY, MERGES) if (folder / name).is_file()]
    if not present:
        return None
    for name in (VOCABULARY, MERGES):
        if name not in present:
            raise DataError(f"{folder / name}: not found beside {present[0]}; both are needed, or a {TOKENIZER}")
    return _from_pairs(folder)


def _refuse_settings(file: Path) -> None:
    """DataError for what would make other ids than the tokenizer's own file does."""
    if file.is_file():
        said = _json(file)
        if not isinstance(said, dict):
            raise DataError(f"{file}: not settings; it should be one JSON object")
        if said.get("add_prefix_space") not in (None, False):
            raise DataError(f"{file}: add_prefix_space puts a space before every text; only false can be opened")


def _json(file: Path) -> Any:
    try:
        return read_json(file)
    except RunError as error:
        raise DataError(str(error)) from None


def _characters(file: Path) -> Tokenizer | None:
    """The character tokenizer of a file that `content` wrote; None for any other file."""
    said = _json(file)
    model = said.get("model") if isinstance(said, dict) else None
    if not isinstance(model, dict) or model.get("type") != "WordLevel" or said.get("pre_tokenizer") != _PER_CHARACTER:
        return None
    vocabulary = model.get("vocab")
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


def _from_pairs(folder: Path) -> Tokenizer:
    ids, merges = _ids(folder / VOCABULARY), folder / MERGES
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
            raise DataError(f"{merges}, line {number}: {line!r} is no pair of tokens of {VOCABULARY}")
        pairs.append(pair)
    made = {"".join(pair) for pair in pairs}
    if lost := [token for token in ids if len(token) > 1 and token not in made and not _BRACKETED.match(token)]:
        raise DataError(f"{merges}: no line makes {lost[0]!r}, a token of {VOCABULARY}; fetch both files again")
    added = _ids(folder / ADDED) if (folder / ADDED).is_file() else {}
    special = {END_OF_TEXT: ids[END_OF_TEXT]} if END_OF_TEXT in ids else {}
    file = _file(_bpe(ids, pairs), _BYTE_LEVEL, {"type": "ByteLevel"}, special | added)
    try:
        return tokenizers.BPE(file)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{folder / VOCABULARY}: not a tokenizer that can be opened ({error})") from None


def _bpe(ids: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": ids, "merges": merges,
    }  # fmt: skip


def _file(model: dict[str, Any], splits: dict[str, Any], decoder: dict[str, Any], special: dict[str, int]) -> str:
    """The text of a tokenizer.json."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    if decoder["type"] == "ByteLevel":
        decoder = {**decoder, "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    said = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": token, **plain} for token, i in special.items()],
        "normalizer": None, "pre_tokenizer": splits, "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip
    return json.dumps(said, ensure_ascii=False, indent=2)


def content(tokenizer: Tokenizer) -> str:
    """The text of a `tokenizer.json` that gives the same ids: a BPE's own; made for characters and for bytes.

    A character outside the alphabet is an error there too: the token for it, which the library asks for, has no id.
    """
    if isinstance(tokenizer, tokenizers.BPE):
        return tokenizer.file
    special = {} if tokenizer.eot_id is None else {END_OF_TEXT: tokenizer.eot_id}
    if tokenizer.kind == "byte":
        splits = {**_BYTE_LEVEL, "use_regex": False}
        ids = dict(sorted(byte_alphabet().items(), key=lambda item: item[1]))
        return _file(_bpe(ids | special, []), splits, {"type": "ByteLevel"}, special)
    ids = {piece.decode(): i for i, piece in enumerate(tokenizer.token_bytes) if piece} | special
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "<|unknown|>"}
    return _file(model, _PER_CHARACTER, {"type": "Fuse"}, special)


def pairs(tokenizer: Tokenizer) -> tuple[dict[str, int], list[str]] | None:
    """GPT-2's own two files, ids by token and merges, a line each; None for a tokenizer that splits otherwise."""
    said = json.loads(content(tokenizer))
    splits = said["pre_tokenizer"] or {}
    plain = said["normalizer"] is None and said["model"]["type"] == "BPE"
    if not plain or any(splits.get(name) != _BYTE_LEVEL[name] for name in ("type", "add_prefix_space", "use_regex")):
        return None
    ids = dict(said["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in said["added_tokens"]}
    return ids, merges(tokenizer)


def is_near_gpt2(tokenizer: Tokenizer) -> bool:
    """Whether GPT-2's pattern gives its ids: it is its own, or ours, which only marks and very long pieces tell apart.

    Where nothing is merged, no pattern matters.
    """
    splits = json.loads(content(tokenizer))["pre_tokenizer"] or {}
    first = (splits.get("pretokenizers") or [{}])[0]
    ours = first.get("pattern") == {"Regex": tokenizers.PIECES}
    return ours or not merges(tokenizer) or pairs(tokenizer) is not None


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
    ends = {} if tokenizer.eot_id is None else dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast" if both is None else "GPT2Tokenizer",
        "add_prefix_space": False, "clean_up_tokenization_spaces": False, "model_max_length": n_ctx, **ends,
    }  # fmt: skip
    (folder / SETTINGS).write_text(to_json(settings), encoding="utf-8")
