"""Metrics: what they are, position by position and row by row, and what is no metric."""

import pytest
import torch

from mainstem.errors import ConfigError
from mainstem.stream.metrics import LogitDifference, Loss, TokenLogit, TokenLogProb, measured
from models import B, T, build, error, normal, small, tokens

LOGITS = normal(B, T, 11)


@pytest.mark.parametrize(("pos", "at"), [(-1, T - 1), (0, 0), (3, 3), (-T, 0)])
def test_metrics_of_one_position(pos, at):
    here = LOGITS[:, at]
    assert torch.equal(TokenLogit(3, pos)(LOGITS), here[:, 3])
    assert torch.equal(LogitDifference(3, 5, pos)(LOGITS), here[:, 3] - here[:, 5])
    assert error(TokenLogProb(3, pos)(LOGITS), here[:, 3] - here.exp().sum(1).log()) < 1e-14


def test_each_row_may_have_its_own_token():
    answers, foils = torch.tensor([3, 7]), torch.tensor([1, 1])
    expected = torch.stack([LOGITS[i, -1, answers[i]] - LOGITS[i, -1, 1] for i in range(B)])
    assert torch.equal(LogitDifference(answers, foils)(LOGITS), expected)
    assert torch.equal(LogitDifference(answers, 1)(LOGITS), expected)


def test_loss_is_the_mean_cross_entropy_of_each_rows_next_tokens():
    ids = tokens(small())
    nats = LOGITS.logsumexp(-1)[:, :-1] - LOGITS[:, :-1].gather(2, ids[:, 1:, None])[..., 0]  # (B, T - 1)
    assert error(Loss(ids)(LOGITS), nats.mean(1)) < 1e-14
    mask = torch.tensor([[True] * T, [False] * 3 + [True] * (T - 3)])
    assert error(Loss(ids, mask)(LOGITS), torch.stack([nats[0].mean(), nats[1, 3:].mean()])) < 1e-14


def test_only_the_position_that_is_looked_at_is_unembedded():
    model, final, read = build(small()), normal(B, T, 12), []
    model.lm_head.register_forward_pre_hook(lambda _, given: read.append(given[0].shape))
    with torch.no_grad():
        one = measured(model, final, LogitDifference(3, 5, pos=2))
        every = measured(model, final, lambda logits: logits[:, 2, 3] - logits[:, 2, 5])
    assert error(one, every) < 1e-14
    assert read == [(B, 12), (B, T, 12)]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (TokenLogit(11), r"token: id 11 is outside 0\.\.10"),
        (LogitDifference(1, -1), r"foil: id -1 is outside 0\.\.10"),
        (TokenLogit(torch.tensor([1, 2, 3])), r"\(3,\) for 2 rows"),
        (TokenLogit(1, pos=7), r"pos: 7 is out of range; the text has 7"),
        (Loss(torch.zeros(2, 5, dtype=torch.long)), r"\(2, 7\) positions, and ids of \(2, 5\)"),
        (lambda logits: logits.mean(), r"returned \(\); it must return a number for each row, \(2,\)"),
        (lambda logits: logits[:, -1], r"returned \(2, 11\)"),
        (lambda logits: 1.0, r"returned float"),
    ],
)
def test_what_is_no_metric_is_refused(metric, message):
    with pytest.raises(ConfigError, match=message):
        measured(build(small()), normal(B, T, 12), metric)


def test_one_token_has_no_next_one():
    with pytest.raises(ConfigError, match="no next tokens"):
        Loss(torch.zeros(2, 1, dtype=torch.long))
