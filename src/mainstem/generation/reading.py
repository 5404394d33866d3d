"""What a text reads at each step: every row's window once, then a token at a time; the logits after it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mainstem.generation import compiled, packed
from mainstem.generation.cache import KVCache
from mainstem.generation.fast import Stepper
from mainstem.model.gpt import GPT
from mainstem.model.quantized import weights_of
from mainstem.model.tap import Tap

LOOK_BACK = 1024
"""Ids at the end of a text in which its last few are looked for."""
AT_ONCE = 16
"""Positions of a window that the compiled step reads together."""
MATCHES = (3, 2)
"""How many of the last ids are looked for, the most first."""


class Row(Protocol):
    """A text as it is read."""

    @property
    def ids(self) -> list[int]:
        """The prompt, then what was generated."""
        ...

    @property
    def finished(self) -> bool:
        """Whether no more is asked of it."""
        ...


def window_start(length: int, n_ctx: int) -> int:
    """Where the window of a row of `length` ids begins: it grows to n_ctx, then its last n_ctx // 2 begin a new one."""
    advance = n_ctx + 1 - max(1, n_ctx // 2)
    return max(0, -((n_ctx - length) // advance)) * advance


def followers(ids: Sequence[int], count: int) -> list[int]:
    """The ids, `count` at most, that followed the last earlier place where the text was as its end is.

    Saxena 2023, prompt lookup decoding: the longest match counts, of 3 ids, then of 2.
    """
    start = max(0, len(ids) - LOOK_BACK)
    for length in MATCHES:
        end = list(ids[-length:])
        for at in range(len(ids) - length - 1, start - 1, -1):
            if list(ids[at : at + length]) == end:
                text = list(ids)
                for following in range(at + length, at + length + count):  # past the end it repeats what it follows
                    text.append(text[following])
                return text[len(ids) :]
    return []


class Reader:
    """Gives the logits after each row's window, with as few positions read as the windows allow.

    Windows are read by PyTorch, and so is all else unless the compiled step can: that is decided here, for the whole
    text. A single row's window of narrow weights, which PyTorch would widen first, is read by the compiled step too.

    Args:
        model: in evaluation mode.
        use_cache: False reads every window at every step.
        tap: given to every forward pass.
        max_new_tokens: at most so many are read after the first windows.
        lookup: ids that are read ahead of a single row, where the compiled step is: those that followed what the text
            ends in when it last stood there. Each position's logits are what they are without it, to the bit.
        by_step: whether the compiled step may be taken.
    """

    def __init__(
        self,
        model: GPT,
        use_cache: bool,
        tap: Tap | None,
        max_new_tokens: int,
        lookup: int = 0,
        by_step: bool = True,
    ):
        self.model, self.use_cache, self.tap = model, use_cache, tap
        self.max_new_tokens, self.n_ctx, self.lookup = max_new_tokens, model.config.n_ctx, lookup
        self.device, self.dtype = model.wte.weight.device, model.wte.weight.dtype
        self.rows: Sequence[Row] = []  # those in the cache, finished ones among them until the next prefill
        self.cache: KVCache | None = None
        self.mask: Tensor | None = None  # (B, n_ctx), false at padding; None where there is none
        self.padding: list[int] = []
        self.ahead: list[int] = []  # ids in the cache that nobody has chosen yet
        self.ahead_logits: Tensor | None = None  # after each of them
        self.stepper: Stepper | None = None
        self.narrow = weights_of(model) != "fp32"
        plain = not (by_step and use_cache) or (tap is not None and tap.points)
        self.step = None if plain or packed.unlike(model) is not None else compiled.load(weights_of(model))

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """(B, V), one row of logits for each of `rows`: those of the call before, without the finished ones."""
        if self.ahead and self.ahead[0] == rows[0].ids[-1]:
            assert self.ahead_logits is not None
            self.ahead, self.ahead_logits = self.ahead[1:], self.ahead_logits[1:]
            return self.ahead_logits[:1]
        if self.cache is not None:
            self.cache.take_back(len(self.ahead))
            self.ahead = []
        if self.cache is None or self.cache.length == self.cache.size:  # so full before any window moves
            logits = self._read_windows(rows)
        elif self.step is not None:
            logits = self._step_on(self.cache)
        else:
            logits = self._head(self._read(torch.tensor([[row.ids[-1]] for row in self.rows], device=self.device)))
        live = [i for i, row in enumerate(self.rows) if not row.finished]
        return logits if len(live) == len(self.rows) else logits[live]

    def _head(self, x: Tensor) -> Tensor:
        """The stream (B, T, C) -> the last position's logits, (B, V)."""
        return self.model.unembed(x[:, -1:], self.tap)[:, -1]

    def _by_step(self, ids: list[list[int]], cache: KVCache) -> Tensor:
        """Read more of every row by the compiled step; (B x T, V)."""
        if self.stepper is None:
            assert self.step is not None
            ahead = min(self.lookup, cache.size - 1)
            positions = max(len(ids), 1 + ahead, AT_ONCE if self.narrow else 1)
            self.stepper = Stepper(self.model, self.step, positions, cache.size, torch.get_num_threads())
        return self.stepper.read(ids, cache, self.padding)

    def _step_on(self, cache: KVCache) -> Tensor:
        """Read the newest token of every row, and of a single one what may follow; (B, V)."""
        ids = [[row.ids[-1]] for row in self.rows]
        if self.lookup and len(ids) == 1:
            room = cache.size - cache.length - 1
            self.ahead = followers(self.rows[0].ids, min(self.lookup, room))
            ids[0] += self.ahead
        logits = self._by_step(ids, cache)
        if self.ahead:
            self.ahead_logits = logits
            return logits[:1]
        return logits

    def _read_windows(self, rows: Sequence[Row]) -> Tensor:
        """Read every row's window anew, padded on the left; (B, V)."""
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
        if self.step is None or self.cache is None or not self.narrow or len(rows) > 1:
            return self._head(self._read(ids))
        return [self._by_step(part.tolist(), self.cache) for part in ids.split(AT_ONCE, 1)][-1][-1:]

    def _read(self, ids: Tensor) -> Tensor:
        read = ids.shape[1] + (self.cache.length if self.cache is not None else 0)
        mask = self.mask[:, :read] if self.mask is not None else None
        return self.model.stream(ids, mask=mask, cache=self.cache, tap=self.tap)

    def close(self) -> None:
        """Let the threads go."""
        if self.stepper is not None:
            self.stepper.close()
