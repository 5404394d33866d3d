"""What a model is, how it is trained and how it is sampled: frozen dataclasses.

The same dataclasses are the library's configs, the `config.json` of a checkpoint and the command line's flags; the
sentence under a field is its `--help`. A field that holds AUTO (-1, or "auto") is derived from the others by
`resolved()`; everything that is built or saved is resolved first.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

from mainstem import residuals
from mainstem.errors import ConfigError, nearest

AUTO = -1
MAX_NEW_TOKENS = 200
"""The default number of new tokens for a prompt, at most."""
GREEDY_BELOW = 1e-5
"""A temperature below this is 0: dividing by it would only lose digits."""

NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu")
GATED = ("swiglu", "geglu")
POSITIONS = ("learned", "rotary", "none")
INITS = ("gpt2", "xavier", "width")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "trapezoid", "constant")


class Config:
    """Base class of the configs: fields by name, with errors that name the nearest valid field."""

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """A config from plain values. Raises ConfigError on an unknown field, with the nearest valid name."""
        for name in values:
            if name not in cls.field_names():
                raise ConfigError(f"{cls.__name__}: unknown field {name!r}; {nearest(name, cls.field_names())}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of plain values, ready for JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return type(self).from_dict(self.to_dict() | changes)

    def _check(self, ok: bool, field: str, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{field}: {getattr(self, field)!r} is not possible; {rule}")

    def _choice(self, field: str, valid: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value not in valid:
            raise ConfigError(f"{field}: unknown value {value!r}; {nearest(str(value), valid)}")

    def _types(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.type is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif type(value) is not field.type:
                expected = getattr(field.type, "__name__", field.type)
                raise ConfigError(f"{field.name}: {value!r} should be {expected}")
            elif field.type is float and not math.isfinite(value):
                raise ConfigError(f"{field.name}: {value!r} is not a finite number")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The architecture of a GPT: its shape, its residual connections, and its layers."""

    vocab_size: int = 512
    """Vocabulary size; replaced by the tokenizer's size where there is a tokenizer."""
    n_ctx: int = 128
    """Context length, and the length of a training window."""
    n_layer: int = 4
    """Number of blocks; 0: embedding and unembedding only, a bigram model."""
    n_head: int = 4
    """Attention heads per block."""
    d_model: int = 128
    """Width of the residual stream."""
    d_head: int = AUTO
    """Width of a head; -1: d_model / n_head."""
    d_mlp: int = AUTO
    """Width inside the MLP; -1: 4 x d_model, gated 8/3 x d_model rounded up to a multiple of 8; 0: attention only."""
    residual: str = "pre"
    """How a branch joins the stream: pre post sandwich reordered none deepnorm rezero layerscale lns mix no_skip
    no_skip_bare."""
    norm: str = "layernorm"
    """layernorm or rmsnorm."""
    norm_eps: float = 1e-5
    """Added to the variance (layernorm) or mean square (rmsnorm)."""
    activation: str = "gelu_tanh"
    """gelu (erf), gelu_tanh, relu, relu2 (squared), swiglu, geglu (both gated)."""
    position: str = "learned"
    """learned, rotary or none."""
    rope_base: float = 10000.0
    """Base of the rotary angles: pair i turns by position / base^(2 i / d_head)."""
    attn_scale: float = AUTO
    """What q.k is multiplied by; -1: 1 / sqrt(d_head)."""
    attn_scale_by_depth: bool = False
    """Whether block i's attn_scale, i from 1, is divided by i (Mistral's GPT-2, transformers'
    scale_attn_by_inverse_layer_idx)."""
    dropout: float = 0.0
    """Common default of the five dropouts below."""
    embd_dropout: float = AUTO
    """Dropout of the embeddings; -1: as dropout."""
    attn_dropout: float = AUTO
    """Dropout of the attention weights; -1: as dropout."""
    attn_out_dropout: float = AUTO
    """Dropout of the attention output; -1: as dropout."""
    mlp_dropout: float = AUTO
    """Dropout inside the MLP, after the activation; -1: as dropout."""
    mlp_out_dropout: float = AUTO
    """Dropout of the MLP output; -1: as dropout."""
    bias: bool = True
    """Biases in the linear layers of the blocks and in layernorm."""
    tie_embeddings: bool = True
    """Share one matrix between embedding and unembedding."""
    lm_head_bias: bool = False
    """A bias on the logits."""
    qk_norm: bool = False
    """A norm over each head's queries and keys."""
    init: str = "auto"
    """gpt2 (std 0.02), xavier, width (std 1/sqrt(d_model) for every matrix); auto: as the residual row's source."""

    def __post_init__(self) -> None:
        self._types()
        for field in ("vocab_size", "n_ctx", "n_head", "d_model"):
            self._check(getattr(self, field) >= 1, field, "it must be at least 1")
        self._check(self.vocab_size <= 1 << 31, "vocab_size", "it must be at most 2^31")
        self._check(0 <= self.n_layer <= 1 << 16, "n_layer", f"it must be 0 to {1 << 16:,}")
        self._check(self.d_head == AUTO or self.d_head >= 1, "d_head", "at least 1, or -1 for d_model / n_head")
        self._check(self.d_mlp >= AUTO, "d_mlp", "at least 0 (attention only), or -1 for the usual width")
        residuals.row(self.residual)
        self._choice("norm", NORMS)
        self._choice("activation", ACTIVATIONS)
        self._choice("position", POSITIONS)
        self._choice("init", ("auto", *INITS))
        self._check(self.norm_eps > 0, "norm_eps", "it must be above 0")
        self._check(self.rope_base > 0, "rope_base", "it must be above 0")
        self._check(self.attn_scale == AUTO or self.attn_scale > 0, "attn_scale", "above 0, or -1 for 1/sqrt(d_head)")
        self._check(0 <= self.dropout < 1, "dropout", "0 or more and below 1")
        for field in DROPOUTS:
            value = getattr(self, field)
            self._check(value == AUTO or 0 <= value < 1, field, "0 or more and below 1, or -1 for the common dropout")
        if self.d_head == AUTO and self.d_model % self.n_head:
            raise ConfigError(
                f"n_head: {self.n_head} heads do not divide d_model {self.d_model}; "
                "choose a divisor or set d_head yourself"
            )
        d_head = self.d_model // self.n_head if self.d_head == AUTO else self.d_head
        if self.position == "rotary" and d_head % 2:
            raise ConfigError(f"position: rotary turns pairs, so d_head must be even; it is {d_head}")

    def resolved(self) -> "ModelConfig":
        """A copy of the config with every derived field filled in."""
        changes: dict[str, Any] = {name: self.dropout for name in DROPOUTS if getattr(self, name) == AUTO}
        d_head = self.d_model // self.n_head if self.d_head == AUTO else self.d_head
        if self.d_mlp == AUTO:
            gated = self.activation in GATED
            changes["d_mlp"] = -(-8 * self.d_model // 24) * 8 if gated else 4 * self.d_model
        if self.attn_scale == AUTO:
            changes["attn_scale"] = d_head**-0.5
        if self.init == "auto":
            changes["init"] = residuals.row(self.residual).init
        return dataclasses.replace(self, d_head=d_head, **changes)


DROPOUTS = ("embd_dropout", "attn_dropout", "attn_out_dropout", "mlp_dropout", "mlp_out_dropout")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Training settings: steps, batches, learning rates, schedule, evaluation and checkpoints."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 16
    """Windows of n_ctx tokens per step."""
    micro_batch: int = AUTO
    """Windows per forward pass (gradient accumulation); -1: the whole batch."""
    lr: float = 1e-3
    """Peak learning rate (AdamW)."""
    optimizer: str = "adamw"
    """adamw, or muon for the blocks' matrices with adamw for the rest."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon's matrices."""
    momentum: float = 0.95
    """Muon's momentum (Nesterov)."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings; none for norms, biases and gains."""
    schedule: str = "cosine"
    """cosine, linear, trapezoid (constant, then linear), constant; all after the warm-up."""
    warmup: int = 50
    """Steps of linear warm-up."""
    min_lr: float = 0.1
    """Final learning rate, as a share of the peak."""
    decay_share: float = 0.3
    """Share of the steps after the warm-up over which trapezoid decays."""
    clip: float = 1.0
    """Gradient clipping: largest norm of the gradient; 0: off."""
    seed: int = 1
    """Random seed of weights, data order and dropout."""
    eval_every: int = 500
    """Steps between evaluations over the whole validation split; 0: only at the end."""
    save_every: int = 500
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Checkpoints to keep, besides the best."""
    vitals_every: int = 100
    """Steps between recordings of the stream by depth; 0: none."""
    sample_every: int = 0
    """Steps between generated samples; 0: none."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1, mps."""
    compile: bool = False
    """Compile the blocks with torch.compile; checked against the plain model on the first batch."""
    recompute: bool = False
    """Activation checkpointing: keep only what each block reads, and recompute the rest in the backward pass. Less
    memory, about a third more work, bit-identical results."""

    def __post_init__(self) -> None:
        self._types()
        for field in ("steps", "batch_size", "keep"):
            self._check(getattr(self, field) >= 1, field, "it must be at least 1")
        for field in ("warmup", "eval_every", "save_every", "vitals_every", "sample_every", "seed"):
            self._check(getattr(self, field) >= 0, field, "it must be at least 0")
        self._check(self.seed < 1 << 63, "seed", "it must be below 2^63")
        self._check(self.micro_batch == AUTO or self.micro_batch >= 1, "micro_batch", "at least 1, or -1 for the batch")
        for field in ("lr", "muon_lr"):
            self._check(getattr(self, field) > 0, field, "it must be above 0")
        for field in ("momentum", "beta1", "beta2"):
            self._check(0 <= getattr(self, field) < 1, field, "0 or more and below 1")
        for field in ("min_lr", "decay_share"):
            self._check(0 <= getattr(self, field) <= 1, field, "a share from 0 to 1")
        for field in ("weight_decay", "clip"):
            self._check(getattr(self, field) >= 0, field, "it must be at least 0")
        self._choice("optimizer", OPTIMIZERS)
        self._choice("schedule", SCHEDULES)

    @property
    def windows_at_once(self) -> int:
        """Windows per forward pass: `micro_batch`, or the whole batch."""
        return self.batch_size if self.micro_batch == AUTO else min(self.micro_batch, self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Sampling(Config):
    """How the next token is chosen."""

    temperature: float = 0.8
    """Divides the logits; 0: greedy, always the most probable token that breaks no character."""
    top_k: int = 0
    """Sample from the k most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to p (nucleus sampling); 1: from all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one's; 0: none."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that the prompt or the text already has (Keskar et al. 2019, section 4.1); 1: off."""

    def __post_init__(self) -> None:
        self._types()
        self._check(0 <= self.temperature < 3.4e38, "temperature", "at least 0, and a float32")
        self._check(self.top_k >= 0, "top_k", "it must be at least 1, or 0 for all tokens")
        for field in ("top_p", "min_p"):
            self._check(0 <= getattr(self, field) <= 1, field, "a share from 0 to 1")
        possible = 1e-9 <= self.repetition_penalty <= 1e9
        self._check(possible, "repetition_penalty", "it must be above 0, from 1e-9 to 1e9; 1 turns it off")

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy, without random draws."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1
