"""What a generated token costs: over the memory that has to be read for it, and beside transformers and llama.cpp."""

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import llama
from benchmarks.floors import forward_floor, memory_floor
from benchmarks.gpt2 import gpt2
from benchmarks.processes import NotCompared, Process, Timed, Works
from benchmarks.timing import Alternated, Side, alternate, check, spread
from benchmarks.train import SHAPES, model_of
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.screen import Screen
from mainstem.errors import ConfigError, DataError, RunError, UserError
from mainstem.formats.load import load
from mainstem.formats.run import prepared
from mainstem.generation.compiled import bytes_a_step, store
from mainstem.generation.decoding import stream_text
from mainstem.model.gpt import GPT
from mainstem.model.quantized import quantize
from mainstem.text import tokens
from mainstem.training.evaluate import evaluate

NO_LOSS = "the loss with int8 weights is not measured; give a trained RUN with --run"
PROMPT, NEW, BATCH = 64, 128, 16
Generated = list[tuple[int, float]]
"""Each new id, and when it came, seconds after the prompt was given."""
Generate = Callable[[], Generated]


def generate_ours(model: GPT, prompt: Sequence[int], rows: int = 1) -> Generate:
    """Greedy, by the compiled step; of several rows the last's, when all had their token."""

    def generate() -> Generated:
        start, came = time.perf_counter(), []
        options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0}
        for chunk in stream_text(model, None, [list(prompt)] * rows, **options):
            if chunk.row == rows - 1:
                came.append((chunk.ids[0], time.perf_counter() - start))
        return came

    return generate


class _Clock:
    """What `generate` of transformers hands its tokens to; the prompt comes first."""

    def __init__(self) -> None:
        self.start, self.given = time.perf_counter(), False
        self.came: Generated = []

    def put(self, value: torch.Tensor) -> None:
        if self.given:
            self.came.append((int(value), time.perf_counter() - self.start))
        self.given = True

    def end(self) -> None:
        pass


def generate_theirs(model: GPT, prompt: Sequence[int]) -> Generate:
    """Greedy, by `generate` of GPT2LMHeadModel with our weights. Raises ImportError if it is not installed."""
    theirs, ids = gpt2(model, use_cache=True).eval(), torch.tensor([list(prompt)])
    theirs.generation_config.pad_token_id = 0

    def generate() -> Generated:
        clock = _Clock()
        theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, streamer=clock)
        return clock.came

    return generate


def per_token(times: Sequence[float]) -> float:
    """Seconds a token, those of the first and its prompt left out."""
    return (times[-1] - times[0]) / (len(times) - 1)


def _timed(generate: Generate) -> Callable[[], Timed]:
    """A text's seconds a token, with its `ids` and the seconds until the `first`."""

    def work() -> Timed:
        ids, times = zip(*generate(), strict=True)
        return Timed(per_token(times), {"ids": ids, "first": times[0]})

    return work


def _model_and_ids(shape: str) -> tuple[GPT, torch.Tensor, list[int]]:
    """The model of a shape, ids (1, T) that fill its context, and the prompt."""
    model, ids, _ = model_of(shape)
    return model.eval(), ids[:1, : model.config.n_ctx - 1], ids[0, :PROMPT].tolist()


def ours(shape: str) -> Works:
    """Our side: texts by each kind of weights and of BATCH rows, the `prefill` of a whole context, and `bytes_read`."""
    model, ids, prompt = _model_and_ids(shape)

    def prefill() -> None:
        with torch.inference_mode():
            model.unembed(model.stream(ids)[:, -1:])

    return {
        "fp32": _timed(generate_ours(model, prompt)),
        "int8": _timed(generate_ours(quantize(model, "int8"), prompt)),
        "bf16": _timed(generate_ours(quantize(model, "bf16"), prompt)),
        "batch": _timed(generate_ours(model, prompt, BATCH)),
        "prefill": prefill,
        "bytes_read": lambda: bytes_a_step(model) + (4 * model.config.d_model if model.wpe is not None else 0),
    }


def floors(shape: str, bytes_read: int) -> Works:
    """The `floor` of a token, reading its bytes, and that of a `prefill`, its products."""
    model, ids, _ = _model_and_ids(shape)
    return {"floor": memory_floor(bytes_read), "prefill": forward_floor(model, ids.shape[1])}


def transformers(shape: str) -> Works:
    """`generate` of transformers. Raises NotCompared if it is not installed."""
    model, _, prompt = _model_and_ids(shape)
    try:
        return {"transformers": _timed(generate_theirs(model, prompt))}
    except ImportError as error:
        raise NotCompared(f"transformers is not compared ({error}): pip install transformers") from error


def llamacpp(shape: str, folder: str) -> Works:
    """llama.cpp with weights in float32 and in q8_0. Raises NotCompared without its packages."""
    model, _, prompt = _model_and_ids(shape)
    works = {}
    try:
        for dtype in ("f32", "q8_0"):
            generate = llama.generator(model, Path(folder) / f"{dtype}.gguf", dtype)
            works[f"llamacpp_{dtype}"] = _timed(partial(generate, prompt, NEW))
    except UserError as error:  # it says itself what to do
        raise NotCompared(f"llama.cpp is not compared: {error}") from error
    except (ImportError, ValueError) as error:
        raise NotCompared(f"llama.cpp is not compared ({error}): pip install 'mainstem[llama]'") from error
    return works


PAIRS = {  # figure: what is first, over what, times what
    "fp32_over_memory_floor": ("floor", "fp32", 1),
    "fp32_over_llamacpp": ("llamacpp_f32", "fp32", 1),
    "bf16_over_fp32": ("fp32", "bf16", 1),
    "int8_over_transformers": ("transformers", "int8", 1),
    "int8_over_llamacpp": ("llamacpp_q8_0", "int8", 1),
    "batch16_over_batch1": ("fp32", "batch", BATCH),
}
"""Each is a ratio of speeds, the second's over the first's."""


def measure(
    shape: str = "andrea",
    rounds: int = 5,
    *,
    run: str | None = None,
    data: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The figures of PAIRS, `prefill_over_floor` and `int8_loss_minus_fp32`, with what stands behind them.

    Args:
        shape: of a model with random weights.
        rounds: timed texts of each side of a pair.
        run, data: a trained RUN and a prepared folder, on whose held-out text the loss with int8 weights is measured.
        progress: told how many timed calls are done, of how many.

    Raises ConfigError for a shape that is unknown or too short and for less than one round, RunError without the
    compiled step.
    """
    there = store.build()
    store._load.cache_clear()
    if not there and store.underway():
        raise RunError("another process is compiling the step; try again in a minute")
    if store.load("fp32") is None:
        raise RunError("the compiled step is not there; pip install 'mainstem[fast]', and see that the cache has room")
    check(rounds)
    if shape in SHAPES and (n_ctx := SHAPES[shape][3]) < PROMPT + NEW:
        raise ConfigError(f"shape: {shape} has {n_ctx} positions, and the text takes {PROMPT + NEW}; choose another")
    count, total = itertools.count(1), (rounds + 1) * 2 * (len(PAIRS) + 1)

    def tick() -> None:
        progress(next(count), total)

    notes: list[str] = []
    timings: dict[str, Any] = {}
    first_token: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def process(build: str, *, ours: bool, **arguments: Any) -> Process:
            return stack.enter_context(Process(f"benchmarks.decode:{build}", ours=ours, shape=shape, **arguments))

        mainstem = process("ours", ours=True)
        bytes_read = mainstem.value("bytes_read")
        floor = process("floors", ours=True, bytes_read=bytes_read)
        at = {**dict.fromkeys(("fp32", "int8", "bf16", "batch"), mainstem), "floor": floor}
        for build, names, arguments in (
            ("transformers", ["transformers"], {}),
            ("llamacpp", ["llamacpp_f32", "llamacpp_q8_0"], {"folder": folder}),
        ):
            try:
                at |= dict.fromkeys(names, process(build, ours=False, **arguments))
            except NotCompared as error:
                notes.append(str(error))

        def side(name: str) -> Side:
            def call(keep: bool = False) -> Timed:
                timed = at[name].call(name)
                if name != "floor":
                    first_token.setdefault(name, []).append(timed.value["first"])
                return timed

            return call

        for name, (first, second, times) in PAIRS.items():
            timings[name] = None
            if first in at and second in at:
                timed = alternate(side(first), side(second), rounds, tick=tick)
                timings[name] = _plain(timed, (first, second), times)
        prefill = alternate(mainstem.side("prefill"), floor.side("prefill"), rounds, tick=tick)
        timings["prefill_over_floor"] = _plain(prefill, ("prefill", "floor"), 1)
    figures = {name: timing and timing["ratio"] for name, timing in timings.items()}
    loss = None if run is None else _losses(run, data)
    return {
        "shape": shape,
        **figures,
        "int8_loss_minus_fp32": loss and loss["int8"] - loss["fp32"],
        "losses": loss,
        "timings": timings,
        "first_token_seconds": {name: spread(values).median for name, values in first_token.items()},
        "bytes_read": bytes_read,
        "prompt": PROMPT,
        "new": NEW,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "notes": [*notes, *[NO_LOSS] * (run is None)],
    }


def _losses(run: str, data: str | None) -> dict[str, float]:
    """Nats a token of a run's held-out text, with its own weights and narrow ones."""
    model, tokenizer = load(run)
    if tokenizer is None:
        raise DataError(f"{run}: no tokenizer is there, so no text can be read; give another --run")
    val, sizes = prepared(run, data, tokenizer).val, tokens.bytes_per_token(tokenizer)
    every = {"fp32": model, "bf16": quantize(model, "bf16"), "int8": quantize(model, "int8")}
    return {name: evaluate(each, val, sizes).loss for name, each in every.items()}


def _plain(timed: Alternated, sides: tuple[str, str], times: float) -> dict[str, Any]:
    return {
        "ratio": times * timed.ratio.median,
        "ratio_quartiles": [times * timed.ratio.lower, times * timed.ratio.upper],
        "seconds": {name: spread(taken).median for name, taken in zip(sides, (timed.first, timed.second), strict=True)},
    }


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Time greedy generation, by turns with reading the weights' bytes alone, with the `generate` of transformers, and
    with llama.cpp; each in a process of its own, all with the same random weights, on the CPU.

    The peers are optional: pip install transformers 'mainstem[llama]'.
    """

    shape: Literal["small", "mid", "andrea"] = "andrea"
    """4 blocks of 128, 6 of 384 (characters), or ANDREA's 12 of 768."""
    rounds: int = 5
    """Timed texts of each side of a pair."""
    run: str | None = None
    """A trained RUN, whose held-out loss with int8 weights is compared with that of its own."""
    data: str | None = None
    """Its prepared folder; without it the run's own."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print."""
    command = parse(Decode, "decode", argv, program="python -m benchmarks")
    screen = Screen(command.json)

    with screen.bar("decode", 1) as bar:
        found = measure(
            command.shape, command.rounds, run=command.run, data=command.data,
            progress=lambda done, total: bar.at(done, total=total),
        )  # fmt: skip
    for note in found["notes"]:
        screen.note(note)
    screen.say(
        f"{found['shape']}: {found['prompt']} tokens, then {found['new']} more; torch {found['torch']}, "
        f"{found['threads']} threads, {found['bytes_read'] / 1e6:,.0f} MB of float32 weights a token"
    )
    rows = []
    for name, timing in found["timings"].items():
        if timing is None:
            rows.append((name, "-", "-", "-"))
            continue
        lower, upper = timing["ratio_quartiles"]
        seconds = ", ".join(f"{side} {1000 * value:,.2f}" for side, value in timing["seconds"].items())
        rows.append((name, f"{timing['ratio']:.3f}", f"{lower:.3f} to {upper:.3f}", seconds))
    screen.table(("figure", "ratio", "interquartile range", "ms a step"), rows)
    first = ", ".join(f"{side} {1000 * value:,.0f}" for side, value in found["first_token_seconds"].items())
    screen.say(f"first token after, ms: {first}")
    if found["losses"] is not None:
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in found["losses"].items())
        screen.say(f"held-out loss: {losses}; int8 - fp32 {found['int8_loss_minus_fp32']:+.5f} nats")
    screen.result(found)
