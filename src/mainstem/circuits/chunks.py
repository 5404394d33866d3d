"""Tables too large for memory: computed some rows at a time, of which only the largest entries are kept."""

import torch
from torch import Tensor

from mainstem.errors import ConfigError

CHUNK = 1 << 22
"""Elements of a table that are in memory at once, of any dtype."""


def row_chunks(rows: Tensor, columns: int) -> list[tuple[int, Tensor]]:
    """Chunks of rows, each with the index of its first row; a chunk's table, of `columns`, fits CHUNK."""
    step = max(1, CHUNK // max(1, columns))
    return [(start, rows[start : start + step]) for start in range(0, len(rows), step)]


class Largest:
    """The largest entries of a table that is computed some rows at a time, and other tables' entries there.

    Args:
        count: how many entries.
        like: a tensor of the table's dtype and device.
        others: how many other tables there are.

    Raises ConfigError for a count below 1.
    """

    def __init__(self, count: int, like: Tensor, others: int = 0):
        if count < 1:
            raise ConfigError(f"count: {count} is not supported; give at least 1")
        self._count = count
        self.entries = like.new_empty(1 + others, 0)
        """The entries, (1 + others, n): the largest in descending order, then the other tables'."""
        self.places = torch.empty(0, 2, dtype=torch.long, device=like.device)
        """Row and column of each entry, (n, 2)."""

    def add(self, start: int, *tables: Tensor) -> None:
        """Add rows (n, m) from index `start` on, of every table; entries are ranked by the first table."""
        m, flat = tables[0].shape[1], tables[0].flatten()
        floor = self.entries[0, -1] if len(self.places) == self._count else -torch.inf
        largest = (flat > floor).nonzero()[:, 0]  # usually few, so this is much cheaper than to sort all
        if len(largest) > self._count:
            largest = largest[flat[largest].topk(self._count).indices]
        entries = torch.cat((self.entries, torch.stack([table.flatten()[largest] for table in tables])), dim=1)
        places = torch.cat((self.places, torch.stack((start + largest // m, largest % m), dim=1)))
        order = entries[0].argsort(descending=True, stable=True)[: self._count]
        self.entries, self.places = entries[:, order], places[order]
