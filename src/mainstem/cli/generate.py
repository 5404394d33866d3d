"""`mainstem generate RUN "prompt"`: text from a trained model, as it becomes certain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mainstem.cli.parts.arguments import Flat, Positional, parse
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.config import Sampling
from mainstem.errors import DataError, UserError

if TYPE_CHECKING:
    from mainstem.model.gpt import GPT


@dataclass(frozen=True)
class Generate:
    """Continue prompts with a trained model."""

    run: Positional[str]
    """A run folder, or a checkpoint inside one."""
    prompts: Positional[tuple[str, ...]] = ("",)
    """Texts to continue; several are read as one batch; an empty one starts a document."""
    max_new_tokens: int = 200
    """At most so many tokens a prompt."""
    seed: int = 1
    """The same seed gives the same text."""
    n: int = 1
    """Samples a prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not printed."""
    context: Literal["slide", "stop"] = "slide"
    """Past the context: slide to its last half, or stop."""
    dtype: Literal["fp32", "bf16", "int8"] | None = None
    """How matrices are stored while it generates: fewer bytes, sooner; without it as the run has them."""
    lookup: int = 0
    """Read so many tokens ahead where the text repeats itself: the same text, sooner; one prompt, one sample."""
    threads: int | None = None
    """Of the processor; without it as many as PyTorch takes."""
    no_cache: bool = False
    """Read the whole window at every step: the same text, slower."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    json: bool = False
    """One object on stdout at the end."""
    sampling: Flat[Sampling] = Sampling()


def main(argv: Sequence[str]) -> None:
    """Parse, generate, print."""
    command = parse(Generate, "generate", argv)
    screen = Screen(command.json)
    import torch

    from mainstem.formats.load import load
    from mainstem.generation.cache import KVCache
    from mainstem.generation.decoding import Chunk, stream
    from mainstem.model.quantized import quantize, weights_of
    from mainstem.training.device import Device

    model, tokenizer = load(command.run, screen.note)
    if tokenizer is None:
        raise DataError(f"{command.run}: no tokenizer.json, so it cannot read a prompt; copy one into the folder")
    if command.threads is not None:
        if command.threads < 1:
            raise UserError(f"--threads {command.threads} is not possible; give at least 1")
        torch.set_num_threads(command.threads)
    if command.dtype not in (None, have := weights_of(model)):
        if have != "fp32":
            raise UserError(f"--dtype {command.dtype}: the run's weights are {have}; leave it out")
        model = quantize(model, str(command.dtype))
    model.to(Device.choose(command.device).device)
    _have_it_compiled(model, screen)
    rows = [prompt for prompt in command.prompts for _ in range(command.n)]
    texts, reasons = [""] * len(rows), [""] * len(rows)
    notices: list[str] = []

    def show(chunk: Chunk) -> None:
        """One row streams; several are printed whole, since lines of two texts must not mix."""
        if len(rows) == 1:
            screen.stream(chunk.text)
            if chunk.finish_reason:
                screen.say()
        elif chunk.finish_reason:
            screen.say(f"--- {chunk.row + 1} of {len(rows)} ({chunk.finish_reason})")
            screen.say(rows[chunk.row] + texts[chunk.row])

    with stoppable() as check:
        chunks = stream(
            model,
            tokenizer,
            list(command.prompts),
            max_new_tokens=command.max_new_tokens,
            sampling=command.sampling,
            seed=command.seed,
            n=command.n,
            stop=command.stop,
            context=command.context,
            lookup=command.lookup,
            use_cache=not command.no_cache,
            should_stop=check,
        )
        if len(rows) == 1:
            screen.stream(rows[0])
        for chunk in chunks:
            texts[chunk.row] += chunk.text
            notices += chunk.notices
            reasons[chunk.row] = chunk.finish_reason or ""
            show(chunk)
    for notice in dict.fromkeys(notices):
        screen.note(notice)
    samples = [
        {"prompt": prompt, "text": text, "finish_reason": reason}
        for prompt, text, reason in zip(rows, texts, reasons, strict=True)
    ]
    screen.result(
        {
            "run": command.run,
            "text": texts[0],
            "samples": samples,
            "notices": notices,
            "weights": weights_of(model),
            "cache_bytes_per_token": KVCache(model.config, 1, model.wte.weight.dtype, size=1).bytes_per_token,
        }
    )


def _have_it_compiled(model: "GPT", screen: Screen) -> None:
    """What generates sooner is compiled by another process, for the next time, where it can be and is not yet."""
    from mainstem.generation import compiled, packed

    if packed.unlike(model) is not None or compiled.ready():
        return
    if compiled.underway():
        screen.note("generating by PyTorch; faster kernels are still being compiled")
    elif reason := compiled.failure():
        screen.note(f"generating by PyTorch; faster kernels could not be compiled: {reason}")
    elif compiled.start():
        screen.note("generating by PyTorch; faster kernels are being compiled for the next time")
