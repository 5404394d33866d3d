"""The compiled decoder: a model's records, buffers and threads for the compiled step, all made once for a text."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mainstem.errors import RunError
from mainstem.generation.cache import KVCache
from mainstem.generation.compiled import records
from mainstem.generation.compiled.records import ModelRecords
from mainstem.model.gpt import GPT

WORTH_A_THREAD = 1 << 22
"""Bytes of weights a step below which a second thread would come too late to help."""


class CompiledDecoder:
    """Reads tokens into a cache that the model has begun, and gives their logits, without an allocation.

    Args:
        model: one for which `records.unsupported` is None.
        step: the compiled function, as `step_for` returns it.
        positions: tokens at once, at most.
        size: of the caches, at most.
        threads: at most so many; the result is the same for any number.
    """

    def __init__(self, model: GPT, step: Callable[..., bool], positions: int, size: int, threads: int):
        self._packed, self._step = ModelRecords(model), step
        config = model.config
        C, V, W, M = config.d_model, config.vocab_size, config.n_head * config.d_head, config.d_mlp
        self._threads = threads if self._packed.bytes_read > WORTH_A_THREAD else 1
        phases = records.PHASES * config.n_layer + 1
        self._sync = np.zeros((2, (records.CLAIMS + records.LINE * phases) // 8), np.int64)
        own, scores = 2 * positions * C, size + records.LINE // 4
        counts = {  # of float32
            "own": self._threads * own, "scores": self._threads * scores, "qkv": positions * 3 * W, "z": positions * W,
            "attn_write": positions * C, "post": positions * M, "up": positions * M, "mlp_write": positions * C,
        }  # fmt: skip
        self._buffers = {name: np.zeros(max(1, count), np.float32) for name, count in counts.items()}
        self._positions = np.zeros(positions, records.POSITION)
        self._logits = torch.zeros(positions, V)
        self._work = np.zeros(1, records.WORK)
        work: Any = self._work[0]
        for name, array in self._buffers.items():
            work[name] = array.ctypes.data
        work["threads"], work["capacity"] = self._threads, positions
        work["own_bytes"], work["scores_bytes"] = 4 * own, 4 * scores
        work["logits"] = self._logits.data_ptr()
        self._turn = 0
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0  # whose threads the pool has
        self._cache: KVCache | None = None  # alive as long as a thread may write there

    def read(self, ids: Sequence[Sequence[int]], cache: KVCache, padding: Sequence[int]) -> Tensor:
        """Logits, (rows x tokens, V), of tokens that follow what the cache holds, the same number for each row.

        The cache is longer by them afterwards. The logits are overwritten by the next call.

        Args:
            ids: each row's.
            cache: of this model, in float32 on the CPU, with room for them.
            padding: columns at each row's beginning that hold no text.

        Raises RunError if one of the threads failed.
        """
        self._cache, before, each = cache, cache.length, len(ids[0])
        cache.advance(each)
        positions = self._positions[: len(ids) * each]
        positions["id"] = np.ravel(ids)
        columns = before + np.arange(each)
        for row, first in enumerate(padding):
            own = positions[row * each : (row + 1) * each]
            own["row"], own["column"], own["place"], own["first"] = row, columns, columns - first, first
        work: Any = self._work[0]
        work["rows"] = len(ids)
        for name, value in cache.layout().items():
            work[name] = value
        self._run(positions)
        return self._logits[: len(positions)]

    def _run(self, positions: np.ndarray) -> None:
        """One step by all threads; those of the step before may be leaving still, and look at the other numbers."""
        self._turn = 1 - self._turn
        sync = self._sync[self._turn]
        sync[:] = 0
        self._work[0]["sync"] = sync.ctypes.data
        given = (self._packed.like, self._packed.model, self._packed.blocks, positions, self._work.copy())
        others: list[Future[bool]] = []
        try:
            for thread in range(1, self._threads):
                others.append(self._workers().submit(self._part, sync, *given, thread))
            whole = self._part(sync, *given, 0)
        except BaseException:
            sync[records.ABANDONED // 8] = 1
            wait(others)  # until nobody writes any more
            raise
        if not whole:
            cause = next(filter(None, [other.exception() for other in others]), None)
            raise RunError(f"a thread of the compiled step failed ({cause}); generate with compiled=False") from cause

    def _part(self, sync: np.ndarray, *given: Any) -> bool:
        """One thread's share. Whatever it raises, the others do not wait for it."""
        try:
            return self._step(*given)
        except BaseException:
            sync[records.ABANDONED // 8] = 1
            raise

    def _workers(self) -> ThreadPoolExecutor:
        """The pool; a forked process has none of its parent's threads, and makes its own."""
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self._threads - 1), os.getpid()
        return self._pool

    def close(self) -> None:
        """Let the threads go, when they have left the last step: its numbers are freed with this."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
