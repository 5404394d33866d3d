"""Our model against the documents', written plainly in `reference.py`: logits and every gradient.

An error is max |ours - theirs| / max |theirs|: over the logits, and over all gradients together, as one vector.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mainstem.model.gpt import GPT
from mainstem.presets import preset
from models import ROWS, build, configs, error, few, tokens
from reference import andrea_weights, mini_forward, model_forward, plain_forward

SHAPE = {"vocab_size": 61, "n_ctx": 24, "n_layer": 3, "n_head": 4, "d_model": 32}
PRECISIONS = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])


def andrea_forward(ids, state, **shape):
    return model_forward(ids, andrea_weights(state), **shape)


def logits_and_gradients(forward, weights, ids):
    """Logits, and the gradient of a cross-entropy for each weight."""
    logits = forward(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return logits, dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


@PRECISIONS
@pytest.mark.parametrize(("name", "oracle"), [("mini", mini_forward), ("andrea-120m", andrea_forward)])
def test_logits_and_gradients_are_the_documents(name, oracle, dtype, tolerance):
    """The presets' forms, at a small size, hold to the documents' own modules and lines."""
    config = preset(name).model.replace(**SHAPE)
    model = build(config, dtype, by=0.02)
    weights = dict(model.named_parameters())
    state = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    ids = tokens(config, length=25)

    logits, ours = logits_and_gradients(model, weights, ids)
    plain = partial(oracle, state=state, n_layer=config.n_layer, n_head=config.n_head)
    expected, theirs = logits_and_gradients(plain, state, ids)

    assert error(logits, expected) < tolerance
    largest = max(gradient.abs().max() for gradient in theirs.values())
    assert not [name for name in weights if (ours[name] - theirs[name]).abs().max() > tolerance * largest]


@few
@given(st.data())
@pytest.mark.parametrize("residual", ROWS)
def test_logits_of_any_config_are_those_of_the_plain_lines(residual, data):
    """Every activation, norm, position, scale and width, in float64."""
    model = build(data.draw(configs(residual=residual)))
    ids = tokens(model.config)
    assert error(model(ids), plain_forward(ids, model.state_dict(), model.config)) < 1e-11


def drops(**dropouts):
    """Mini GPT with these dropouts alone: whether training mode changes its logits."""
    off = {"dropout": 0.0, "embd_dropout": 0.0}
    model = GPT(preset("mini").model.replace(**SHAPE, **off | dropouts))
    ids = tokens(model.config)
    return not torch.equal(model.train()(ids), model.eval()(ids))


def test_training_and_evaluation_differ_by_dropout_alone():
    """Without dropout the two modes agree to the bit; each of the five dropouts alone parts them."""
    assert not drops()
    for field in ("embd_dropout", "attn_dropout", "attn_out_dropout", "mlp_dropout", "mlp_out_dropout"):
        assert drops(**{field: 0.1}), field
