"""Signals set a flag; the work reads it at safe points."""

import contextlib
import signal
from collections.abc import Callable, Iterator

from mainstem.errors import Interrupted


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """A function that raises Interrupted once SIGINT or SIGTERM has arrived; a second one ends the process."""
    arrived: list[int] = []

    def handle(signum: int, frame: object) -> None:
        arrived.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    def check() -> None:
        if arrived:
            raise Interrupted(f"stopped by {signal.Signals(arrived[0]).name}", arrived[0])

    old = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
