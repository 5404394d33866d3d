"""`mainstem circuits overlap RUN`: which heads share a subspace of the stream, against chance."""

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Opening, finish, open_model
from mainstem.cli.parts.screen import Screen


@dataclass(frozen=True, kw_only=True)
class Overlap(Opening):
    """Overlap of the subspaces that heads read (Q, K, V) and write (O): squared cosines, against random subspaces."""

    top: int = 12
    """How many pairs to show."""


def main(argv: Sequence[str]) -> None:
    """Parse, compare, print."""
    command = parse(Overlap, "circuits overlap", argv)
    screen = Screen(command.json)
    model, _ = open_model(command, screen)
    from mainstem.circuits.overlap import ROLES, overlap

    subspaces = overlap(model)
    roles = []
    for i, first in enumerate(ROLES):
        for second in ROLES[i:]:
            block = subspaces.span(first), subspaces.span(second)
            share, chance, z = subspaces.share[block], subspaces.chance[block], subspaces.z[block]
            pairs = share.isfinite()
            if first == second:
                pairs = pairs.triu(1)  # each pair of heads once, and none with itself
            if pairs.any():
                values = (share[pairs].mean().item(), chance[pairs].mean().item(), z[pairs].nanmean().item())
                roles.append((f"{first}-{second}", *values))
    screen.say("how much of the smaller subspace lies in the other, mean over pairs of heads")
    rows = [(pair, f"{share:.3f}", f"{chance:.3f}", f"{z:+.1f}") for pair, share, chance, z in roles]
    screen.table(("roles", "share", "by chance", "mean z"), rows)
    best = subspaces.top(command.top)
    screen.table(("one", "other", "share", "z"), [(p.first, p.second, f"{p.share:.3f}", f"{p.z:+.1f}") for p in best])
    result = {
        "width": subspaces.width,
        "roles": [{"roles": r, "share": s, "chance": c, "z": z} for r, s, c, z in roles],
        "pairs": [pair._asdict() for pair in best],
        "notes": [],
    }
    arrays = {"labels": subspaces.labels, "kernel": subspaces.kernel, "z": subspaces.z, "ranks": subspaces.ranks}
    finish(command, screen, result, lambda: arrays)
