"""`mainstem generate RUN "prompt"`: text from a trained model, as it becomes certain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from mainstem.cli.parts.arguments import Flat, Positional, parse
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.config import MAX_NEW_TOKENS, Sampling
from mainstem.errors import DataError, UserError

if TYPE_CHECKING:
    from mainstem.model.gpt import GPT


@dataclass(frozen=True)
class Generate:
    """Continue prompts with a trained model."""

    run: Positional[str]
    """A run folder, a checkpoint inside one, a folder in Hugging Face's GPT-2 layout, or a bundled model (bard)."""
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="[PROMPT ...]")] = ("",)
    """Texts to continue; several are one batch; an empty one starts a document."""
    max_new_tokens: int = MAX_NEW_TOKENS
    """The most tokens to generate for each prompt."""
    seed: int = 1
    """Random seed of the sampling."""
    n: int = 1
    """Samples for each prompt."""
    stop: Annotated[tuple[str, ...], arg(metavar="STR ...")] = ()
    """Strings that end the text; they are not printed."""
    context: Literal["slide", "stop"] = "slide"
    """Past the context: slide to its last half, or stop."""
    weights: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """Weight precision: bf16 and int8 quantize the matrices, which is faster; auto: as the run stores them."""
    lookup: int = 0
    """Prompt lookup decoding: draft tokens a step, taken from the text so far; for one prompt and one sample."""
    threads: int = 0
    """CPU threads; 0: PyTorch's default."""
    cache: bool = True
    """Keep keys and values of earlier positions; without a cache the text is the same, slower."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1, mps."""
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
    from mainstem.generation.decoding import Chunk, stream_text
    from mainstem.model.quantized import quantize, weights_of
    from mainstem.training.device import Device

    model, tokenizer = load(command.run, screen.note)
    if tokenizer is None:
        raise DataError(f"{command.run}: no tokenizer.json, so it cannot read a prompt; copy one into the folder")
    if command.threads < 0:
        raise UserError(f"--threads {command.threads} is not possible; give at least 1, or 0 for PyTorch's default")
    if command.threads:
        torch.set_num_threads(command.threads)
    if command.weights not in ("auto", stored := weights_of(model)):
        if stored != "fp32":
            raise UserError(f"--weights {command.weights}: the run's weights are {stored}; leave it out")
        model = quantize(model, command.weights)
    model.to(Device.choose(command.device).device)
    _note_decoder(model, screen)
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
        chunks = stream_text(
            model,
            tokenizer,
            list(command.prompts),
            max_new_tokens=command.max_new_tokens,
            **command.sampling.to_dict(),
            seed=command.seed,
            n=command.n,
            stop=command.stop,
            context=command.context,
            lookup=command.lookup,
            use_cache=command.cache,
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


def _note_decoder(model: "GPT", screen: Screen) -> None:
    """Say why PyTorch decodes, if it does on a CPU with Numba; have the decoder compiled for the next time."""
    from mainstem.generation.compiled import store, unsupported

    if model.wte.weight.device.type != "cpu" or store.folder() is None:
        return
    if reason := unsupported(model):
        screen.note(f"PyTorch decodes: the compiled decoder does not support this model ({reason})")
    elif store.ready():
        return
    elif store.underway():
        screen.note("PyTorch decodes; the compiled decoder is still being compiled")
    elif reason := store.failure():
        screen.note(f"PyTorch decodes; the compiled decoder could not be compiled: {reason}")
    elif store.start():
        screen.note("PyTorch decodes; a process in the background compiles the faster decoder (see mainstem compile)")
