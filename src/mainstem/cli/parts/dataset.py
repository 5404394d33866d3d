"""Text to token files, for `data` and `train`; and the tokenizer that `--tokenizer` names."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mainstem.cli.parts.arguments import TextOptions
from mainstem.cli.parts.screen import Screen
from mainstem.formats.run import tokenizer as open_tokenizer
from mainstem.text import tokenizer as tokenizers
from mainstem.text import tokens


def given_tokenizer(name: str) -> tokenizers.Tokenizer | None:
    """The tokenizer that `--tokenizer` names, or None for a kind that is to be trained."""
    return None if name in tokenizers.KINDS else open_tokenizer(name)


def prepare(
    files: Sequence[str],
    val: Sequence[str],
    out: Path,
    *,
    reading: TextOptions,
    tokenizer: str,
    vocab_size: int,
    screen: Screen,
    check: Callable[[], None],
) -> tokens.Prepared:
    """`tokens.prepare` under a bar; `tokenizer` is a kind or a name, `vocab_size` the target of a BPE."""
    existing = given_tokenizer(tokenizer)
    with screen.bar("reading", 1) as bar:
        return tokens.prepare(
            reading.source(files),
            out,
            tokenizer=existing,
            kind=tokenizer if existing is None else "bpe",
            vocab_size=vocab_size if tokenizer == "bpe" else None,
            val=reading.source(val) if val else None,
            should_stop=check,
            progress=lambda done, of: bar.at(done, total=of),
        )
