"""Text to tokens under a progress bar."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mainstem.cli.parts.arguments import TextOptions
from mainstem.cli.parts.screen import Screen
from mainstem.text import tokens
from mainstem.training.start import named_tokenizer


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
    existing = named_tokenizer(tokenizer)
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
