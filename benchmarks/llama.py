"""One of our models in llama.cpp, by llama-cpp-python and gguf (extra `llama`): as `formats.gguf` writes it.

The file has no vocabulary, for it is asked with ids and answers with ids.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mainstem.formats import gguf
from mainstem.model.gpt import GPT


def generator(model: GPT, path: Path, dtype: str) -> Callable[[Sequence[int], int], list[tuple[int, float]]]:
    """A function (prompt, count) -> `count` greedy ids, each with when it came, seconds after it began.

    Args:
        model: any that GGUF's gpt2 holds.
        path: where its file is written.
        dtype: of its matrices there, a key of `formats.gguf.DTYPES`.

    Raises ImportError if llama-cpp-python is not installed, and else as `formats.gguf.write` does: UserError if gguf
    is not.
    """
    package, threads = importlib.import_module("llama_cpp"), torch.get_num_threads()
    gguf.write(path, model, None, dtype)
    llama = package.Llama(
        str(path), n_ctx=model.config.n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def generate(prompt: Sequence[int], count: int) -> list[tuple[int, float]]:
        llama.reset()
        start, came = time.perf_counter(), []
        for i in llama.generate(list(prompt), temp=0.0, reset=True):
            came.append((i, time.perf_counter() - start))
            if len(came) == count:
                break
        return came

    return generate
