"""Each side of a comparison in a process of its own, as its users have it.

Ours has the settings of our command line; another program has none of them. A process builds what it does once and then
waits; it works when it is called, so two of them take turns, and it times itself.
"""

import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).parents[1]
Works = Mapping[str, Callable[..., Any]]
"""What a process can do, by name; the arguments are plain values."""


class NotCompared(Exception):
    """Why a side cannot be compared: its program is missing, or does something else than ours."""


class Timed(NamedTuple):
    """What work returns of which a part is timed: the part's seconds, and a plain value."""

    seconds: float
    value: Any = None


class Arrays(dict[str, Any]):
    """NumPy's arrays by name."""


def done(work: Callable[..., Any], arguments: Sequence[Any], keep: bool) -> Timed:
    """Do a work after a garbage collection, and read the clock before what it returned is freed."""
    gc.collect()
    start = time.perf_counter()
    value = work(*arguments)
    seconds = time.perf_counter() - start
    if isinstance(value, Timed):
        return value
    if keep and isinstance(value, Mapping) and all(hasattr(array, "__array__") for array in value.values()):
        import numpy as np

        value = Arrays({name: np.asarray(array) for name, array in value.items()})
    return Timed(seconds, value if keep else None)


class Process:
    """A process that called `build`, "module:function", with plain arguments, and does the works that it returned.

    Args:
        build: returns Works.
        ours: whether it has the settings of our command line, which are in the environment before PyTorch is loaded.

    Raises NotCompared and UserError as `build` does; TrainingFailed if the process ended.
    """

    def __init__(self, build: str, *, ours: bool, **arguments: Any):
        self._build = build
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        try:
            self._ask({"build": build, "ours": ours, "arguments": arguments})
        except BaseException:
            self.close()
            raise

    def call(self, work: str, *arguments: Any, keep: bool = False) -> Timed:
        """Do a work after a garbage collection: its seconds, and its value if it is `Timed` or `keep` is true.

        A kept value is plain, or arrays by name, which cross in a file.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "arrays.npz"
            reply = self._ask({"work": work, "arguments": arguments, "keep": str(path) if keep else None})
            if path.exists():
                import numpy as np

                with np.load(path) as arrays:
                    reply["value"] = dict(arrays)
        return Timed(reply["seconds"], reply["value"])

    def side(self, work: str, *arguments: Any) -> Callable[..., Timed]:
        """One of two sides for `timing.alternate`."""
        return functools.partial(self.call, work, *arguments)

    def value(self, work: str, *arguments: Any) -> Any:
        """What a work returns."""
        return self.call(work, *arguments, keep=True).value

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from mainstem import errors

        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise errors.TrainingFailed(f"the process of {self._build} ended; what it wrote stands above")
        reply = json.loads(line)
        if "error" in reply:
            kind, message = reply["error"]
            raise NotCompared(message) if kind == "NotCompared" else getattr(errors, kind)(message)
        return reply


def alone(build: str, work: str, *arguments: Any, ours: bool, **built: Any) -> Any:
    """The value of one work in a fresh process."""
    with Process(build, ours=ours, **built) as process:
        return process.value(work, *arguments)


def _serve() -> None:
    """The process itself: a line of JSON asks, a line of JSON answers; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT))
    request = json.loads(sys.stdin.readline())
    if request["ours"]:
        from mainstem.cli import settings

        settings()
    from mainstem.errors import UserError

    processes, (module, function) = importlib.import_module("benchmarks.processes"), request["build"].split(":")
    try:
        works = getattr(importlib.import_module(module), function)(**request["arguments"])
    except (processes.NotCompared, UserError) as error:
        print(json.dumps({"error": [type(error).__name__, str(error)]}), file=answers, flush=True)
        return
    print("{}", file=answers, flush=True)
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        timed = processes.done(works[request["work"]], request["arguments"], request["keep"] is not None)
        if isinstance(timed.value, processes.Arrays):
            import numpy as np

            save: Any = np.savez
            save(request["keep"], **timed.value)
            timed = processes.Timed(timed.seconds)
        print(json.dumps(timed._asdict()), file=answers, flush=True)
        del timed


if __name__ == "__main__":
    _serve()
