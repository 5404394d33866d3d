"""What made a run: the versions of the software, and the commit where it is known."""

import importlib.metadata
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch


@cache
def software() -> dict[str, str]:
    """`mainstem`, `commit`, `python` and `torch`, each its version."""
    return {
        "mainstem": importlib.metadata.version("mainstem"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def commit() -> str:
    """Of the sources that run, with `-dirty` if they were changed since; `unknown` where no repository has them."""
    here = Path(__file__)
    try:
        for words in (("ls-files", "--error-unmatch", here.name), ("describe", "--always", "--dirty", "--exclude=*")):
            line = ["git", "-C", str(here.parent), *words]
            output = subprocess.run(line, capture_output=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.stdout.strip()
