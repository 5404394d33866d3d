"""The compiled decoder: a model's records, buffers and threads for the compiled step, created once for a text."""

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
"""Bytes of weights per step from which several threads are used."""


class CompiledDecoder:
    """Reads tokens into a KV cache and returns their logits, without allocations.

    Args:
        model: a supported model (`records.unsupported` is None).
        step: the compiled function, as `step_for` returns it.
        positions: the most tokens per step.
        size: the largest cache size in positions.
        threads: the most threads; the result does not depend on their number.
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
        self._process = 0  # the id of the process that owns the pool
        self._cache: KVCache | None = None  # keeps the memory alive while threads write to it

    def read(self, ids: Sequence[Sequence[int]], cache: KVCache, padding: Sequence[int]) -> Tensor:
        """Read the next tokens of each row, equally many, and return their logits, (rows x tokens, V).

        The tokens are appended to the cache. The next call overwrites the logits.

        Args:
            ids: the next ids of each row.
            cache: the model's KV cache, float32 on the CPU, with room for the ids.
            padding: the number of padding columns of each row.

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
        """One step by all threads. Two sets of counters alternate: threads may still be leaving the previous step."""
        self._turn = 1 - self._turn
        sync = self._sync[self._turn]
        sync[:] = 0
        self._work[0]["sync"] = sync.ctypes.data
        arguments = (self._packed.like, self._packed.model, self._packed.blocks, positions, self._work.copy())
        others: list[Future[bool]] = []
        try:
            for thread in range(1, self._threads):
                others.append(self._workers().submit(self._part, sync, *arguments, thread))
            complete = self._part(sync, *arguments, 0)
        except BaseException:
            sync[records.ABANDONED // 8] = 1
            wait(others)  # until no thread writes
            raise
        if not complete:
            cause = next(filter(None, [other.exception() for other in others]), None)
            raise RunError(f"a thread of the compiled step failed ({cause}); generate with compiled=False") from cause

    def _part(self, sync: np.ndarray, *arguments: Any) -> bool:
        """One thread's share of a step. If it raises, the step is abandoned by all threads."""
        try:
            return self._step(*arguments)
        except BaseException:
            sync[records.ABANDONED // 8] = 1
            raise

    def _workers(self) -> ThreadPoolExecutor:
        """The thread pool of this process; a forked process creates its own."""
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self._threads - 1), os.getpid()
        return self._pool

    def close(self) -> None:
        """Stop the threads, after they have left the last step."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
