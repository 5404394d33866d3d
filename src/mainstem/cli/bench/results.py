"""`mainstem bench results`: every benchmark, and one page of their figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstem import atomic
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen


@dataclass(frozen=True, kw_only=True)
class Results:
    """Run every benchmark, each in a process of its own, and write their figures into one page. It takes long, and
    nothing else should run meanwhile."""

    data: str
    """The text of `bench time-to-loss`."""
    run: str | None = None
    """The trained RUN of `bench decode`, on whose held-out text int8 weights are measured."""
    out: str = "benchmarks/RESULTS.md"
    """The page; one that is there is replaced."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, write."""
    command = parse(Results, "bench results", argv)
    screen = Screen(command.json)
    from mainstem.bench.results import Result, measure, page

    out = atomic.replaceable(Path(command.out))
    with screen.bar("bench results", 1) as bar:
        results: list[Result] = []
        for result in measure(
            command.data, command.run, progress=lambda done, total, what: bar.at(done, what, total=total)
        ):
            results.append(result)
            atomic.write_text(out, page(results))  # so that what was measured stays, whatever comes next
    for result in results:
        screen.say(f"bench {' '.join(result.words)}")
        screen.table(("figure", "value", "middle half"), result.rows())
    screen.say(f"written to {out}")
    screen.result({"out": str(out), "results": [{"words": result.words, **result.found} for result in results]})
