"""Tables too large to be held: made some rows at a time, looked at, and dropped."""

import torch
from torch import Tensor

from mainstem.errors import ConfigError

CHUNK = 1 << 22
"""Elements of a table that are held at once, of whatever dtype."""


def row_chunks(rows: Tensor, columns: int) -> list[tuple[int, Tensor]]:
    """(number of the first row, rows), so many that a table of them with `columns` columns is within CHUNK."""
    step = max(1, CHUNK // max(1, columns))
    return [(start, rows[start : start + step]) for start in range(0, len(rows), step)]


class Largest:
    """The largest entries of a table that is made some rows at a time, and those of others at the same places.

    Args:
        count: of entries.
        like: a tensor of their dtype and device.
        others: tables beside the one that decides.

    Raises ConfigError for a count below 1.
    """

    def __init__(self, count: int, like: Tensor, others: int = 0):
        if count < 1:
            raise ConfigError(f"count: {count} entries cannot be the largest; ask for at least 1")
        self._count = count
        self.entries = like.new_empty(1 + others, 0)
        """(1 + others, n), the first row falling."""
        self.places = torch.empty(0, 2, dtype=torch.long, device=like.device)
        """(n, 2), row and column."""

    def add(self, start: int, *tables: Tensor) -> None:
        """Look at some rows, (n, m), of which the first is number `start`; the first table decides."""
        m, flat = tables[0].shape[1], tables[0].flatten()
        floor = self.entries[0, -1] if len(self.places) == self._count else -torch.inf
        largest = (flat > floor).nonzero()[:, 0]  # mostly few, and then much cheaper than a sort of all
        if len(largest) > self._count:
            largest = largest[flat[largest].topk(self._count).indices]
        entries = torch.cat((self.entries, torch.stack([table.flatten()[largest] for table in tables])), dim=1)
        places = torch.cat((self.places, torch.stack((start + largest // m, largest % m), dim=1)))
        order = entries[0].argsort(descending=True, stable=True)[: self._count]
        self.entries, self.places = entries[:, order], places[order]
