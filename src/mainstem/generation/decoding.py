"""Text generation: prompts in, text out as it becomes certain."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import torch

from mainstem.config import MAX_NEW_TOKENS, Sampling
from mainstem.errors import ConfigError, DataError, nearest
from mainstem.generation.engine import Engine
from mainstem.generation.sampling import choose, row_generator
from mainstem.generation.text import Decoder, Utf8Guard, utf8_state
from mainstem.model.gpt import GPT
from mainstem.model.tap import Tap

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer

CONTEXTS = ("slide", "stop")
DEFAULTS = Sampling()
FinishReason = Literal["length", "stop", "eot"]

LOOK_BACK = 256
"""Ids at the end of a text in which a loop is looked for."""
LOOP = 24
"""Ids that a loop has to fill, in at least three turns, before there is a notice of it."""


@dataclass(frozen=True)
class Chunk:
    """What one step added to one row."""

    row: int
    """prompt x n + sample."""
    text: str
    """New text; "" while a character or a possible stop string is incomplete."""
    ids: list[int]
    """New ids, one a step, end of text included."""
    finish_reason: FinishReason | None = None
    """Set in a row's last chunk: `length`, `stop` (a stop string) or `eot`."""
    notices: tuple[str, ...] = ()
    """What the user should know: a prompt that was cut, a text that loops."""


@dataclass(eq=False)
class _Row:
    index: int
    ids: list[int]  # the prompt as it is read, then what was generated
    prompt: int  # how many of them are the prompt
    generator: torch.Generator
    decoder: Decoder
    notices: list[str] = field(default_factory=list)  # for the next chunk
    finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether its last token was chosen."""
        return self.finish_reason is not None


class SamplingOptions(TypedDict, total=False):
    """How the next token is chosen: the fields of `mainstem.Sampling`, with its defaults."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


class Options(SamplingOptions, total=False):
    """The keywords of `stream_text` but `n`, for the functions that pass them on."""

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
    """Continue every prompt; each step yields a chunk for every row that is not finished. The prompt is not repeated.

        for chunk in ms.stream_text(model, tokenizer, ["ROMEO:"], temperature=0.7):
            print(chunk.text, end="", flush=True)

    A row depends on its own prompt, the seed and the number of its sample, never on its neighbours, up to the
    rounding of a batched product (in float32 that hardly ever changes a token; in bfloat16 it can). Several iterators
    over one model do not disturb each other: its mode is changed during a step alone.

    Args:
        model: any GPT. It is in evaluation mode during each step, and as it was between two.
        tokenizer: None with prompts of ids: then the chunks hold ids and no text.
        prompts: texts, or lists of ids; an empty one starts from the end-of-text token. One longer than n_ctx keeps
            its last n_ctx - 1 tokens (at least one), and the row's first chunk has a notice of it.
        max_new_tokens: tokens a row, at most.
        temperature, top_k, top_p, min_p, repetition_penalty: how a token is chosen; `mainstem.Sampling` says how.
        seed: of the row generators, with the number of the sample.
        n: samples a prompt.
        stop: strings that end a text and are not part of it.
        context: what happens to a window of n_ctx tokens when one more comes. `slide`: its last n_ctx // 2 tokens (at
            least one) begin a new one; `stop`: the row finishes with `length`.
        use_cache: False reads the whole window at every step: the same tokens, slower.
        stop_at_eot: whether the end-of-text token ends a row; it is never part of the text.
        guard: whether tokens that would break a UTF-8 character, and special tokens but end of text, are forbidden.
        tap: passed to every forward pass, which PyTorch then computes. The compiled decoder rounds otherwise: to
            compare with a text without a tap, pass `compiled=False` there.
        lookup: prompt lookup decoding for a single row: so many draft tokens a step, taken from the text so far. The
            text is the same to the bit; it takes fewer steps where it repeats itself, with the compiled decoder.
        compiled: whether the compiled decoder is used where it is there and supports the model.
        should_stop: called before each step; it may raise.

    Raises ConfigError or DataError before anything is read; RunError if the logits are not finite.
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
        raise ConfigError(f"stop: {stop!r} is text, and there is no tokenizer to make any; give one")
    V, n_ctx = model.config.vocab_size, model.config.n_ctx
    if tokenizer is not None and tokenizer.vocab_size > V:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {V}; give the one it was trained with"
        )
    token_bytes = tokenizer.token_bytes if tokenizer is not None else [b""] * V
    eot_id = tokenizer.eot_id if tokenizer is not None else None
    forbidden = None
    if guard and tokenizer is not None:
        forbidden = torch.from_numpy(Utf8Guard(token_bytes, eot_id).forbidden).to(model.wte.weight.device)

    rows = []
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    listed: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
    for number, prompt in enumerate(listed):
        ids, notices = _prompt_ids(number, prompt, tokenizer, len(token_bytes), n_ctx)
        before = b"".join(token_bytes[i] for i in ids)
        for sample in range(n):
            decoder, generator = Decoder(stops, before), row_generator(seed, sample)
            rows.append(_Row(number * n + sample, list(ids), len(ids), generator, decoder, list(notices)))

    if lookup and len(rows) > 1:
        raise ConfigError(f"lookup: {lookup} is for a single row, and there are {len(rows)}; leave it out")

    def finish_reason(row: _Row) -> FinishReason | None:
        if stop_at_eot and row.ids[-1] == eot_id:
            return "eot"
        if row.decoder.stopped:
            return "stop"
        outgrown = context == "stop" and len(row.ids) > n_ctx
        return "length" if outgrown or len(row.ids) - row.prompt == max_new_tokens else None

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
                seen=[set(row.ids) for row in live] if sampling.repetition_penalty != 1 else (),
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
        options: keywords of `stream_text`, with its defaults.
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
    """The continuations of several prompts, read as one batch: n a prompt, in the order of prompts and samples.

    The arguments are those of `stream_text`.
    """
    texts = [""] * (len(prompts) * n)
    for chunk in stream_text(model, tokenizer, prompts, n=n, **options):
        texts[chunk.row] += chunk.text
    return texts


def generate_ids(
    model: GPT, prompts: Sequence[Sequence[int]], *, n: int = 1, **options: Unpack[Options]
) -> list[list[int]]:
    """The new ids of each row, for callers without a tokenizer; the arguments are those of `stream_text`.

    Only `max_new_tokens` and the context end a row, and no token is forbidden.
    """
    rows: list[list[int]] = [[] for _ in range(len(prompts) * n)]
    for chunk in stream_text(model, None, prompts, n=n, **options):
        rows[chunk.row] += chunk.ids
    return rows


def _prompt_ids(
    number: int, prompt: str | Sequence[int], tokenizer: "Tokenizer | None", V: int, n_ctx: int
) -> tuple[list[int], list[str]]:
    """The ids of a prompt that are read, and notices. Raises DataError for ids out of range, and for no id at all."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise DataError(f"prompt {number} is a text, and there is no tokenizer for it; give ids, or a tokenizer")
        ids = tokenizer.encode(prompt)
    else:
        ids = [int(i) for i in prompt]
    for i in ids:
        if not 0 <= i < V:
            raise DataError(f"prompt {number}: token id {i} is outside 0..{V - 1}; is it another tokenizer's?")
    if not ids:
        if tokenizer is None or tokenizer.eot_id is None:
            raise DataError(f"prompt {number} is empty, and no end-of-text token can stand for it; give it a token")
        ids = [tokenizer.eot_id]
    if len(ids) <= n_ctx:
        return ids, []
    kept = max(1, n_ctx - 1)
    notice = f"prompt {number}: {len(ids)} tokens do not fit the context of {n_ctx}; only the last {kept} were read"
    return ids[-kept:], [notice]


def _loop_notice(ids: list[int]) -> list[str]:
    """A notice if the text ends in a loop: three or more turns of the same ids, LOOP of them or more in all."""
    ids = ids[-LOOK_BACK:]
    for period in range(1, len(ids) // 3 + 1):
        looped = max(3, -(-LOOP // period)) * period
        if looped <= len(ids) and ids[-looped:-period] == ids[period - looped :]:
            return [
                f"the last {looped} tokens are {looped // period} turns of the same {period}; "
                "try a higher temperature or repetition penalty"
            ]
    return []
