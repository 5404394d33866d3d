"""No test's result depends on chance or on a clock: what draws is given a generator, and nothing measures time."""

import ast
from pathlib import Path

import pytest

import mutations

TESTS = Path(__file__).parent
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
WITHOUT_GENERATOR = {"rand_like", "randn_like", "randint_like"}
IN_PLACE = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_",
    "trunc_normal_", "xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_", "orthogonal_",
}  # fmt: skip
SEEDED = {"np.random.default_rng", "numpy.random.default_rng", "random.Random"}
DRAWS_NOTHING = {"random.getstate"}
CLOCKS = {f"time.{name}{unit}" for name in ("time", "perf_counter", "process_time") for unit in ("", "_ns")}


def faults(source):
    """(line, call) of each call that draws from a global generator, or reads a clock that a result could depend on."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        name = ast.unparse(call.func)
        owner, _, last = name.rpartition(".")
        drawn = (owner == "torch" and last in DRAWS) or last in IN_PLACE
        harmless = (name in SEEDED and call.args) or name in DRAWS_NOTHING
        unseeded = owner in ("np.random", "numpy.random", "random") and not harmless
        ours = any(argument.arg == "generator" for argument in call.keywords)
        if (drawn and not ours) or unseeded or (owner == "torch" and last in WITHOUT_GENERATOR) or name in CLOCKS:
            found.append((call.lineno, name))
    return found


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_draws_from_a_global_generator_or_reads_a_clock(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.randn(3)",
        "x = torch.randint(5, (2, 3), dtype=torch.int64)",
        "x = torch.rand_like(y)",
        "x.normal_()",
        "nn.init.xavier_normal_(w)",
        "np.random.rand(3)",
        "np.random.default_rng()",
        "random.choice(letters)",
        "assert time.perf_counter() - began < 1",
    ],
)
def test_each_way_of_drawing_or_timing_is_a_fault(line):
    assert len(faults(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.randn(3, generator=g)",
        "x.normal_(generator=g)",
        "np.random.default_rng(0)",
        "random.Random(1).choice(xs)",
    ],
)
def test_a_seeded_draw_is_none(line):
    assert faults(line) == []


def test_every_mutation_is_of_a_line_that_is_there():
    """Else the table would shrink in silence as the source changes."""
    source = TESTS.parent / "src" / "mainstem"
    rows = [(file, old) for file, _, faults in mutations.FAULTS for old, _ in faults]
    assert len(rows) >= 60
    assert [(file, old) for file, old in rows if (source / file).read_text(encoding="utf-8").count(old) != 1] == []
