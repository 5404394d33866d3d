"""Text in a terminal's columns, as `rich` measures it: a Hangul syllable has two, a combining mark none."""

from rich.cells import cell_len, set_cell_size, split_text

width = cell_len
"""The columns of a text."""


def pad(text: str, columns: int) -> str:
    """The text with spaces after it, up to that many columns; a wider text stays as it is."""
    return text + " " * (columns - width(text))


def clip(text: str, columns: int) -> str:
    """The text in at most that many columns, one or more; `…` ends it where it was cut.

    It may be a column short, before a wide character or a space.
    """
    return text if width(text) <= columns else f"{set_cell_size(text, columns - 1).rstrip(' ')}…"


def tail(text: str, columns: int) -> str:
    """The end of the text in at most that many columns, one or more; `…` begins it where it was cut."""
    over = width(text) - columns
    return text if over <= 0 else f"…{split_text(text, over + 1)[1].lstrip(' ')}"
