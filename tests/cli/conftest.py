"""The command line in this process, in a folder of its own; and as a process where signals and streams need one."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mainstem.cli import main


@dataclass
class Result:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout: anything more does not parse."""
        return json.loads(self.out)


@pytest.fixture
def mainstem(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs one command."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as left:  # --help
            code = int(left.code or 0)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Starts one command as a process, with pipes; `env` adds to the environment, `shell` wraps the command."""

    def start(*argv: object, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen:
        words = [sys.executable, "-m", "mainstem", *map(str, argv)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, cwd=tmp_path, env=environment, **{**pipes, **options})

    return start


@pytest.fixture
def shape(text: Path) -> list[str]:
    """The flags of a very small run on the small text."""
    line = (
        f"--data {text} --model.n-ctx 16 --model.n-layer 2 --model.d-model 32 --model.vocab-size 300 --batch-size 8 "
        "--steps 12 --warmup 2 --save-every 4 --eval-every 6 --vitals-every 6"
    )
    return line.split()


@pytest.fixture(scope="session")
def small_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the command line made, to be read; copy it before you change it."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    line = "--model.n-ctx 16 --model.n-layer 2 --model.d-model 32 --model.vocab-size 300 --batch-size 8 --steps 12"
    assert main(["train", str(folder), "--data", str(text), *line.split(), "--save-every", "4", "--json"]) == 0
    return folder
