"""`python -m benchmarks QUESTION`, from the root of the repository."""

import importlib
import sys
from collections.abc import Sequence

from mainstem.cli.parts.flags import message
from mainstem.errors import UserError, nearest

QUESTIONS = {  # each lives in the module of its name
    "train": "a training step, over its products alone and over transformers",
    "time-to-loss": "the seconds to a loss, beside those of nanoGPT's recipe",
    "data": "text to a token file, over the library tokenizers; batches",
    "decode": "a generated token, over memory's speed, transformers and llama.cpp",
    "inspect": "looking inside: capture, composition, attribution, patching, memory",
    "results": "all of these, and one page of their figures",
    "overhead": "what watching a training costs: vitals, and a tap that records nothing",
    "gpu": "on a CUDA device: exactness, training, decoding, our kernels",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Ask one question and return the exit code: 0, 1 a benchmark failed, 2 the input is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print("usage: python -m benchmarks QUESTION ...\n\nSpeed as ratios within one run.\n")
            print("\n".join(f"  {name:<13}{about}" for name, about in QUESTIONS.items()))
            print("\npython -m benchmarks QUESTION --help   its arguments\n--json   one object on stdout")
            return 0
        if argv[0] not in QUESTIONS:
            raise UserError(f"unknown question {argv[0]!r}; {nearest(argv[0], QUESTIONS)}")
        return importlib.import_module(f"benchmarks.{argv[0].replace('-', '_')}").main(argv[1:]) or 0
    except UserError as error:
        print(f"benchmarks: {message(error)}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
