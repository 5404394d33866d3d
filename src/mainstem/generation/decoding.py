"""Text generation from prompts: as a stream of chunks, as texts, or as ids."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch

from mainstem.config import MAX_NEW_TOKENS, Sampling
from mainstem.errors import ConfigError, DataError, nearest
from mainstem.generation.engine import Engine
from mainstem.generation.sampling import choose, row_generator
from mainstem.generation.utf8 import TextDecoder, Utf8Guard, utf8_state
from mainstem.model.gpt import GPT
from mainstem.model.tap import Tap

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

CONTEXTS = ("slide", "stop")
DEFAULTS = Sampling()
FinishReason = Literal["length", "stop", "eot"]

LOOK_BACK = 256
"""Ids at the end of a text that are searched for a loop."""
LOOP = 24
"""Least length of a loop in ids, at least three turns, for a notice."""


@dataclass(frozen=True)
class Chunk:
    """The output of one step for one row."""

    row: int
    """The index of the row: prompt x n + sample."""
    text: str
    """The new text; "" while a character or a possible stop string is incomplete."""
    ids: list[int]
    """The new ids, one a step, end of text included."""
    finish_reason: FinishReason | None = None
    """The reason in a row's last chunk: `length`, `stop` (a stop string) or `eot`; else None."""
    notices: tuple[str, ...] = ()
    """Notices for the user: a truncated prompt, a text that loops."""


@dataclass(eq=False)
class _Row:
    index: int
    ids: list[int]  # the prompt, then the generated ids
    prompt: int  # the number of prompt ids
    generator: torch.Generator
    decoder: TextDecoder
    notices: list[str] = field(default_factory=list)  # for the next chunk
    finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether the row is complete."""
        return self.finish_reason is not None


class SamplingOptions(TypedDict, total=False):
    """Sampling keywords: the fields of `mainstem.Sampling`, with its defaults."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


class Options(SamplingOptions, total=False):
    """The keywords of `stream_text` except `n`, for functions that pass them on."""

    max_new_tokens: int
    seed: int
    stop: str | Sequence[str]
    context: str
    use_cache: bool
    stop_at_eot: bool
    guard: bool
    tap: Tap | None
    lookup: int
    compiled: bool
    should_stop: Callable[[], None]


def stream_text(
    model: GPT,
    tokenizer: "Tokenizer | None",
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = DEFAULTS.temperature,
    top_k: int = DEFAULTS.top_k,
    top_p: float = DEFAULTS.top_p,
    min_p: float = DEFAULTS.min_p,
    repetition_penalty: float = DEFAULTS.repetition_penalty,
    seed: int = 1,
    n: int = 1,
    stop: str | Sequence[str] = (),
    context: str = "slide",
    use_cache: bool = True,
    stop_at_eot: bool = True,
    guard: bool = True,
    tap: Tap | None = None,
    lookup: int = 0,
    compiled: bool = True,
    should_stop: Callable[[], None] = lambda: None,
) -> Iterator[Chunk]:
    """Continue every prompt; each step yields a chunk for every unfinished row. Chunks do not repeat the prompt.

        for chunk in ms.stream_text(model, tokenizer, ["ROMEO:"], temperature=0.7):
            print(chunk.text, end="", flush=True)

    A row depends on its prompt, the seed and its sample number, not on the other rows of the batch, up to the rounding
    of batched products (which can change a token in bfloat16, hardly ever in float32). Several iterators over one model
    are independent: the model's mode changes only during a step.

    Args:
        model: any GPT. It is in evaluation mode during each step; its mode is restored after it.
        tokenizer: None if prompts are ids; then the chunks have ids and no text.
        prompts: texts, or lists of ids; an empty one starts from the end-of-text token. A prompt longer than n_ctx is
            truncated to its last n_ctx - 1 tokens (at least one), and the row's first chunk has a notice.
        max_new_tokens: the most tokens to generate for a row.
        temperature, top_k, top_p, min_p, repetition_penalty: sampling parameters; see `mainstem.Sampling`.
        seed: the seed of the row generators, together with the sample number.
        n: the number of samples for each prompt.
        stop: strings that end a text; they are not part of it.
        context: what happens when a window of n_ctx tokens is full. `slide`: its last n_ctx // 2 tokens (at least one)
            begin a new window; `stop`: the row finishes with `length`.
        use_cache: whether to use a KV cache. Without it every step reads the whole window: the same tokens, slower.
        stop_at_eot: whether the end-of-text token ends a row; it is never part of the text.
        guard: whether to forbid tokens that would make invalid UTF-8, and special tokens except end of text.
        tap: a tap for every forward pass; PyTorch then decodes. The compiled decoder rounds differently: to compare
            with a text without a tap, generate that one with `compiled=False`.
        lookup: draft tokens per step of prompt lookup decoding, for a single row. The text is bit-identical; it takes
            fewer steps where it repeats itself, with the compiled decoder.
        compiled: whether to use the compiled decoder where it is available and supports the model.
        should_stop: called before each step; it may raise.

    Raises ConfigError or DataError before the first step; RunError if the logits are not finite.
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    numbers = {"max_new_tokens": (max_new_tokens, 1), "n": (n, 1), "seed": (seed, 0), "lookup": (lookup, 0)}
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}: {value!r} is not possible; it must be a whole number, at least {least}")
    if context not in CONTEXTS:
        raise ConfigError(f"context: unknown value {context!r}; {nearest(context, CONTEXTS)}")
    if stop and tokenizer is None:
        raise ConfigError(f"stop: {stop!r} is a text, and there is no tokenizer; give `tokenizer`")
    V, n_ctx = model.config.vocab_size, model.config.n_ctx
    if tokenizer is not None and tokenizer.vocab_size > V:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {V}; give the model's own tokenizer"
        )
    token_bytes = tokenizer.token_bytes if tokenizer is not None else [b""] * V
    eot_id = tokenizer.eot_id if tokenizer is not None else None
    forbidden = None
    if guard and tokenizer is not None:
        forbidden = torch.from_numpy(Utf8Guard(token_bytes, eot_id).forbidden).to(model.wte.weight.device)

    rows = []
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for number, prompt in enumerate(_listed(prompts)):
        ids, notices = _prompt_ids(number, prompt, tokenizer, len(token_bytes), n_ctx)
        before = b"".join(token_bytes[i] for i in ids)
        for sample in range(n):
            decoder, generator = TextDecoder(stops, before), row_generator(seed, sample)
            rows.append(_Row(number * n + sample, list(ids), len(ids), generator, decoder, list(notices)))

    if lookup and len(rows) > 1:
        raise ConfigError(f"lookup: {lookup} is for a single row, and there are {len(rows)}; leave it out")

    def finish_reason(row: _Row) -> FinishReason | None:
        if stop_at_eot and row.ids[-1] == eot_id:
            return "eot"
        if row.decoder.stopped:
            return "stop"
        context_full = context == "stop" and len(row.ids) > n_ctx
        return "length" if context_full or len(row.ids) - row.prompt == max_new_tokens else None

    def take(row: _Row, i: int) -> Chunk:
        row.ids.append(i)
        text = row.decoder.feed(token_bytes[i])
        row.finish_reason = finish_reason(row)
        if row.finish_reason is not None:
            text += row.decoder.flush()
        if row.finish_reason == "length":
            row.notices += _loop_notice(row.ids[row.prompt :])
        notices, row.notices = tuple(row.notices), []
        return Chunk(row.index, text, [i], row.finish_reason, notices)

    def steps() -> Iterator[Chunk]:
        live, engine = rows, Engine(model, use_cache, tap, max_new_tokens, lookup, compiled)
        with contextlib.closing(engine):
            while live:
                should_stop()
                chosen = choose_next(engine, live)
                for row, i in zip(live, chosen, strict=True):
                    yield take(row, i)
                live = [row for row in live if not row.finished]

    def choose_next(engine: Engine, live: list[_Row]) -> list[int]:
        with torch.inference_mode():
            logits = engine.logits(live)[:, : len(token_bytes)]  # (B, V); beyond it is padding
            states = [utf8_state(row.decoder.pending) for row in live]
            return choose(
                logits,
                sampling,
                [row.generator for row in live],
                previous=[set(row.ids) for row in live] if sampling.repetition_penalty != 1 else (),
                forbidden=forbidden[states] if forbidden is not None else None,
            )

    return steps()


def generate(model: GPT, tokenizer: "Tokenizer", prompt: str | Sequence[int], **options: Unpack[Options]) -> str:
    """The continuation of one prompt, without the prompt.

        text = ms.generate(model, tokenizer, "ROMEO:", max_new_tokens=100, temperature=0.7)

    Args:
        model: any GPT.
        tokenizer: the model's.
        prompt: a text, or its ids.
        options: keywords of `stream_text`.
    """
    (text,) = generate_batch(model, tokenizer, [prompt], n=1, **options)  # type: ignore[arg-type]
    return text


def generate_batch(
    model: GPT,
    tokenizer: "Tokenizer",
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    n: int = 1,
    **options: Unpack[Options],
) -> list[str]:
    """The continuations of several prompts, generated as one batch: n for each, in the order of prompts and samples.

    The arguments are those of `stream_text`.
    """
    if tokenizer is None:
        raise ConfigError("tokenizer: there is none to make text with; give one, or call generate_ids")
    listed = _listed(prompts)
    texts = [""] * (len(listed) * n)
    for chunk in stream_text(model, tokenizer, listed, n=n, **options):
        texts[chunk.row] += chunk.text
    return texts


def generate_ids(
    model: GPT, prompts: Sequence[Sequence[int]], *, n: int = 1, **options: Unpack[Options]
) -> list[list[int]]:
    """The generated ids of each row, without a tokenizer; the arguments are those of `stream_text`.

    A row ends only by `max_new_tokens` or the context, and no token is forbidden.
    """
    listed = _listed(prompts)
    rows: list[list[int]] = [[] for _ in range(len(listed) * n)]
    for chunk in stream_text(model, None, listed, n=n, **options):
        rows[chunk.row] += chunk.ids
    return rows


def _listed(prompts: Sequence[str] | Sequence[Sequence[int]]) -> Any:
    """The prompts as a list; one text is a list of one. Raises ConfigError for ids that are no list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if any(isinstance(prompt, int) for prompt in prompts):
        raise ConfigError("prompts: these are the ids of one prompt; give a list of prompts, [[1, 2, 3]]")
    return list(prompts)


def _prompt_ids(
    number: int, prompt: str | Sequence[int], tokenizer: "Tokenizer | None", V: int, n_ctx: int
) -> tuple[list[int], list[str]]:
    """The ids of a prompt, truncated to the context, and notices. Raises DataError for ids out of range or none."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise DataError(f"prompt {number} is a text, and there is no tokenizer; give ids, or `tokenizer`")
        ids = tokenizer.encode(prompt)
    else:
        ids = [int(i) for i in prompt]
    for i in ids:
        if not 0 <= i < V:
            raise DataError(f"prompt {number}: token id {i} is outside 0..{V - 1}; is it another tokenizer's?")
    if not ids:
        if tokenizer is None or tokenizer.eot_id is None:
            raise DataError(f"prompt {number} is empty, and there is no end-of-text token to start from; give a token")
        ids = [tokenizer.eot_id]
    if len(ids) <= n_ctx:
        return ids, []
    limit = max(1, n_ctx - 1)
    notice = f"prompt {number}: {len(ids)} tokens do not fit the context of {n_ctx}; only the last {limit} were read"
    return ids[-limit:], [notice]


def _loop_notice(ids: list[int]) -> list[str]:
    """A notice if the text ends in a loop: at least three turns of the same ids, at least LOOP ids in all."""
    ids = ids[-LOOK_BACK:]
    for period in range(1, len(ids) // 3 + 1):
        looped = max(3, -(-LOOP // period)) * period
        if looped <= len(ids) and ids[-looped:-period] == ids[period - looped :]:
            return [
                f"the last {looped} tokens are {looped // period} repetitions of the same {period}; "
                "try a higher temperature or repetition penalty"
            ]
    return []
