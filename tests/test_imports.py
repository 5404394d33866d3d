"""The house's order: a room imports only from rooms before it, and the first ones load no torch."""

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mainstem

SOURCE = Path(mainstem.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
WITHOUT_TORCH = ("errors", "atomic", "residuals", "config", "presets", "counts", "columns", "text", "results")
WITH_TORCH = ("model", "runs", "formats", "training", "generation", "stream", "circuits", "surgery", "lab", "learn")
ROOMS = (*WITHOUT_TORCH, *WITH_TORCH, "report", "serve", "cli")


def module_name(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def room(module):
    """`mainstem.text.tokens` -> `text`; the package itself, whose names are lazy, is in no room."""
    return module.split(".")[1] if "." in module else None


def imports(path):
    """Every module that a file imports: inside functions, under TYPE_CHECKING, relative, or by its name as a string."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            members = {f"{origin}.{alias.name}" for alias in node.names}
            found |= members & MODULES.keys() or {origin}
        elif isinstance(node, ast.Constant) and node.value in MODULES and node.value != "mainstem":
            found.add(node.value)
    return found


def ours(path):
    return {module for module in imports(path) if module.split(".")[0] == "mainstem"}


def test_every_file_is_in_a_room():
    assert {room(module) for module in MODULES} - {None, "__main__"} <= set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_room_imports_only_from_rooms_before_it(path):
    here = room(module_name(path))
    allowed = ROOMS if here in (None, "__main__") else ROOMS[: ROOMS.index(here) + 1]
    assert not {module for module in ours(path) if room(module) not in (*allowed, None)}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_room_reaches_the_others_through_the_lazy_names(path):
    assert "mainstem" not in imports(path) or room(module_name(path)) == "cli"


BENCHMARKS = SOURCE.parents[1] / "benchmarks"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_the_package_stands_without_its_benchmarks(path):
    assert "benchmarks" not in {module.split(".")[0] for module in imports(path)}


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_no_benchmark_asks_to_be_two(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_no_two_files_import_each_other():
    """Nor any longer circle. The package's own `__init__` is left out: it imports nothing until it is asked."""
    graph = {name: ours(path) - {"mainstem", name} for name, path in MODULES.items() if name != "mainstem"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as fault:
        pytest.fail(" -> ".join(fault.args[1]))


DECODER = "mainstem.generation.compiled"


@pytest.mark.parametrize("path", [p for p in FILES if not module_name(p).startswith(DECODER)], ids=module_name)
def test_the_compiled_decoder_has_one_door(path):
    """Everything else reads without it: only the sub-package itself is imported, not its modules."""
    assert not {module for module in ours(path) if module.startswith(f"{DECODER}.")} - {f"{DECODER}.store"}


@pytest.mark.parametrize("path", [p for p in FILES if room(module_name(p)) in WITHOUT_TORCH], ids=module_name)
def test_the_first_rooms_name_no_torch(path):
    assert "torch" not in {module.split(".")[0] for module in imports(path)}


def test_the_first_rooms_load_no_torch():
    """Also not by way of a library that they use, nor by `import mainstem`."""
    modules = ["mainstem", *(name for name in MODULES if room(name) in WITHOUT_TORCH)]
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


PICKLES = MODULES["mainstem.formats.nanogpt"]
"""The one file that opens pickles, which are what it is for."""


@pytest.mark.parametrize("path", [path for path in FILES if path != PICKLES], ids=module_name)
def test_nothing_unpickles(path):
    """Neither pickle nor `torch.load`, by whatever name torch was imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    loads = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) in ("torch", "th")
    ]
    assert not loads
    assert not imports(path) & {"pickle", "cPickle", "dill", "torch.load"}


def test_what_unpickles_imports_nothing_that_a_pickle_names():
    """`torch.load` is called once, for weights alone; pickle's own reader is a base class, and its imports raise."""
    nodes = list(ast.walk(ast.parse(PICKLES.read_text(encoding="utf-8"))))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert [ast.literal_eval(word.value) for word in calls[0].keywords if word.arg == "weights_only"] == [True]
    names = [node.id for node in nodes if isinstance(node, ast.Name) and node.id in ("pickle", "torch")]
    used = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    assert len(calls) == used.count("torch.load") == 1
    assert names.count("pickle") == sum(name.startswith("pickle.") for name in used)
    assert {name for name in used if name.startswith("pickle.")} == {"pickle.Unpickler", "pickle.UnpicklingError"}
    assert used.count("pickle.Unpickler") == 1
    (reader,) = (node for node in nodes if "pickle.Unpickler" in map(ast.unparse, getattr(node, "bases", ())))
    (imported,) = (node for node in reader.body if isinstance(node, ast.FunctionDef))
    assert imported.name == "find_class"
    assert [type(node) for node in imported.body] == [ast.Expr, ast.Raise]
    assert imports(PICKLES) & {"pickle", "cPickle", "dill", "torch.load"} == {"pickle"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_file_asks_to_be_two(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
