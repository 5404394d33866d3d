"""A loss is a sum and a count; an evaluation reads every target once, and nothing but the model and text decides it."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from mainstem.errors import Interrupted
from mainstem.model.gpt import GPT
from mainstem.text.tokens import bytes_per_token
from mainstem.training.device import Device
from mainstem.training.evaluate import IGNORED, bigram_bits_per_byte, evaluate, loss_sum
from models import build, small
from training_runs import cut

IDS = np.random.default_rng(1).integers(11, size=61)
ONE_BYTE = np.ones(11, np.int64)


def test_every_target_counts_once_and_the_mean_is_over_tokens():
    """Against the plain loop over windows of n_ctx, the last one shorter."""
    model = build(small())
    total = 0.0
    for first in range(0, 60, 8):
        window = torch.tensor(IDS[first : min(first + 9, 61)])
        logs = model(window[None, :-1])[0].log_softmax(-1)
        total -= sum(logs[i, target].item() for i, target in enumerate(window[1:]))
    result = evaluate(model, IDS, ONE_BYTE)
    assert result.loss == pytest.approx(total / 60, rel=1e-6)  # the loss is computed in float32
    assert (result.tokens, result.bytes) == (60, 60)


@pytest.mark.parametrize("batch_size", [2, 7, 100])
def test_the_batch_does_not_matter(batch_size):
    model = build(small(), torch.float32)
    one, other = (evaluate(model, IDS, ONE_BYTE, batch_size=b) for b in (1, batch_size))
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    assert (other.tokens, other.bytes) == (one.tokens, one.bytes)


def test_dropout_does_not_matter():
    """Of two evaluations with dropout 0.5, each is that of the model without; and the mode stays what it was."""
    plain, dropped = GPT(small()), GPT(small(dropout=0.5))
    dropped.load_state_dict(plain.state_dict())
    dropped.train()
    results = [evaluate(model, IDS, ONE_BYTE) for model in (plain, dropped, dropped)]
    assert results[0] == results[1] == results[2]
    assert dropped.training
    assert not torch.equal(dropped(torch.tensor(IDS[None, :8])), plain(torch.tensor(IDS[None, :8])))


def test_bits_per_byte_by_hand():
    """A model that finds 4 tokens equally likely spends 2 bits on each; they stand for 1, 2, 3 and 0 bytes."""
    model = GPT(small(vocab_size=4, tie_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = evaluate(model, np.array([3, 0, 1, 2, 3, 2]), np.array([1, 2, 3, 0]))
    assert result.loss == pytest.approx(math.log(4))
    assert (result.tokens, result.bytes) == (5, 1 + 2 + 3 + 0 + 3)
    assert result.bits_per_byte == pytest.approx(5 * 2 / 9)


def test_a_text_without_bytes_is_not_divided_by():
    assert math.isfinite(evaluate(GPT(small()), IDS, np.zeros(11, np.int64)).bits_per_byte)


def test_what_is_ignored_is_not_counted():
    """The sum over a batch with masked targets is the sum over its rows, whatever each row has."""
    model = build(small())
    x, y = (torch.tensor(IDS[i : i + 48].reshape(6, 8)) for i in (0, 1))
    y[0, 2:] = IGNORED
    y[3] = IGNORED
    rows = sum(loss_sum(model, x[i : i + 1], y[i : i + 1]).item() for i in range(6))
    logs = model(x).log_softmax(-1)
    plain = -sum(logs[i, j, y[i, j]].item() for i in range(6) for j in range(8) if y[i, j] != IGNORED)
    assert loss_sum(model, x, y).item() == pytest.approx(rows, rel=1e-6)
    assert rows == pytest.approx(plain, rel=1e-6)


def test_masked_documents_give_the_same_gradients_in_any_micro_batches():
    """One division, by the count of all targets; the last group may be smaller."""
    x, y = (torch.tensor(IDS[i : i + 56].reshape(7, 8)) for i in (0, 1))
    y[1, 1:] = IGNORED
    count = (y != IGNORED).sum()

    def gradients(micro):
        model = build(small())
        for first in range(0, 7, micro):
            (loss_sum(model, x[first : first + micro], y[first : first + micro]) / count).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradients(7)
    for micro in (1, 2, 3):
        assert torch.allclose(gradients(micro), whole, rtol=0, atol=1e-6)


def test_a_stop_between_batches_leaves_the_model_as_it_was():
    model, calls = GPT(small()).train(), iter([None, Interrupted("stopped", 15)])

    def should_stop():
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(Interrupted):
        evaluate(model, IDS, ONE_BYTE, batch_size=1, should_stop=should_stop)
    assert model.training
    assert torch.is_grad_enabled()


def test_the_bigram_table_is_a_plain_count(data):
    small_data = cut(data, train=400, val=90)
    V, train, val = data.tokenizer.vocab_size, small_data.train.tolist(), small_data.val.tolist()
    pairs, contexts, singles = Counter(pairwise(train)), Counter(train[:-1]), Counter(train)
    bits = 0.0
    for context, token in pairwise(val):
        unigram = (singles[token] + 1) / (len(train) + V)
        bits -= math.log2((pairs[context, token] + V * unigram) / (contexts[context] + V))
    size = sum(bytes_per_token(data.tokenizer)[val[1:]])
    assert bigram_bits_per_byte(small_data) == pytest.approx(bits / size, rel=1e-12)


def test_a_model_is_evaluated_where_it_is(monkeypatch):
    asked = []
    choose = Device.choose
    monkeypatch.setattr(Device, "choose", lambda name="auto": asked.append(name) or choose(name))
    model = GPT(small())
    evaluate(model, np.arange(11, dtype=np.uint16), np.ones(11, np.int64))
    assert asked == [str(model.wte.weight.device)] == ["cpu"]
