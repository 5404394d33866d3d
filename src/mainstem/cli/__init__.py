"""The command line: one file a verb, which parses, calls a room below, and prints.

This top level is a table of our own, so that `mainstem --help` imports nothing; only the verb that was typed is loaded.
"""

import errno
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mainstem import __version__
from mainstem.errors import UserError, nearest

VERBS = {  # verb: what it does; each lives in the module of its name
    "demo": "train a small GPT on Shakespeare in minutes, and sample it",
    "info": "count parameters, FLOPs and memory of a preset or a run",
    "tokenizer": "train a tokenizer; encode and decode with one",
    "data": "prepare text: tokenizer, token files, manifest",
    "train": "train a GPT; the same line typed again resumes where it stopped",
    "generate": "generate text with a trained model",
    "inspect": "open one forward pass: attribution, lenses, ablation, patching",
    "circuits": "read circuits from the weights: composition, virtual weights",
    "compile": "compile the faster decoder for this machine; show it; remove it",
    "export": "write a model for others: Hugging Face, GGUF, safetensors",
    "import": "read a model of others: Hugging Face, nanoGPT, minGPT",
    "doctor": "check memory, disk and rates before a run; explain a failed one",
    "verify-resume": "prove that killed and resumed runs are bit-identical",
}

_OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory|not enough memory", re.IGNORECASE)
SPINS = "1000"
"""Turns that a thread of the CPU's products waits before it sleeps (docs/log.md has the measurement)."""


def _help() -> str:
    verbs = "\n".join(f"  {verb:<15}{about}" for verb, about in VERBS.items())
    return (
        "usage: mainstem VERB ...\n\n"
        "A GPT toolkit in which the residual stream is a thing you can hold.\n\n"
        f"{verbs}\n\n"
        "mainstem VERB --help   the verb's arguments; every verb takes --json\n"
        "mainstem --version"
    )


def settings() -> None:
    """Set in the environment, before PyTorch is loaded, what makes it faster; what the user set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:  # threads that spin for long are what a busy machine slows most
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch asks for large pages (docs/log.md: what that saves)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, 1 the run failed, 2 the input is wrong, 130 and 143 signals."""
    if argv is None and sys.getfilesystemencoding() != "utf-8":  # the C locale would garble names and prompts
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-P", "-m", "mainstem", *sys.argv[1:]])
    for name in ("stdin", "stdout", "stderr"):  # closed by the caller
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - lives on
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a console that cannot show a character must not end a run
            stream.reconfigure(errors="replace")
    settings()
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(_help())
            return 0
        if argv[0] in ("-V", "--version"):
            print(f"mainstem {__version__}")
            return 0
        verb = argv[0]
        if verb not in VERBS:
            raise UserError(f"unknown verb {verb!r}; {nearest(verb, VERBS)}; mainstem --help lists them")
        from mainstem.cli.parts import flags

        flags.remember(None)
        module = importlib.import_module(f"mainstem.cli.{verb.replace('-', '_')}")
        module.main(argv[1:])
        sys.stdout.flush()
        return 0
    except UserError as error:
        from mainstem.cli.parts.flags import message

        field = {} if error.field is None else {"field": error.field}
        return _failed(argv, message(error), error.exit_code, {**error.facts, **field})
    except KeyboardInterrupt:
        return _failed(argv, "interrupted", 130)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        failed = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)
        return _failed(argv, f"{error.filename or 'the system'}: {error.strerror or error}", 1 if failed else 2)
    except (MemoryError, RuntimeError) as error:  # torch has no MemoryError of its own
        if isinstance(error, RuntimeError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        from mainstem.cli.parts.flags import out_of_memory

        return _failed(argv, out_of_memory(), 1)


def _failed(argv: list[str], message: str, code: int, facts: Mapping[str, object] = MappingProxyType({})) -> int:
    """One message on stderr, and with --json one object on stdout."""
    print(f"mainstem: {message}", file=sys.stderr)
    if "--json" in argv:
        from mainstem.atomic import to_json

        print(to_json({**facts, "error": message, "exit_code": code}, encoding=sys.stdout.encoding or "utf-8"))
    return code
