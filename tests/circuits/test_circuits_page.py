"""The page's example runs, and the page names every score of a head."""

import re
from pathlib import Path

from mainstem.circuits.heads import KINDS
from models import build, small

PAGE = (Path(__file__).parents[2] / "docs/circuits.md").read_text(encoding="utf-8")


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"model": build(small())}
    exec(example, names)
    assert names["path"].directions()


def test_the_page_names_every_kind_of_target():
    assert all(kind in PAGE for kind in KINDS)
