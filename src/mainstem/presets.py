"""The presets: named model and training configs, one row each."""

from dataclasses import dataclass
from typing import Any

from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import ConfigError, nearest


@dataclass(frozen=True)
class Preset:
    """A named starting point: a model config, a training config and a default text."""

    name: str
    about: str
    model: ModelConfig
    train: TrainConfig
    data: str = "shakespeare"


def _andrea(**shape: Any) -> ModelConfig:
    return ModelConfig(n_ctx=1024, activation="gelu_tanh", position="learned", **shape)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "tiny",
            "trains in seconds; for tests and first steps",
            ModelConfig(vocab_size=512, n_ctx=64, n_layer=2, n_head=2, d_model=64),
            TrainConfig(steps=200, batch_size=8, lr=3e-3, warmup=10, eval_every=100, save_every=50, vitals_every=50),
        ),
        Preset(
            "swift",
            "nanoGPT's loss on a CPU in less time; for character tokenizers",
            ModelConfig(
                n_ctx=64,
                n_layer=2,
                d_mlp=256,
                position="rotary",
                rope_base=20.0,
                attn_scale=0.1,
                qk_norm=True,
                bias=False,
            ),
            TrainConfig(
                steps=275,
                batch_size=12,
                optimizer="muon",
                muon_lr=0.035,
                momentum=0.8,
                lr=1e-2,
                weight_decay=0.0,
                clip=0.0,
                schedule="linear",
                min_lr=0.0,
                warmup=0,
                eval_every=0,
                save_every=0,
                vitals_every=0,
            ),
        ),
        Preset(
            "mini",
            "Mini GPT: erf-GELU, an untied head with bias, dropout",
            ModelConfig(
                vocab_size=2048,
                n_ctx=128,
                activation="gelu",
                dropout=0.1,
                embd_dropout=0.0,
                tie_embeddings=False,
                lm_head_bias=True,
            ),
            TrainConfig(
                steps=240,
                batch_size=16,
                optimizer="muon",
                lr=8e-3,
                schedule="linear",
                min_lr=0.0,
                warmup=20,
                eval_every=30,
                save_every=30,
            ),
            data="constitution-ko",
        ),
        Preset(
            "andrea-nano",
            "ANDREA's form at a laptop's size; the demo",
            ModelConfig(vocab_size=1024, n_ctx=128),
            TrainConfig(
                steps=1100,
                batch_size=8,
                optimizer="muon",
                muon_lr=0.03,
                lr=1e-2,
                schedule="linear",
                min_lr=0.0,
                warmup=20,
                eval_every=550,
                save_every=275,
            ),
        ),
        Preset(
            "bard",
            "the bundled model's recipe: ANDREA's form, small enough to come with the package",
            ModelConfig(vocab_size=2048, n_ctx=256, n_layer=6, n_head=8, d_model=256),
            TrainConfig(
                steps=1800,
                batch_size=12,
                optimizer="muon",
                muon_lr=0.025,
                lr=8e-3,
                schedule="linear",
                min_lr=0.0,
                warmup=40,
                eval_every=600,
                save_every=600,
            ),
        ),
        Preset(
            "andrea-12m",
            "ANDREA-12M",
            _andrea(vocab_size=2305, n_layer=6, n_head=12, d_model=384),
            TrainConfig(steps=2000, batch_size=8, lr=1e-3, warmup=100),
        ),
        Preset(
            "andrea-120m",
            "ANDREA-120M",
            _andrea(vocab_size=8449, n_layer=12, n_head=12, d_model=768),
            TrainConfig(steps=5000, batch_size=4, micro_batch=1, lr=6e-4, warmup=200),
        ),
        Preset(
            "andrea-480m",
            "ANDREA-480M",
            _andrea(vocab_size=8449, n_layer=16, n_head=24, d_model=1536),
            TrainConfig(steps=10000, batch_size=8, micro_batch=1, lr=3e-4, warmup=500),
        ),
        Preset(
            "gpt2",
            "GPT-2 small, 124M",
            ModelConfig(vocab_size=50257, n_ctx=1024, n_layer=12, n_head=12, d_model=768, dropout=0.1),
            TrainConfig(steps=10000, batch_size=8, micro_batch=1, lr=6e-4, warmup=500),
        ),
    )
}


def preset(name: str) -> Preset:
    """The preset of that name. Raises ConfigError with the nearest valid name."""
    if name not in PRESETS:
        raise ConfigError(f"preset: unknown value {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]
