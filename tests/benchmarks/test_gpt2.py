"""The GPT-2 of `transformers` that ours is measured beside computes what ours does, and has its own weights."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpt2 import gpt2, unlike_gpt2
from mainstem.config import AUTO
from mainstem.errors import ConfigError
from mainstem.formats.gpt2 import FORM
from mainstem.formats.hf.config import LAYOUT
from mainstem.model.gpt import GPT
from models import build, configs, error, few, small, tokens

pytest.importorskip("transformers", reason="a peer: pip install transformers")
forms = st.builds(
    lambda config, activation, attn_scale: config.replace(activation=activation, attn_scale=attn_scale),
    configs(**FORM, d_head=AUTO, d_mlp=20),
    st.sampled_from(LAYOUT.activations),
    st.sampled_from((AUTO, 1.0)),
)


@few
@given(forms, st.sampled_from(("sdpa", "eager")))
def test_its_logits_are_ours(config, attention):
    """Biases that are not there, q.k that is not scaled, or scaled by depth, too."""
    assert unlike_gpt2(config) is None
    model, ids = build(config, torch.float32), tokens(config)
    theirs = gpt2(model, attention).double().eval()
    with torch.no_grad():
        assert error(theirs(ids).logits, model.double()(ids)) < 1e-10


def test_scaling_by_depth_is_not_left_out():
    config = small(attn_scale_by_depth=True)
    model, ids = build(config, torch.float32), tokens(config)
    plain = GPT(config.replace(attn_scale_by_depth=False))
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = gpt2(model).eval()(ids).logits
        assert error(logits, model(ids)) < 1e-5 < 1e-3 < error(logits, plain.eval()(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_it_has_its_own_weights_and_keeps_nothing_of_ours(tied):
    model = build(small(tie_embeddings=tied), torch.float32)
    count, ours = len(list(model.parameters())), weakref.ref(model.wte.weight)
    theirs = gpt2(model)
    assert not {p.data_ptr() for p in theirs.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert [p.untyped_storage().nbytes() for p in theirs.parameters()] == [p.nbytes for p in theirs.parameters()]
    assert len(list(theirs.parameters())) == count
    del model
    gc.collect()
    assert ours() is None


def test_it_has_no_dropout():
    model, ids = build(small(dropout=0.5), torch.float32), tokens(small())
    theirs = gpt2(model).train()
    with torch.no_grad():
        assert error(theirs(ids).logits, model(ids)) < 1e-5


def test_what_it_cannot_hold_is_an_error():
    with pytest.raises(ConfigError, match="does not support position 'rotary'"):
        gpt2(GPT(small(position="rotary")))
