"""The pages against the code: points, rows, names in both languages, and the laws that tests cite."""

import ast
import re
from itertools import product
from pathlib import Path

import pytest
from torch import nn

import mainstem
from mainstem.config import ModelConfig
from mainstem.model.attention import Attention
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.model.mlp import MLP
from mainstem.model.sublayer import Sublayer
from mainstem.stream.points import answered
from mainstem.stream.trace import Trace
from models import ROWS, build, small, tokens
from reference import MINI_NAMES

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
SPAN = re.compile(r"`([^`]+)`")


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def rows(text):
    """The rows of a page's tables, as lists of cells, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    ruled = [index for index, row in enumerate(cells) if set("".join(row)) == {"-"}]
    return [row for index, row in enumerate(cells) if index not in ruled and index + 1 not in ruled]


def expanded(name):
    """`res_{1,2}.mean` -> res_1.mean, res_2.mean; `{l}` -> 0."""
    parts = re.split(r"\{([^}]*)\}", name.replace("{l}", "0"))
    return {"".join(choice) for choice in product(*(part.split(",") for part in parts))}


def points():
    """Every kind of point that some model has."""
    return {point for row in ROWS for point in GPT(small(row, n_layer=1)).points()}


def test_stream_names_every_point_and_no_other():
    named = [expanded(SPAN.match(row[0])[1]) for row in rows(page("stream.md"))]
    assert set().union(*named) == points()


def test_streams_examples_run():
    model = build(small())
    names, logits = {"model": model, "ids": tokens(model.config)}, []
    for example in re.findall(r"```python\n(.*?)```", page("stream.md"), re.DOTALL):
        exec(example, names)
        logits.append(names["logits"])
    assert list(names["tap"].values) == sorted(names["tap"].points, key=model.points().index)
    read, silenced, steered, *_ = logits
    assert not read.equal(silenced)
    assert not read.equal(steered)
    assert names["trace"].logits.equal(read)


def test_residuals_has_each_row_in_each_table():
    named = [SPAN.match(row[0])[1] for row in rows(page("residuals.md"))]
    inits = ["gpt2", "xavier", "width"]
    assert named == [*ROWS, *inits, *ROWS, *ROWS]


def test_residuals_norms_and_skips_are_the_tables():
    for name, *cells in rows(page("residuals.md"))[: len(ROWS)]:
        row = small(SPAN.match(name)[1], n_layer=8)
        model = GPT(row)
        block = model.blocks[7]
        has = [bool(list(norm.parameters())) for norm in (block.res_1.ln_in, block.res_1.ln_out, block.res_1.ln_add)]
        if row.residual != "mix":
            assert [bool(cell) for cell in cells[:4]] == [*has, bool(list(model.ln_f.parameters()))], name
        assert (cells[4] == "1") == isinstance(block.res_1.skip, nn.Identity), name
        assert (cells[5] == "1") == isinstance(block.res_1.damp, nn.Identity), name
        assert (cells[6] == "1") == isinstance(block.res_1.gain, nn.Identity), name


def ours():
    """Everything that the pages may call ours: points, modules, weights, config fields, classes, public functions."""
    found = points() | set(ModelConfig.field_names()) | {"model"}
    found |= {kind.__name__ for kind in (Attention, Block, GPT, MLP, Sublayer)}
    for row in ROWS:
        model = GPT(small(row, n_layer=1, lm_head_bias=True))
        found |= {name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
        found |= set(answered(model))
    return found | {f"ms.{name}" for name in mainstem.__all__} | {f"trace.{name}" for name in dir(Trace)}


@pytest.mark.parametrize("name", ["names.md", "names.ko.md"])
def test_our_side_of_the_names_exists(name):
    """Second column: each name, up to a bracket or `.T`."""
    spans = [span for row in rows(page(name)) for span in SPAN.findall(row[1])]
    names = {re.match(r"[\w.{}]+", span)[0].removesuffix(".T").replace("{l}", "0") for span in spans}
    assert len(names) > 40
    assert not names - ours()


def test_the_documents_names_are_on_the_page():
    theirs = {span for row in rows(page("names.md")) for span in SPAN.findall(row[0])}
    modules = {"TransformerSublayer", "Head", "MultiHeadAttention", "FeedForward", "Block", *MINI_NAMES.values()}
    assert modules | {"sa", "ffwd", "block_forward", "model_forward", "W_1", "W_2"} <= theirs


def test_both_languages_map_the_same_names():
    english, korean = (
        [[SPAN.findall(cell) for cell in row[:2]] for row in rows(page(name))] for name in ("names.md", "names.ko.md")
    )
    assert english == korean


def docstrings(path):
    """Every docstring of a file, its own included."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def cited(text):
    """Numbers of the laws that a text cites: `Law 3`, `Laws 4 and 5`."""
    lists = re.findall(r"\b[Ll]aws? (\d+(?:(?:, | and )\d+)*)", text)
    return {int(number) for numbers in lists for number in re.findall(r"\d+", numbers)}


def test_each_law_that_a_test_cites_is_listed_with_it_and_each_listed_law_is_cited():
    listed = {(int(row[0]), path) for row in rows(page("laws.md")) for path in SPAN.findall(row[2])}
    citing = {
        (law, path.relative_to(TESTS).as_posix())
        for path in TESTS.rglob("*.py")
        for text in docstrings(path)
        for law in cited(text)
    }
    assert {law for law, _ in citing} == {law for law, _ in listed} == set(range(1, 13))
    assert listed <= citing


def test_no_docstring_of_a_test_cites_a_code_that_no_page_lists():
    """A letter and a number, as in somebody's list of cases."""
    code = re.compile(r"\b[CDEGST]\d{1,2}\b")
    texts = [text for path in TESTS.rglob("*.py") for text in docstrings(path)]
    assert [text for text in texts if code.search(text)] == []
