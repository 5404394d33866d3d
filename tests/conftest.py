"""What all tests share: no clock, no chance, one thread, and a small text, its token files and a trained run."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from mainstem.runs.folder import RunFolder
from mainstem.text import tokens
from mainstem.text.corpus import Source

timeless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may share the machine
settings.register_profile("search", timeless)  # new examples in each run: `make test-all`
settings.register_profile("fixed", timeless, derandomize=True)  # the same examples in each run
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shuffle SEED`."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and the tests of each, in another order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """No test may depend on those before it; a file's tests stay together, since they share fixtures."""
    if (seed := config.getoption("--shuffle")) is not None:
        rng, files = random.Random(seed), list(dict.fromkeys(item.path for item in items))
        rng.shuffle(files)
        rng.shuffle(items)
        items.sort(key=lambda item: files.index(item.path))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products only: threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """PyTorch's global generator, from which modules draw their first weights, is the same before each test."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_power_is_lost() -> Iterator[None]:
    """Waiting for the disk would be half the time; `test_atomic` holds what is flushed, and when."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    """PyTorch generates, whatever this machine has compiled; `generation/conftest.py` has the compiled step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NUMBA_CACHE_DIR", raising=False)
        patch.setenv("XDG_CACHE_HOME", os.devnull)  # in which nothing lies, and nothing can be put
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred lines, English and Korean."""
    who = ("the river", "a stream", "강물이", "every branch", "the sea", "비가", "a spring", "시냇물이")
    does = ("flows into", "reads from", "writes to", "바다로", "meets", "산에서", "leaves", "천천히")
    what = ("the valley", "흐른다.", "its own bed", "the main stem", "내린다.", "the old mill", "돌아온다.")
    lines = [f"{who[i % 8]} {does[i // 3 % 8]} {what[i * i % 7]} {i % 10}\n" for i in range(300)]
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def data(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tokens.Prepared:
    """Its token files, by a BPE of 300."""
    return tokens.prepare(Source((text,)), tmp_path_factory.mktemp("data") / "lines", vocab_size=300)


@pytest.fixture(scope="session")
def trained(data: tokens.Prepared, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of 12 steps, saved and evaluated at 4, 8 and 12; copy it before you harm it."""
    import training_runs

    folder = tmp_path_factory.mktemp("trained") / "run"
    often = {"save_every": 4, "eval_every": 4, "vitals_every": 4}
    training_runs.finish(training_runs.training(folder, training_runs.cut(data), keep=3, **often))
    return RunFolder(folder)


@pytest.fixture
def copied(trained: RunFolder, tmp_path: Path) -> Callable[[str], RunFolder]:
    """Makes a copy of the trained run that may be harmed."""

    def copy(name: str = "copy") -> RunFolder:
        return RunFolder(shutil.copytree(trained.path, tmp_path / name))

    return copy
