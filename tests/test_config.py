"""Configs: what is refused and how it is said, what is derived, and the presets."""

import json

import pytest

from mainstem.config import ACTIVATIONS, INITS, NORMS, OPTIMIZERS, POSITIONS, SCHEDULES, ModelConfig, TrainConfig
from mainstem.errors import ConfigError
from mainstem.presets import PRESETS, preset
from mainstem.residuals import RESIDUALS

DROPOUTS = ("embd_dropout", "attn_dropout", "attn_out_dropout", "mlp_dropout", "mlp_out_dropout")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: preset("gtp2"), "preset: unknown value 'gtp2'; did you mean 'gpt2'"),
        (lambda: preset("andrea-120"), "did you mean 'andrea-120m'"),
        (lambda: ModelConfig.from_dict({"n_layers": 2}), "unknown field 'n_layers'; did you mean 'n_layer'"),
        (lambda: TrainConfig.from_dict({"learning_rate": 1.0}), "TrainConfig: unknown field 'learning_rate'"),
        (lambda: ModelConfig().replace(d_modle=8), "did you mean 'd_model'"),
        (lambda: ModelConfig(residual="sandwhich"), "residual: unknown value .* did you mean 'sandwich'"),
        (lambda: ModelConfig(norm="rms_norm"), "norm: .* did you mean 'rmsnorm'"),
        (lambda: ModelConfig(activation="gelu_tan"), "activation: .* did you mean 'gelu_tanh'"),
        (lambda: ModelConfig(position="rope"), "position: unknown value 'rope'"),
        (lambda: ModelConfig(init="xaiver"), "init: .* did you mean 'xavier'"),
        (lambda: TrainConfig(optimizer="adam"), "optimizer: .* did you mean 'adamw'"),
        (lambda: TrainConfig(schedule="cosin"), "schedule: .* did you mean 'cosine'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_head": 5}, "n_head: 5 heads do not divide d_model 128; choose a divisor or set d_head"),
        ({"position": "rotary", "d_head": 7}, "position: rotary .* d_head must be even; it is 7"),
        ({"position": "rotary", "d_model": 12}, "d_head must be even; it is 3"),
        ({"n_layer": -1}, "n_layer: -1 is not possible; it must be 0 to 65,536"),
        ({"vocab_size": 0}, "vocab_size: 0 is not possible; it must be at least 1"),
        ({"n_ctx": 0}, "n_ctx"),
        ({"n_head": 0}, "n_head"),
        ({"d_head": 0}, "d_head: 0 .* -1 for d_model / n_head"),
        ({"d_mlp": -2}, "d_mlp: -2 .* 0 \\(attention only\\)"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"attn_scale": 0.0}, "attn_scale"),
        ({"dropout": 1.0}, "dropout: 1.0 .* below 1"),
        ({"dropout": -1.0}, "dropout: -1.0 .* 0 or more"),
        *(({field: 1.0}, f"{field}: 1.0 .* -1 for the common dropout") for field in DROPOUTS),
        ({"dropout": float("nan")}, "dropout: nan is not a finite number"),
        ({"d_model": 128.0}, "d_model: 128.0 should be int"),
        ({"d_model": "128"}, "d_model: '128' should be int"),
        ({"n_layer": True}, "n_layer: True should be int"),
        ({"bias": 1}, "bias: 1 should be bool"),
        ({"norm": None}, "norm: None should be str"),
    ],
)
def test_an_impossible_model_is_refused_with_field_value_and_rule(fields, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps: 0 is not possible; it must be at least 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"keep": 0}, "keep"),
        ({"warmup": -1}, "warmup"),
        ({"seed": -1}, "seed"),
        ({"save_every": -1}, "save_every"),
        ({"micro_batch": 0}, "micro_batch: 0 .* -1 for the batch"),
        ({"lr": 0.0}, "lr: 0.0 .* above 0"),
        ({"lr": float("inf")}, "lr: inf is not a finite number"),
        ({"muon_lr": -0.1}, "muon_lr"),
        ({"beta2": 1.0}, "beta2"),
        ({"momentum": 1.0}, "momentum"),
        ({"min_lr": 1.5}, "min_lr: 1.5 .* a share from 0 to 1"),
        ({"decay_share": -0.5}, "decay_share"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"clip": -1.0}, "clip"),
        ({"compile": "yes"}, "compile: 'yes' should be bool"),
    ],
)
def test_an_impossible_training_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("residual", RESIDUALS),
        ("norm", NORMS),
        ("activation", ACTIVATIONS),
        ("position", POSITIONS),
        ("init", ("auto", *INITS)),
        ("optimizer", OPTIMIZERS),
        ("schedule", SCHEDULES),
    ],
)
def test_every_choice_is_accepted(field, values):
    kind = TrainConfig if field in ("optimizer", "schedule") else ModelConfig
    for value in values:
        assert getattr(kind(**{field: value}), field) == value


def test_a_whole_number_stands_for_a_float():
    assert type(ModelConfig(dropout=0).dropout) is float


def test_auto_fields_follow_the_others():
    config = ModelConfig(d_model=96, n_head=6, dropout=0.2, mlp_dropout=0.5).resolved()
    assert (config.d_head, config.d_mlp, config.attn_scale) == (16, 384, 0.25)
    assert [getattr(config, field) for field in DROPOUTS] == [0.2, 0.2, 0.2, 0.5, 0.2]
    assert ModelConfig(d_head=64).resolved().attn_scale == 1 / 8
    assert ModelConfig(n_head=5, d_head=16).resolved().d_head == 16  # heads need not divide d_model once d_head is set


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize(("d_model", "d_mlp"), [(96, 256), (128, 344), (768, 2048)])
def test_a_gated_mlp_is_8_thirds_wide_up_to_a_multiple_of_8(activation, d_model, d_mlp):
    assert ModelConfig(d_model=d_model, activation=activation).resolved().d_mlp == d_mlp


def test_auto_init_is_the_rows():
    for name, row in RESIDUALS.items():
        assert ModelConfig(residual=name).resolved().init == row.init
        assert ModelConfig(residual=name, init="width").resolved().init == "width"


def test_what_is_set_is_kept_and_resolving_twice_is_resolving_once():
    config = ModelConfig(d_head=10, d_mlp=0, attn_scale=1.0, attn_dropout=0.0, dropout=0.5, init="width").resolved()
    assert (config.d_head, config.d_mlp, config.attn_scale, config.attn_dropout) == (10, 0, 1.0, 0.0)
    assert config.resolved() == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_goes_through_json_unchanged(name):
    chosen = preset(name)
    for config in (chosen.model, chosen.model.resolved(), chosen.train):
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_config_is_changed_by_replace_alone():
    config = ModelConfig()
    with pytest.raises(AttributeError):
        config.n_layer = 5
    assert config.replace(n_layer=5).n_layer == 5
    assert config.n_layer == 4
    with pytest.raises(ConfigError, match="n_head: 5"):
        config.replace(n_head=5)


def test_presets():
    of_andrea = ["andrea-nano", "bard", "andrea-12m", "andrea-120m", "andrea-480m"]
    assert list(PRESETS) == ["tiny", "swift", "mini", *of_andrea, "gpt2"]
    assert all(name == chosen.name and chosen.about for name, chosen in PRESETS.items())


def test_andrea_is_the_documents():
    """12 pre-norm blocks, 768 wide, 3,072 inside, tanh-GELU, 8,449 tokens, tied."""
    model = preset("andrea-120m").model.resolved()
    assert (model.n_layer, model.d_model, model.d_mlp, model.n_head, model.n_ctx) == (12, 768, 3072, 12, 1024)
    assert (model.residual, model.norm, model.activation) == ("pre", "layernorm", "gelu_tanh")
    assert (model.position, model.tie_embeddings, model.bias) == ("learned", True, True)
    assert model.vocab_size == 256 + 8192 + 1


def test_mini_is_the_documents():
    """Erf-GELU, an untied head with a bias, dropout in four places and not on the embeddings."""
    model = preset("mini").model.resolved()
    assert (model.residual, model.activation, model.d_mlp) == ("pre", "gelu", 4 * model.d_model)
    assert (model.tie_embeddings, model.lm_head_bias) == (False, True)
    assert [getattr(model, field) for field in DROPOUTS] == [0.0, 0.1, 0.1, 0.1, 0.1]
