"""Paths: whether a fixed matrix leads from a writer to a reader of the stream, and the cause if not."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mainstem.circuits.weights import Reader, Writer, readers, writers
from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.model.names import head
from mainstem.model.norms import Norm
from mainstem.stream.passage import skip_factor


class NoPath(ConfigError):
    """No fixed matrix leads from a writer to a reader."""

    def __init__(self, writer: Writer, reader: Reader, cause: str):
        super().__init__(f"{writer.label} -> {reader.label}: no virtual weights, for {cause}")
        self.cause = cause
        """What lies between writer and reader; the same text for all pairs that it separates."""


def check_path(model: GPT, writer: Writer, reader: Reader) -> float:
    """The factor by which the stream multiplies a write before a reader reads it: the product of the skips between.

    Raises NoPath, with the cause, where no fixed matrix leads from writer to reader: the reader does not come after the
    writer, or a norm over the sum (`ln_add`) or a skip of 0 lies between.
    """
    if reader.place <= writer.place:
        raise NoPath(writer, reader, f"{reader.label} reads before {writer.label} has written")
    product = 1.0
    for place, site in enumerate(model.joins()[: reader.place]):
        join, name = site.join, site.point(site.join.name)
        if place > writer.place:
            product *= skip_factor(join)
            if product == 0:
                raise NoPath(writer, reader, f"{name}.skip is 0 and ends what was in the stream")
        if place >= writer.place and isinstance(join.ln_add, Norm):
            raise NoPath(
                writer,
                reader,
                f"{name}.ln_add, a norm over the stream itself, lies between; "
                "use a `residual` without ln_add (pre, sandwich, reordered, none and others)",
            )
    return product


def by_cause(causes: Mapping[Any, str], what: str) -> list[str]:
    """One line for each cause with its count: `3 of 6 pairs of blocks lack a path, for ...`."""
    return [f"{count} {what}, for {cause}" for cause, count in Counter(causes.values()).items()]


def mean_is_read(model: GPT) -> bool:
    """Whether a reader may read the mean of a head's write.

    None does where every reader that heads have a path to centres its input, as with LayerNorm in `pre`.
    """
    written, reached = writers(model), []
    for target in {reader.place: reader for reader in readers(model).values()}.values():  # one of each place
        for layer in range(len(model.blocks)):
            with contextlib.suppress(NoPath):
                check_path(model, written[head(layer, 0)], target)
                reached.append(target)
    return not reached or not all(target.centres for target in reached)
