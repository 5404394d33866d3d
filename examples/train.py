"""Train a GPT on a text, in memory, and let it talk.

    python examples/train.py FILE

With `run="runs/mine"` the same call writes a run folder, and resumes it when it is made again.
"""

import sys

import mainstem as ms
from mainstem.training.events import Evaluated, Step


def show(event: object) -> None:
    """A line now and then."""
    if isinstance(event, Step) and event.step % 10 == 0:
        print(f"step {event.step:3}  loss {event.loss:.3f} nats per token")
    if isinstance(event, Evaluated):
        print(event.result)


def main(path: str = "shakespeare", steps: int = 40) -> None:
    """The preset `tiny`, on bytes."""
    result = ms.train("tiny", path, tokenizer="byte", steps=int(steps), progress=show)
    print(result)
    text = ms.generate(result.model, result.tokenizer, "the ", max_new_tokens=40, temperature=0.7, seed=1)
    print(repr("the " + text))


if __name__ == "__main__":
    main(*sys.argv[1:3])
