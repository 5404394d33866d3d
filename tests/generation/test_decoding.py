import dataclasses
import inspect
import itertools
import math

import pytest
import torch

from mainstem.cli.generate import Generate
from mainstem.config import ModelConfig, Sampling
from mainstem.errors import ConfigError, DataError, UserError
from mainstem.generation.decoding import Options, generate, generate_batch, generate_ids, stream_text
from mainstem.generation.engine import window_start
from mainstem.model.gpt import GPT
from mainstem.model.tap import Recorder
from mainstem.text.tokenizer import Bytes

GREEDY = {"temperature": 0}
WILD = {"temperature": 2.0}


class Words:
    """A tokenizer of a few words; the last id, without bytes, ends a text."""

    def __init__(self, *words, eot=True):
        self.token_bytes = [word if isinstance(word, bytes) else word.encode() for word in words] + [b""] * eot
        self.vocab_size = len(self.token_bytes)
        self.eot_id = len(words) if eot else None

    def encode(self, text):
        return [self.token_bytes.index(text.encode())] if text else []


class Scripted(GPT):
    """Says what it is told: `script[row][step]`."""

    def __init__(self, script, vocab_size, n_ctx=64):
        super().__init__(ModelConfig(vocab_size=vocab_size, n_ctx=n_ctx, n_layer=0, n_head=1, d_model=4))
        self.steps = zip(*script, strict=True)

    def unembed(self, x, tap=None):
        assert x.shape[1] == 1  # the head sees the last position only
        return torch.nn.functional.one_hot(torch.tensor(next(self.steps)), self.config.vocab_size)[:, None] * 9.0


def scripted(words, *rows):
    """A tokenizer of these words, and a model that will say these rows of ids."""
    tokenizer = Words(*words)
    return Scripted([list(row) + [0] * 40 for row in rows], tokenizer.vocab_size), tokenizer


def some_ids(*lengths, vocab=97):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


def naive(model, ids, count, n_ctx):
    """Greedy generation in its plainest form: a window that is cut to its last n_ctx // 2 when it is full."""
    window, out = list(ids), []
    for _ in range(count):
        if len(window) > n_ctx:
            window = window[-max(1, n_ctx // 2) :]
        with torch.no_grad():
            out.append(int(model(torch.tensor([window]))[0, -1].argmax()))
        window.append(out[-1])
    return out


# --- the window and the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 8, 9])
def test_window_start_is_the_plain_rule(n_ctx):
    start = 0
    for length in range(1, 6 * n_ctx + 9):
        if length - start > n_ctx:
            start = length - max(1, n_ctx // 2)
        assert window_start(length, n_ctx) == start


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"position": "rotary", "residual": "post", "qk_norm": True},
        {"position": "none", "norm": "rmsnorm", "residual": "sandwich"},
        {"d_mlp": 0},
        {"n_layer": 0},
        {"n_ctx": 1},
        {"n_ctx": 2, "position": "rotary"},
        {"n_ctx": 7},
    ],
    ids=str,
)
def test_sliding_with_and_without_a_cache_is_the_plain_loop(lively, fields):
    """Law 7, over three contexts of new tokens, in a batch of different lengths."""
    model = lively(**fields)
    n_ctx = model.config.n_ctx
    prompts = some_ids(*sorted({1, n_ctx // 2 or 1, n_ctx}))
    wanted = [naive(model, ids, 3 * n_ctx, n_ctx) for ids in prompts]
    for use_cache in (True, False):
        options = {"max_new_tokens": 3 * n_ctx, **GREEDY, "use_cache": use_cache}
        assert generate_ids(model, prompts, **options) == wanted


def test_the_plain_loop_says_many_things(lively):
    """Else the test above could not fail."""
    assert len(set(naive(lively(), some_ids(5)[0], 36, 12))) > 8


@pytest.mark.parametrize("context", ["slide", "stop"])
def test_a_sampled_row_of_a_batch_is_the_row_alone(lively, context):
    """Lengths 1, 7, 31; the seed and the row's own prompt decide, also when windows slide."""
    model = lively(n_ctx=32)
    prompts = some_ids(1, 7, 31, 32)
    options = {"max_new_tokens": 80, **WILD, "n": 2, "context": context}
    batch = generate_ids(model, prompts, **options)
    alone = [row for prompt in prompts for row in generate_ids(model, [prompt], **options)]
    assert batch == alone
    assert len({tuple(row) for row in batch}) == 8
    assert {len(row) for row in batch} == ({80} if context == "slide" else {32, 26, 2, 1})


def test_pytorch_reads_nothing_ahead(lively, monkeypatch):
    """Prompt lookup is the compiled decoder's; without it `lookup` changes neither the text nor what is read."""
    model, reads, stream_of = lively(), [], GPT.stream

    def noting(self, ids, **rest):
        reads.append(ids.shape[1])
        return stream_of(self, ids, **rest)

    monkeypatch.setattr(GPT, "stream", noting)
    texts = [generate_ids(model, [[1, 2, 1, 2]], max_new_tokens=5, lookup=lookup, seed=3) for lookup in (0, 3)]
    assert texts[0] == texts[1]
    assert reads == [4, 1, 1, 1, 1] * 2


def test_the_model_reads_one_token_a_step(lively, monkeypatch):
    model, reads, heads = lively(), [], []
    stream_of, unembed = GPT.stream, GPT.unembed

    def noting_stream(self, ids, **rest):
        reads.append(tuple(ids.shape))
        return stream_of(self, ids, **rest)

    def noting_unembed(self, x, tap):
        heads.append(tuple(x.shape[:2]))
        return unembed(self, x, tap)

    monkeypatch.setattr(GPT, "stream", noting_stream)
    monkeypatch.setattr(GPT, "unembed", noting_unembed)
    generate_ids(model, some_ids(3, 5), max_new_tokens=14)
    one = (2, 1)
    assert reads == [(2, 5), *[one] * 7, (2, 11), one, (2, 8), *[one] * 3]  # anew where one of them slides
    assert heads == [one] * 14
    reads.clear()
    generate_ids(model, some_ids(3, 5), max_new_tokens=4, use_cache=False)
    assert reads == [(2, 5), (2, 6), (2, 7), (2, 8)]


def test_finished_rows_change_nothing_for_the_others(lively):
    """Rows that leave early, before and after windows slide."""
    model, prompts = lively(vocab_size=257), ["ab", "cdefgh", "i", "jklmnopq"]
    texts = generate_batch(model, Bytes(), prompts, max_new_tokens=70, **WILD, stop=["a", "e", "x", "7"])
    lengths = {len(text) for text in texts}
    assert len(lengths) > 2
    for prompt, text in zip(prompts, texts, strict=True):
        options = {"max_new_tokens": 70, **WILD, "stop": ["a", "e", "x", "7"]}
        assert generate(model, Bytes(), prompt, **options) == text


def test_float32_with_a_cache_says_what_it_says_without(lively):
    """Law 7 in the dtype that people use."""
    model = lively(torch.float32)
    options = {"max_new_tokens": 36, **GREEDY}
    prompts = some_ids(2, 9)
    assert generate_ids(model, prompts, **options) == generate_ids(model, prompts, use_cache=False, **options)


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_keeps_its_end_and_says_so(lively):
    model, [prompt] = lively(), some_ids(36)
    chunks = list(stream_text(model, None, [prompt, prompt[:3]], max_new_tokens=5, **GREEDY))
    notices = {chunk.row: chunk.notices for chunk in chunks[:2]}
    assert notices == {0: ("prompt 0: 36 tokens do not fit the context of 12; only the last 11 were read",), 1: ()}
    assert not any(chunk.notices for chunk in chunks[2:])
    assert [chunk.ids[0] for chunk in chunks if chunk.row == 0] == naive(model, prompt[-11:], 5, 12)


def test_an_empty_prompt_starts_from_the_end_of_text():
    model, tokenizer = scripted(["a", "b"], [1, 0, 2])
    assert generate(model, tokenizer, "", max_new_tokens=5) == "ba"
    model, _ = scripted(["a", "b"], [1])
    with pytest.raises(DataError, match=r"prompt 1 is empty, .* give a token"):
        stream_text(model, Words("a", "b", eot=False), ["a", ""], max_new_tokens=1)
    with pytest.raises(DataError, match="prompt 0 is empty"):
        generate_ids(model, [[]], max_new_tokens=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: 0 .* at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: 1.5 .* whole number"),
        ({"max_new_tokens": "5"}, "max_new_tokens: '5' .* whole number"),
        ({"max_new_tokens": math.nan}, "max_new_tokens: nan .* whole number"),
        ({"n": 0}, "n: 0 .* at least 1"),
        ({"seed": -1}, "seed: -1 .* at least 0"),
        ({"context": "slyde"}, "context: unknown value 'slyde'; did you mean 'slide'"),
        ({"stop": ""}, "stop: '' would end every text"),
        ({"stop": ["a", ""]}, "stop: '' would end every text"),
        ({"prompts": [[0], [5]]}, "prompt 1: token id 5 is outside 0..2"),
        ({"prompts": [[-(2**63)]]}, "outside 0..2"),
        ({"tokenizer": None, "prompts": [[0]], "stop": "a"}, "stop: 'a' is a text, .* give `tokenizer`"),
        ({"tokenizer": None}, "prompt 0 is a text, .* give ids, or `tokenizer`"),
        ({"tokenizer": Bytes()}, "the tokenizer has 257 tokens and the model 3"),
    ],
)
def test_nonsense_is_refused_at_the_call(changes, message):
    model, tokenizer = scripted(["a", "b"], [0])
    arguments = {"model": model, "tokenizer": tokenizer, "prompts": ["a"], "max_new_tokens": 1} | changes
    with pytest.raises(UserError, match=message):
        stream_text(**arguments)  # nothing is read, and nothing has to be


def test_a_character_that_a_prompt_of_ids_leaves_open_is_completed(lively):
    model, head = lively(vocab_size=257), "안".encode()[:2]
    for seed in range(20):
        text = generate_batch(model, Bytes(), [list(b"ab" + head)], max_new_tokens=9, **WILD, seed=seed)[0]
        assert (head + bytes([text[0].encode()[-1]])).decode() == text[0]
        assert "\ufffd" not in text


# --- what ends a row -------------------------------------------------------------------------------------------------

WORDS = ["the br", "own", " f", "ox", ".", "rog"]


@pytest.mark.parametrize(
    ("said", "options", "text", "reason"),
    [
        ([0, 1, 2, 3, 4], {"stop": "own fox"}, "the br", "stop"),
        ([0, 1, 2, 3, 4], {"stop": ["zzz", "fox."]}, "the brown ", "stop"),
        ([0, 1, 2, 5, 4], {"stop": ["own fox"]}, "the brown frog.", "length"),
        ([0, 1, 2], {"stop": ["own fox"]}, "the brown f", "length"),
        ([0, 1, 6, 3, 4], {"stop": ["own fox"]}, "the brown", "eot"),  # what was held back is not lost
        ([0, 6, 3], {}, "the br", "eot"),
        ([6, 3], {}, "", "eot"),
        ([0, 6, 3], {"stop_at_eot": False}, "the brox", "length"),
    ],
)
def test_what_ends_a_text(said, options, text, reason):
    """Streamed and not streamed alike."""
    count = len(said)
    model, tokenizer = scripted(WORDS, said)
    chunks = list(stream_text(model, tokenizer, ["the br"], max_new_tokens=count, **options))
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
    assert [i for chunk in chunks for i in chunk.ids] == said[: len(chunks)]
    model, tokenizer = scripted(WORDS, said)
    assert generate(model, tokenizer, "the br", max_new_tokens=count, **options) == text


def test_rows_of_a_batch_end_each_in_its_own_way():
    model, tokenizer = scripted(WORDS, [0, 1, 2, 3, 4], [6, 1, 1, 1, 1], [0, 4, 1, 1, 1])
    chunks = list(stream_text(model, tokenizer, ["own"] * 3, max_new_tokens=5, stop="."))
    ends = {chunk.row: (step, chunk.finish_reason) for step, chunk in enumerate(chunks) if chunk.finish_reason}
    assert {row: reason for row, (_, reason) in ends.items()} == {0: "stop", 1: "eot", 2: "stop"}
    assert [chunk.row for chunk in chunks] == [0, 1, 2, 0, 2, 0, 0, 0]


def test_characters_and_emoji_over_tokens_stream_whole():
    text = "안녕👩‍👩‍👧"
    tokenizer = Bytes()
    said = tokenizer.encode(text)
    chunks = list(stream_text(Scripted([said], 257), tokenizer, ["a"], max_new_tokens=len(said)))
    assert "".join(chunk.text for chunk in chunks) == text
    cut = list(stream_text(Scripted([said], 257), tokenizer, ["a"], max_new_tokens=len(said) - 1))
    assert "".join(chunk.text for chunk in cut) == text[:-1]


# --- characters, padding, samples ------------------------------------------------------------------------------------


def test_the_guard_and_only_the_guard_keeps_characters_whole(lively):
    model = lively(vocab_size=257)
    options = {"max_new_tokens": 150, "temperature": 5.0, "n": 4, "stop_at_eot": False}
    for guard, broken in ((True, False), (False, True)):
        said: dict[int, bytes] = {}
        texts = dict.fromkeys(range(4), "")
        for chunk in stream_text(model, Bytes(), ["한글"], guard=guard, **options):
            said[chunk.row] = said.get(chunk.row, b"") + Bytes.token_bytes[chunk.ids[0]]
            texts[chunk.row] += chunk.text
        assert any("\ufffd" in text for text in texts.values()) == broken
        if guard:
            assert all(said[row].decode("utf-8", "ignore") == text for row, text in texts.items())
            assert any(len(character.encode()) > 2 for text in texts.values() for character in text)


def test_padded_vocabulary_is_never_sampled(lively):
    model = lively(torch.float32, vocab_size=320)
    for guard in (True, False):
        chunks = stream_text(model, Bytes(), ["a"], max_new_tokens=500, **WILD, stop_at_eot=False, guard=guard)
        assert max(chunk.ids[0] for chunk in chunks) < 257
    assert max(itertools.chain(*generate_ids(model, [[1]], max_new_tokens=500, **WILD))) > 300


def test_samples_differ_from_each_other_and_are_fixed_by_the_seed(lively):
    model = lively(vocab_size=257)
    options = {"max_new_tokens": 30, **WILD}
    three = generate_batch(model, Bytes(), ["ab"], n=3, **options)
    assert three == generate_batch(model, Bytes(), ["ab"], n=3, **options)
    assert len(set(three)) == 3
    assert three[0] == generate(model, Bytes(), "ab", **options)
    assert set(three).isdisjoint(generate_batch(model, Bytes(), ["ab"], n=3, seed=2, **options))
    many = generate_batch(model, Bytes(), ["cd", "ab"], n=3, **options)
    assert many[3:] == three  # row = prompt x n + sample


def test_the_penalty_counts_the_prompt_and_the_text_and_1_is_off(lively):
    model, prompts = lively(), some_ids(4, 6)
    options = {"max_new_tokens": 24, "seed": 3}
    plain = generate_ids(model, prompts, temperature=0.7, **options)
    assert generate_ids(model, prompts, temperature=0.7, repetition_penalty=1.0, **options) == plain
    hard = generate_ids(model, prompts, temperature=0, repetition_penalty=1e9, **options)
    for prompt, row in zip(prompts, hard, strict=True):
        assert len({*prompt, *row}) == len(set(prompt)) + 24  # nothing is said twice, nor repeated from the prompt


def test_a_text_that_loops_ends_with_a_notice():
    words = ["a", "b", "c", "d"]
    model, tokenizer = scripted(
        words, [3] * 3 + [0, 1, 2] * 9, [3, 0, 1, 2, 0] * 3 + [1, 1, 2, 3, 2, 2] * 2 + [1, 2, 0]
    )
    *_, loops, plain = stream_text(model, tokenizer, ["a", "b"], max_new_tokens=30)
    assert loops.notices == (
        "the last 24 tokens are 8 repetitions of the same 3; try a higher temperature or repetition penalty",
    )
    assert plain.notices == ()


# --- manners ---------------------------------------------------------------------------------------------------------


def test_the_model_is_in_eval_mode_and_then_as_it_was(lively):
    model = lively(dropout=0.5)
    quiet = generate_ids(model, some_ids(3), max_new_tokens=9)
    model.train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    assert generate_ids(model, some_ids(3), max_new_tokens=9) == quiet
    assert [module.training for module in model.modules()] == before
    started = stream_text(model, None, some_ids(3), max_new_tokens=9)
    next(started)
    assert [module.training for module in model.modules()] == before
    started.close()
    assert [module.training for module in model.modules()] == before


def test_texts_of_one_model_do_not_disturb_each_other(lively):
    """Two at once, on a model that is being trained: each is the text that it is alone, whichever ends first."""
    model = lively(dropout=0.5)
    options = {"max_new_tokens": 9, **WILD}
    alone = [generate_ids(model, some_ids(length), **options)[0] for length in (3, 5)]
    model.train()
    short = stream_text(model, None, some_ids(3), **options | {"max_new_tokens": 3})
    long = stream_text(model, None, some_ids(5), **options)
    pairs = list(itertools.zip_longest(short, long))
    assert [i for first, _ in pairs if first for i in first.ids] == alone[0][:3]
    assert [i for _, second in pairs for i in second.ids] == alone[1]
    assert model.training


def test_the_keywords_are_those_of_sampling_and_of_the_command_line():
    """One set of names and defaults, in the library and on the command line."""
    keywords = {
        name: parameter.default
        for name, parameter in inspect.signature(stream_text).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert Options.__annotations__.keys() == keywords.keys() - {"n"}
    assert {name: keywords[name] for name in Sampling.field_names()} == Sampling().to_dict()
    command = {field.name: field.default for field in dataclasses.fields(Generate)}
    shared = keywords.keys() & command.keys()
    assert shared >= {"max_new_tokens", "seed", "n", "stop", "context", "lookup"}
    assert {name: keywords[name] for name in shared} == {name: command[name] for name in shared}


def test_what_is_returned_does_not_depend_on_the_arguments(lively):
    model = lively(vocab_size=257)
    options = {"max_new_tokens": 3, "temperature": 0.5}
    assert isinstance(generate(model, Bytes(), "ab", **options), str)
    assert generate(model, Bytes(), list(b"ab"), **options) == generate(model, Bytes(), "ab", **options)
    assert generate_batch(model, Bytes(), ["ab"], **options) == [generate(model, Bytes(), "ab", **options)]
    with pytest.raises(ConfigError, match="temperature: -1"):
        generate(model, Bytes(), "ab", temperature=-1.0)
    with pytest.raises(TypeError, match="n"):
        generate(model, Bytes(), "ab", n=2)


def test_the_caller_can_train_between_chunks(lively):
    """Inference mode does not leak through a yield."""
    model = lively()
    for _ in stream_text(model, None, some_ids(3), max_new_tokens=3):
        assert not torch.is_inference_mode_enabled()
        model(torch.tensor([[1, 2]])).sum().backward()
    assert model.wte.weight.grad is not None


def test_should_stop_is_asked_before_every_step(lively):
    class Enough(Exception):
        pass

    asked = []

    def should_stop():
        asked.append(1)
        if len(asked) == 4:
            raise Enough

    model = lively().train()
    got = []
    with pytest.raises(Enough):
        got.extend(stream_text(model, None, some_ids(3), max_new_tokens=9, should_stop=should_stop))
    assert len(asked) == 4
    assert model.training


def test_a_tap_sees_every_pass_and_changes_nothing(lively):
    model = lively()
    options = {"max_new_tokens": 6, **WILD}
    tap = Recorder(model.points())
    assert generate_ids(model, some_ids(3, 4), tap=tap, **options) == generate_ids(model, some_ids(3, 4), **options)
    assert tap.values.keys() == set(model.points())
    assert tap.values["blocks.1.attn.pattern"].shape == (2, 2, 1, 9)
    assert tap.values["ln_f.scale"].shape == (2, 1, 1)


def test_no_prompts_are_no_texts(lively):
    assert generate_batch(lively(vocab_size=257), Bytes(), [], max_new_tokens=3) == []


def test_one_prompt_may_stand_alone_and_ids_of_one_prompt_may_not(lively):
    model = lively(vocab_size=257)
    options = {"max_new_tokens": 3, **GREEDY}
    assert generate_batch(model, Bytes(), "abc", **options) == [generate(model, Bytes(), "abc", **options)]
    with pytest.raises(ConfigError, match=r"prompts: .* give a list of prompts, \[\[1, 2, 3\]\]"):
        generate_ids(model, [1, 2, 3], **options)
    with pytest.raises(ConfigError, match=r"tokenizer: there is none .* generate_ids"):
        generate(model, None, [1, 2, 3], **options)
