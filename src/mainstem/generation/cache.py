"""The KV cache: keys and values of earlier positions, so that a decode step reads one token."""

from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError


class BlockKV(NamedTuple):
    """One block's entry of a KV cache: views of its keys and values, and its length."""

    keys: Tensor  # (B, H, size, D)
    values: Tensor  # (B, H, size, D)
    length: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, (B, H, T, D), and return views of all of them, (B, H, length + T, D)."""
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """The KV cache of a model: `size` positions for every block, allocated once and never copied.

    Args:
        config: the model's config.
        batch: the number of rows, B.
        dtype, device: of the model.
        size: the number of positions; default n_ctx.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        size: int | None = None,
    ):
        self.size = config.n_ctx if size is None else size
        shape = (config.n_layer, batch, config.n_head, self.size, config.resolved().d_head)  # (L, B, H, size, D)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def __getitem__(self, block: int) -> BlockKV:
        """The entry of a block."""
        return BlockKV(self._keys[block], self._values[block], self.length)

    def layout(self) -> dict[str, int]:
        """The memory layout for compiled code: addresses of keys and values, and strides in bytes."""
        block, row, head = (4 * stride for stride in self._keys.stride()[:3])
        return {
            "keys": self._keys.data_ptr(),
            "values": self._values.data_ptr(),
            "block_bytes": block,
            "row_bytes": row,
            "head_bytes": head,
        }

    def advance(self, count: int) -> None:
        """Add `count` to the length, after every entry has stored as many positions. Raises ConfigError past `size`."""
        if self.length + count > self.size:
            raise ConfigError(f"{self.length + count} positions do not fit a cache of {self.size}; use a larger one")
        self.length += count

    def take_back(self, count: int) -> None:
        """Remove the last `count` positions."""
        self.length -= count

    @property
    def bytes_per_token(self) -> int:
        """The size of one position of one row in bytes: a key and a value in every head of every block."""
        blocks, _, heads, _, width = self._keys.shape
        return 2 * blocks * heads * width * self._keys.element_size()

    def clear(self, batch: int) -> None:
        """Remove every position, and keep the first `batch` rows."""
        self.length = 0
        self._keys, self._values = self._keys[:, :batch], self._values[:, :batch]
