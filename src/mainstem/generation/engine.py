"""Prefill and decode with a KV cache, by PyTorch or by the compiled decoder."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mainstem.generation import compiled
from mainstem.generation.cache import KVCache
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.quantized import weights_of
from mainstem.model.tap import Tap, for_pass

LOOK_BACK = 1024
"""Ids at the end of a text in which prompt lookup searches for a match."""
PREFILL = 16
"""Positions per step when the compiled decoder prefills."""
MATCHES = (3, 2)
"""Lengths of the match, longest first."""


class Row(Protocol):
    """One text that is being generated."""

    @property
    def ids(self) -> list[int]:
        """The prompt, then the generated ids."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the row is complete."""
        ...


def window_start(length: int, n_ctx: int) -> int:
    """The start of the window of a row of `length` ids: the last n_ctx // 2 ids of a full window begin the next one."""
    advance = n_ctx + 1 - max(1, n_ctx // 2)
    return max(0, -((n_ctx - length) // advance)) * advance


def prompt_lookup(ids: Sequence[int], count: int) -> list[int]:
    """At most `count` draft ids by prompt lookup: the ids after the last earlier occurrence of the text's final ids.

    A match of 3 ids is preferred, then of 2. Saxena 2023, prompt lookup decoding.
    """
    start = max(0, len(ids) - LOOK_BACK)
    for length in MATCHES:
        end = list(ids[-length:])
        for at in range(len(ids) - length - 1, start - 1, -1):
            if list(ids[at : at + length]) == end:
                text = list(ids)
                for following in range(at + length, at + length + count):  # past the end it repeats the draft
                    text.append(text[following])
                return text[len(ids) :]
    return []


class Engine:
    """The logits after each row's window, by prefill and decode steps.

    PyTorch prefills; the compiled decoder decodes where it is available and supports the model, else PyTorch. This is
    decided once, for the whole text. With quantized weights, the compiled decoder also prefills a single row.

    Args:
        model: any GPT. It is in evaluation mode during a step; its mode is restored after it.
        use_cache: whether to use a KV cache; False reads every window at every step.
        tap: a tap for every forward pass.
        max_new_tokens: the most tokens that follow the first windows.
        lookup: draft ids of a single row (`prompt_lookup`) that the compiled decoder reads together with its newest id.
            The logits of each position are bit-identical to those without it.
        use_compiled: whether the compiled decoder may be used.
    """

    def __init__(
        self,
        model: GPT,
        use_cache: bool,
        tap: Tap | None,
        max_new_tokens: int,
        lookup: int = 0,
        use_compiled: bool = True,
    ):
        self.model, self.use_cache, self.tap = model, use_cache, tap
        self.max_new_tokens, self.n_ctx, self.lookup = max_new_tokens, model.config.n_ctx, lookup
        self.device, self.dtype = model.wte.weight.device, model.wte.weight.dtype
        self.rows: Sequence[Row] = []  # rows in the cache, finished ones included until the next prefill
        self.cache: KVCache | None = None
        self.mask: Tensor | None = None  # (B, n_ctx), false at padding; None without padding
        self.padding: list[int] = []
        self.draft: list[int] = []  # draft ids in the cache, not yet accepted
        self.draft_logits: Tensor | None = None  # after each of them
        self.decoder: compiled.CompiledDecoder | None = None
        self.quantized = weights_of(model) != "fp32"
        plain = not (use_compiled and use_cache) or (tap is not None and tap.points)
        self.step = None if plain else compiled.step_for(model)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """The logits after each of `rows`, (B, V): the rows of the previous call without the finished ones."""
        if self.draft and self.draft[0] == rows[0].ids[-1]:
            assert self.draft_logits is not None
            self.draft, self.draft_logits = self.draft[1:], self.draft_logits[1:]
            return self.draft_logits[:1]
        if self.cache is not None:
            self.cache.take_back(len(self.draft))
            self.draft = []
        if self.cache is None or self.cache.length == self.cache.size:  # so full before any window moves
            logits = self._prefill(rows)
        elif self.step is not None:
            logits = self._decode_compiled(self.cache)
        else:
            logits = self._read(torch.tensor([[row.ids[-1]] for row in self.rows], device=self.device))
        live = [i for i, row in enumerate(self.rows) if not row.finished]
        return logits if len(live) == len(self.rows) else logits[live]

    def _read_compiled(self, ids: list[list[int]], cache: KVCache) -> Tensor:
        """Read ids of every row by the compiled decoder; logits (B x T, V)."""
        if self.decoder is None:
            assert self.step is not None
            ahead = min(self.lookup, cache.size - 1)
            positions = max(len(ids), 1 + ahead, PREFILL if self.quantized else 1)
            threads = torch.get_num_threads()
            self.decoder = compiled.CompiledDecoder(self.model, self.step, positions, cache.size, threads)
        return self.decoder.read(ids, cache, self.padding)

    def _decode_compiled(self, cache: KVCache) -> Tensor:
        """One decode step by the compiled decoder, with a draft for a single row; logits (B, V)."""
        ids = [[row.ids[-1]] for row in self.rows]
        if self.lookup and len(ids) == 1:
            room = cache.size - cache.length - 1
            self.draft = prompt_lookup(self.rows[0].ids, min(self.lookup, room))
            ids[0] += self.draft
        logits = self._read_compiled(ids, cache)
        if self.draft:
            self.draft_logits = logits
            return logits[:1]
        return logits

    def _prefill(self, rows: Sequence[Row]) -> Tensor:
        """Prefill every row's window, padded on the left; logits (B, V)."""
        self.rows = rows
        windows = [row.ids[window_start(len(row.ids), self.n_ctx) :] for row in rows]
        T, device = max(map(len, windows)), self.device
        ids = torch.tensor([[0] * (T - len(window)) + window for window in windows], device=device)  # (B, T)
        self.padding = [T - len(window) for window in windows]
        self.mask = None
        if any(self.padding):
            self.mask = torch.arange(self.n_ctx, device=device) >= torch.tensor(self.padding, device=device)[:, None]
        if self.use_cache and self.cache is not None:
            self.cache.clear(len(rows))
        elif self.use_cache:
            size = min(self.n_ctx, T + self.max_new_tokens)
            self.cache = KVCache(self.model.config, len(rows), self.dtype, device, size)
        if self.step is None or self.cache is None or not self.quantized or len(rows) > 1:
            return self._read(ids)
        return [self._read_compiled(part.tolist(), self.cache) for part in ids.split(PREFILL, 1)][-1][-1:]

    def _read(self, ids: Tensor) -> Tensor:
        """Read ids (B, T) of every row by PyTorch; the last position's logits, (B, V)."""
        length = ids.shape[1] + (self.cache.length if self.cache is not None else 0)
        mask = self.mask[:, :length] if self.mask is not None else None
        tap = for_pass(self.tap, length - ids.shape[1], ids.shape[1], partial=True)
        with evaluating(self.model), torch.inference_mode():  # of this step alone: another text may run between two
            x = self.model.stream(ids, mask=mask, cache=self.cache, tap=tap)
            return self.model.unembed(x[:, -1:], tap)[:, -1]

    def close(self) -> None:
        """Stop the threads of the compiled decoder."""
        if self.decoder is not None:
            self.decoder.close()
