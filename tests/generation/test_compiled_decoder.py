"""The compiled step is the plain one within float32's rounding, and itself, to the bit, however it is asked."""

import ctypes
import itertools
import os
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.config import ACTIVATIONS, NORMS, POSITIONS, ModelConfig
from mainstem.errors import ConfigError, RunError
from mainstem.generation import decoding, engine
from mainstem.generation.cache import KVCache
from mainstem.generation.compiled import records, store
from mainstem.generation.compiled.decoder import CompiledDecoder
from mainstem.generation.decoding import generate_ids
from mainstem.model.gpt import GPT
from mainstem.model.quantized import quantize, weights_of
from models import ROWS, build, configs, error, small

pytestmark = pytest.mark.usefixtures("compiled_step")
some = settings(deadline=None, max_examples=25)
WEIGHTS = ("fp32", "bf16", "int8")
GREEDY = {"temperature": 0}


def stored(model, weights):
    return model if weights == "fp32" else quantize(model, weights)


def ids_of(config, rows, length=8):
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def stepped(model, ids, before, each, padding=None, threads=1):
    """Logits of the compiled step after `before` columns that PyTorch read, `each` columns at a time: (B, T, V)."""
    rows, length = ids.shape
    padding = padding or [0] * rows
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    cache = KVCache(model.config, rows)
    if before:
        model.stream(ids[:, :before], mask=mask[:, :before], cache=cache)
    stepper = CompiledDecoder(model, store.load(weights_of(model)), rows * each, length, threads)
    read = []
    for at in range(before, length, each):
        logits = stepper.read(ids[:, at : at + each].tolist(), cache, padding)
        read.append(logits.view(rows, -1, logits.shape[-1]).clone())
    stepper.close()
    assert cache.length == length
    return torch.cat(read, 1)


@some
@given(configs(n_ctx=8), st.sampled_from(WEIGHTS), st.integers(0, 2))
def test_it_is_the_plain_step(config, weights, left_out):
    model = stored(build(config, torch.float32), weights)
    assert records.unsupported(model) is None
    ids, padding = ids_of(config, 2), [0, left_out]
    mask = torch.arange(8) >= torch.tensor(padding)[:, None]
    with torch.no_grad():
        wanted = model(ids, mask=mask)[:, 4:]
    assert error(stepped(model, ids, 4, 1, padding), wanted) < 2e-5


@pytest.mark.parametrize("residual", ROWS)
def test_every_way_to_join_norm_and_activate(residual):
    for norm, (activation, position) in itertools.product(NORMS, zip(ACTIVATIONS, POSITIONS * 2, strict=True)):
        config = small(residual, norm=norm, activation=activation, position=position, qk_norm=True, d_head=6)
        model = build(config, torch.float32)
        ids = ids_of(config, 1)
        with torch.no_grad():
            assert error(stepped(model, ids, 3, 1), model(ids)[:, 3:]) < 2e-5, config


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", [{}, {"n_layer": 0}, {"d_mlp": 0}, {"d_model": 40, "n_head": 5, "vocab_size": 67}])
def test_a_position_has_the_bits_that_it_has_alone(shape, weights, monkeypatch):
    """In a batch, read with others of its row, and by several threads: the ground that `lookup` stands on.

    All is read by the step itself, for PyTorch's products do depend on the batch, a little.
    """
    monkeypatch.setattr("mainstem.generation.compiled.decoder.WORTH_A_THREAD", 0)
    model = stored(build(small(**shape), torch.float32), weights)
    ids = ids_of(model.config, 6)
    alone = torch.cat([stepped(model, row[None], 0, 1) for row in ids])
    for each, threads in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 3), (8, 1)):
        assert torch.equal(stepped(model, ids, 0, each, threads=threads), alone)
        assert torch.equal(stepped(model, ids[3:4], 0, each, threads=threads), alone[3:4])


def test_threads_change_no_bit(monkeypatch):
    monkeypatch.setattr("mainstem.generation.compiled.decoder.WORTH_A_THREAD", 0)
    model = build(small(d_model=48, vocab_size=301), torch.float32)
    ids = ids_of(model.config, 3)
    one = stepped(model, ids, 2, 1, [0, 1, 2])
    for threads in (2, 3, 5):
        assert torch.equal(stepped(model, ids, 2, 1, [0, 1, 2], threads), one)


def test_the_weights_of_now_are_read():
    """The records point at the model's own memory."""
    model = build(small(), torch.float32)
    cache = KVCache(model.config, 1)
    with torch.no_grad():
        stepper = CompiledDecoder(model, store.load("fp32"), 1, 8, 1)
        before = stepper.read([[3]], cache, [0]).clone()
        model.ln_f.weight.mul_(2)
        model.blocks[1].mlp.c_fc.weight.mul_(0.5)
        cache.take_back(1)
        after = stepper.read([[3]], cache, [0])
        assert not torch.equal(before, after)
        assert error(after, model(torch.tensor([[3]]))[0]) < 2e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["blocks.0.attn.c_attn", "blocks.2.mlp.c_fc", "blocks.1.mlp.c_proj", "lm_head"])
def test_what_is_not_finite_stays_so(bad, where):
    model = GPT(small(tie_embeddings=False)).eval()
    with torch.no_grad():
        model.get_submodule(where).weight[1, 2] = bad
        logits = stepped(model, ids_of(model.config, 1), 2, 1)
    assert not torch.isfinite(logits).all()
    with pytest.raises(RunError, match="not finite"):
        generate_ids(model, [[1, 2]], max_new_tokens=3, **GREEDY)


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stepper(monkeypatch):
    """Makes one of two threads, with another step than the compiled one if it is given."""
    monkeypatch.setattr("mainstem.generation.compiled.decoder.WORTH_A_THREAD", 0)
    model = build(small(), torch.float32)

    def make(step=None):
        return CompiledDecoder(model, step or store.load("fp32"), 1, 8, 2), KVCache(model.config, 1)

    return make


def abandoned(works, seconds=5.0):
    """Whether a step was abandoned before so many seconds were over."""
    flag, end = ctypes.c_int64.from_address(int(works[0]["sync"]) + records.ABANDONED), time.monotonic() + seconds
    while not flag.value and time.monotonic() < end:
        time.sleep(0.001)
    return bool(flag.value)


def test_a_thread_that_fails_is_not_waited_for(stepper):
    def step(like, model, blocks, positions, works, thread):
        if thread == 1:
            raise ValueError("no such signature")
        return not abandoned(works)

    made, cache = stepper(step)
    with pytest.raises(RunError, match=r"a thread of the compiled step failed \(no such signature\)"):
        made.read([[3]], cache, [0])
    made.close()


def test_after_an_interrupt_nobody_writes(stepper):
    left = []

    def step(like, model, blocks, positions, works, thread):
        if thread == 0:
            raise KeyboardInterrupt
        left.append(abandoned(works))
        time.sleep(0.05)
        left.append("for good")
        return False

    made, cache = stepper(step)
    with pytest.raises(KeyboardInterrupt):
        made.read([[3]], cache, [0])
    assert left == [True, "for good"]
    made.close()


def test_closing_waits_for_those_who_leave_last(stepper):
    left = []

    def step(like, model, blocks, positions, works, thread):
        if thread == 1:
            time.sleep(0.05)
            left.append(thread)
        return True

    made, cache = stepper(step)
    made.read([[3]], cache, [0])
    made.close()
    assert left == [1]
    made.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_has_threads_of_its_own(stepper):
    made, cache = stepper()
    expected = made.read([[3]], cache, [0]).numpy().copy()
    cache.take_back(1)
    child = os.fork()
    if not child:
        signal.alarm(20)  # instead of waiting for ever
        same = np.array_equal(made.read([[3]], cache, [0]).numpy(), expected)
        made.close()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(made.read([[3]], cache, [0]).numpy(), expected)
    made.close()


# --- in generation ---------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch):
    """How many tokens each compiled step has read."""
    found, read = [], CompiledDecoder.read

    def noting(self, ids, cache, padding):
        found.append(len(ids[0]))
        return read(self, ids, cache, padding)

    monkeypatch.setattr(CompiledDecoder, "read", noting)
    return found


@pytest.mark.parametrize("fields", [{}, {"position": "rotary", "residual": "post"}, {"n_ctx": 7}, {"n_ctx": 1}])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_it_says_what_pytorch_says(lively, steps, monkeypatch, fields, weights):
    """Three contexts of new tokens, windows sliding, in a batch of different lengths."""
    model = stored(lively(torch.float32, **fields), weights)
    n_ctx = model.config.n_ctx
    prompts = [list(range(1, 1 + length)) for length in sorted({1, n_ctx // 2 or 1, n_ctx})]
    options = {"max_new_tokens": 3 * n_ctx, **GREEDY}
    found = generate_ids(model, prompts, **options)
    assert steps or n_ctx == 1
    monkeypatch.setattr(store, "load", lambda weights: None)
    assert found == generate_ids(model, prompts, **options)


class Watch:
    """A tap that changes nothing."""

    points = ("resid_final",)

    def __call__(self, point, tensor):
        return tensor


def test_watching_changes_no_bit_of_what_pytorch_computes(lively, steps, monkeypatch):
    seen, choose = [], decoding.choose
    monkeypatch.setattr(decoding, "choose", lambda logits, *rest, **more: choose(keep(logits), *rest, **more))

    def keep(logits):
        seen.append(logits.clone())
        return logits

    model, found = lively(torch.float32), []
    for options in ({"tap": Watch()}, {"compiled": False}, {"tap": Watch(), "compiled": False}):
        seen.clear()
        generate_ids(model, [[1, 2], [3]], max_new_tokens=30, **GREEDY, **options)
        found.append(torch.cat(seen))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not steps


@pytest.mark.parametrize("plain", [{"use_cache": False}, {"tap": True}, {"double": True}])
def test_what_it_cannot_do_pytorch_does(lively, steps, plain):
    model = lively(torch.float64 if "double" in plain else torch.float32)
    options = {"use_cache": plain.get("use_cache", True), "tap": Watch() if "tap" in plain else None}
    generate_ids(model, [[1, 2]], max_new_tokens=4, **GREEDY, **options)
    assert not steps


def test_a_subclass_is_not_packed(lively):
    class Other(GPT):
        pass

    assert records.unsupported(Other(small())) == "Other is not GPT itself"
    assert records.unsupported(lively(torch.float64)).startswith("wte.weight is torch.float64")


def test_what_is_hung_on_a_model_is_not_packed():
    """PyTorch calls it, and the compiled step would not."""
    model, modules = GPT(small()).eval(), torch.nn.modules.module
    for name in ("", "blocks.1.mlp", "wte"):
        module = model.get_submodule(name)
        for hang in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = hang(lambda *given: None)
            assert records.unsupported(model) == f"{name or 'the model'} has a hook"
            handle.remove()
    for hang in (modules.register_module_forward_hook, modules.register_module_forward_pre_hook):
        handle = hang(lambda *given: None)
        assert records.unsupported(model) == "every module has a hook"
        handle.remove()
    model.blocks[1].attn.forward = lambda *given, **more: given[0]
    assert records.unsupported(model) == "blocks.1.attn has a forward of its own"
    del model.blocks[1].attn.forward
    assert records.unsupported(model) is None
    del model.blocks[2]
    assert records.unsupported(model) == "the model has 2 blocks, and `n_layer` is 3"


# --- reading ahead ---------------------------------------------------------------------------------------------------


def test_followers():
    assert engine.prompt_lookup([1, 2, 3, 4, 5, 1, 2, 3], 2) == [4, 5]
    assert engine.prompt_lookup([7, 1, 2, 9, 8, 1, 2], 3) == [9, 8, 1]
    assert engine.prompt_lookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1) == [4]  # three count before two
    assert engine.prompt_lookup([1, 1, 1, 1], 4) == [1, 1, 1, 1]
    assert engine.prompt_lookup([9, 5, 6, 7, 5, 6], 5) == [7, 5, 6, 7, 5]
    assert engine.prompt_lookup([1, 2, 3], 4) == []
    assert engine.prompt_lookup([], 4) == []


@some
@given(
    st.integers(0, 2**31),
    st.sampled_from(WEIGHTS),
    st.sampled_from((1, 2, 3, 7)),
    st.sampled_from((0, 0.8)),
    st.sampled_from((1e-6, 0.3)),
)
def test_reading_ahead_changes_nothing(seed, weights, lookup, temperature, size):
    """Also where logits nearly tie, as those of tiny weights do; greedy and sampled; past the context."""
    model = GPT(ModelConfig(vocab_size=4, n_ctx=24, n_layer=2, n_head=2, d_model=16), seed).eval()
    with torch.no_grad():
        model.wte.weight.mul_(size / 0.02)
    model = stored(model, weights)
    options = {"max_new_tokens": 60, "temperature": float(temperature), "seed": seed}
    assert generate_ids(model, [[1, 2, 3]], lookup=lookup, **options) == generate_ids(model, [[1, 2, 3]], **options)


def test_reading_ahead_takes_fewer_steps(lively, steps):
    model = lively(torch.float32, vocab_size=3, n_ctx=64)
    generate_ids(model, [[1, 2]], max_new_tokens=60, **GREEDY)
    plain = len(steps)
    steps.clear()
    generate_ids(model, [[1, 2]], max_new_tokens=60, **GREEDY, lookup=6)
    assert len(steps) < plain / 2


def test_no_more_is_read_ahead_than_fits_the_cache(lively):
    model, options = lively(torch.float32), {"max_new_tokens": 30, **GREEDY}
    assert generate_ids(model, [[1, 2]], lookup=10**9, **options) == generate_ids(model, [[1, 2]], **options)


def test_reading_ahead_is_for_one_row(lively):
    with pytest.raises(ConfigError, match="lookup: 3 is for a single row, and there are 2; leave it out"):
        generate_ids(lively(), [[1], [2]], max_new_tokens=2, lookup=3)
    with pytest.raises(ConfigError, match="lookup: -1 is not possible"):
        generate_ids(lively(), [[1]], max_new_tokens=2, lookup=-1)
