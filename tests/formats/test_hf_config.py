"""Each field of a config is held, read, or refused by its name with its value; none is passed over in silence."""

import pytest
import theirs
import torch

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError, RunError
from mainstem.formats.hf import config as configs
from mainstem.presets import PRESETS
from models import error, small

REFUSED = [
    *(("residual", row) for row in ("post", "sandwich", "reordered", "none", "deepnorm", "rezero", "layerscale")),
    *(("residual", row) for row in ("lns", "mix", "no_skip", "no_skip_bare")),
    ("norm", "rmsnorm"), ("position", "rotary"), ("position", "none"), ("qk_norm", True), ("activation", "swiglu"),
    ("activation", "geglu"), ("lm_head_bias", True), ("attn_scale", 0.7), ("d_head", 5), ("d_mlp", 0),
]  # fmt: skip
HELD = (
    "vocab_size", "n_ctx", "n_layer", "n_head", "d_model", "norm_eps", "attn_scale_by_depth", "embd_dropout",
    "attn_dropout", "attn_out_dropout", "tie_embeddings",
)  # fmt: skip
TOLD = ("bias", "mlp_dropout", "mlp_out_dropout")
"""The model computes the same without them, and `left_out` says so."""
SPENT = ("init", "dropout", "rope_base")
"""Nothing that is built from a resolved config without rotary positions looks at them again."""


def test_every_field_is_held_or_refused_or_told():
    """A new field of ModelConfig is asked for here."""
    refused = {field for field, _ in REFUSED}
    groups = [refused, set(HELD), set(TOLD), set(SPENT)]
    assert set().union(*groups) == set(ModelConfig.field_names())
    assert sum(map(len, groups)) == len(ModelConfig.field_names())


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_what_the_layout_cannot_hold_is_refused_by_name(field, value):
    named = rf"Hugging Face folder does not support {field} {value!r} \(supported: .*\); mainstem export"
    with pytest.raises(ConfigError, match=named):
        configs.write(small(**{field: value}))


def test_all_that_cannot_be_held_is_said_at_once():
    with pytest.raises(ConfigError, match=r"support position 'rotary' .*; qk_norm True .*; attn_scale 0\.1 "):
        configs.write(PRESETS["swift"].model)
    with pytest.raises(ConfigError, match=r"does not support lm_head_bias True \(supported: False\); mainstem"):
        configs.write(PRESETS["mini"].model)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("swift", "mini")])
def test_all_other_presets_are_held(name):
    model = PRESETS[name].model
    said = configs.write(model)
    assert said["n_embd"] == model.d_model
    assert said["activation_function"] == "gelu_new"


def test_what_is_left_out_is_told():
    assert configs.left_out(small()) == []
    told = configs.left_out(small(bias=False, dropout=0.1, mlp_out_dropout=0.3))
    assert [sentence.split()[0] for sentence in told] == ["mlp_dropout", "mlp_out_dropout", "biases"]
    assert "0.3 becomes 0.1, as attn_out_dropout" in told[1]


def read(folder, **changes):
    """The config of a folder with a tiny model's config.json and these changes."""
    theirs.put(folder, configs.write(small()) | changes)
    return configs.read(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 1e4}, "unknown field rope_theta 10000.0, which may change what the model computes"),
        ({"add_cross_attention": True}, "add_cross_attention True is not supported; only False is"),
        ({"pruned_heads": {"0": [1]}}, r"pruned_heads \{'0': \[1\]\} is not supported"),
        ({"auto_map": {"AutoModel": "m.M"}}, r"auto_map \{'AutoModel': 'm.M'\} is not supported; only None is"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config \{'bits': 4\} is not supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder True is not supported"),
        ({"architectures": ["GPT2ForTokenClassification"]}, "architectures .'GPT2ForTokenClassification'."),
        ({"model_type": "llama"}, "model_type 'llama' is not supported; only 'gpt2' is"),
        ({"n_embd": 12.0}, "n_embd 12.0 should be a whole number"),
        ({"n_layer": True}, "n_layer True should be a whole number"),
        ({"n_head": "2"}, "n_head '2' should be a whole number"),
        ({"vocab_size": None}, "vocab_size None should be a whole number"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon '1e-5' should be a number"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon nan should be a number"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon: 0.0 is not possible; it must be above 0"),
        ({"layer_norm_epsilon": 10**400}, r"layer_norm_epsilon 10+\.\.\. is too large"),
        ({"attn_pdrop": 1}, "attn_pdrop 1 is not possible; it must be 0 or more"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' should be true or false"),
        ({"scale_attn_weights": 1}, "scale_attn_weights 1 should be true or false"),
        ({"activation_function": "silu"}, "activation_function 'silu' is not supported; use gelu_new, gelu, relu"),
        ({"activation_function": ["gelu"]}, r"activation_function \['gelu'\] should be a string"),
        ({"n_inner": 0}, "n_inner 0 is not possible; it must be at least 1, or null"),
        ({"n_head": 5}, "n_head 5 does not divide n_embd 12"),
        ({"n_head": 0}, "n_head 0 does not divide n_embd"),
        ({"resid_pdrop": -1}, "resid_pdrop -1 is not possible"),
        ({"a\x1b[31m\nb": "x" * 1000}, r"unknown field a\\x1b\[31m\\nb 'x{60,80}\.\.\., which may change"),
        ({"n_layer": -1}, "n_layer: -1 is not possible"),
        ({"n_positions": 10**12}, "n_positions 1000000000000 is too large"),
        ({"n_ctx": 16}, "n_ctx 16 and n_positions 8 differ; they must be equal"),
        ({"hidden_size": 16}, "hidden_size 16 and n_embd 12 differ"),
        ({"num_attention_heads": None}, "num_attention_heads None and n_head 2 differ"),
    ],
)
def test_a_field_that_cannot_be_read_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises((RunError, ConfigError), match=rf"config\.json: {said}") as raised:
        read(tmp_path, **changes)
    assert "\n" not in str(raised.value)


def test_a_config_that_is_none_is_refused(tmp_path):
    for values, said in (([], "not a config"), ({}, "no model_type and no n_embd")):
        theirs.put(tmp_path, values)
        with pytest.raises(RunError, match=rf"config\.json: {said}"):
            configs.read(tmp_path)


def test_every_field_that_transformers_writes_is_known(tmp_path):
    """The defaults are GPT-2 small's, of which a folder from the hub says less and in older words."""
    plain = theirs.transformers.GPT2Config().to_dict()
    older = ("activation_function", "architectures", "initializer_range", "n_positions", "n_embd", "model_type")
    rows = ("embd_dropout", "attn_dropout", "attn_out_dropout", "mlp_out_dropout")
    expected = PRESETS["gpt2"].model.replace(dropout=0.0, **dict.fromkeys(rows, 0.1)).resolved()
    theirs.put(tmp_path, plain)
    assert configs.read(tmp_path) == expected
    sampling = {"text-generation": {"do_sample": True, "max_length": 50}}
    theirs.put(tmp_path, {name: plain[name] for name in older} | {"n_ctx": 1024, "task_specific_params": sampling})
    assert configs.read(tmp_path) == expected


@pytest.mark.parametrize(
    "name", [name for name in configs.ACTIVATIONS if name not in ("gelu_new", "gelu", "relu", "relu2")]
)
def test_other_names_of_an_activation_are_the_same_function(tmp_path, name):
    ours = read(tmp_path, activation_function=name).activation
    first = next(each for each, activation in configs.ACTIVATIONS.items() if activation == ours)
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    functions = [theirs.transformers.activations.ACT2FN[each] for each in (name, first)]
    assert error(functions[0](x), functions[1](x)) <= 1e-11  # one of them has a constant to ten digits


def test_aliases_may_stand_alone(tmp_path):
    expected, values = read(tmp_path), configs.write(small())
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    for alias, name in (names | {"n_ctx": "n_positions"}).items():
        values[alias] = values.pop(name)
    theirs.put(tmp_path, values)
    assert configs.read(tmp_path) == expected == small().resolved()
