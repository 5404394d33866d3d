"""Parameters, floating-point operations and memory of a model, as closed formulas of its config.

No model is built and torch is not imported; tests compare every number with a real model. Symbols: C d_model,
H heads, D d_head, M d_mlp, L blocks, V vocabulary, T n_ctx.
"""

from dataclasses import asdict, dataclass

from mainstem import residuals
from mainstem.config import GATED, ModelConfig

FLOAT = 4  # bytes of a float32, in which weights, gradients and optimizer state are held


@dataclass(frozen=True)
class Parameters:
    """Parameter counts by part. A tied matrix counts once."""

    total: int
    wte: int
    wpe: int
    blocks: int
    per_block: int
    """Parameters of the last block; blocks may have different norms, as with `mix`."""
    attn_weights_per_block: int
    mlp_weights_per_block: int
    ln_f: int
    lm_head: int


def _norm(config: ModelConfig) -> int:
    """Parameters of one norm over d_model: a gain, and a bias where layernorm has one."""
    return config.d_model * (2 if config.norm == "layernorm" and config.bias else 1)


def _mlp_in(config: ModelConfig) -> int:
    """Columns of c_fc: a gated MLP has two readers, gate and up."""
    return config.d_mlp * (2 if config.activation in GATED else 1)


def _norms_in_block(config: ModelConfig, index: int) -> int:
    slots = residuals.row(config.residual).slots(index, config.n_layer)
    joins = 2 if config.d_mlp else 1
    return joins * (slots.ln_in + slots.ln_out + slots.ln_add)


def norms(config: ModelConfig) -> int:
    """The number of norms over d_model, including the final one."""
    config = config.resolved()
    in_blocks = sum(_norms_in_block(config, index) for index in range(config.n_layer))
    return in_blocks + residuals.row(config.residual).ln_f


def _block(config: ModelConfig, index: int) -> int:
    C, HD, M = config.d_model, config.n_head * config.d_head, config.d_mlp
    weights = 4 * C * HD + C * (_mlp_in(config) + M)
    biases = (3 * HD + C + (_mlp_in(config) + C if M else 0)) * config.bias
    qk_gains = 2 * config.d_head * config.qk_norm
    slots = residuals.row(config.residual).slots(index, config.n_layer)
    gains = {"one": 0, "scalar": 1, "vector": C * (2 if M else 1)}[slots.gain]
    return weights + biases + qk_gains + gains + _norms_in_block(config, index) * _norm(config)


def parameters(config: ModelConfig) -> Parameters:
    """Count the parameters of a model by part.

    >>> parameters(ModelConfig(vocab_size=512, n_layer=2)).total
    """
    config = config.resolved()
    C, V = config.d_model, config.vocab_size
    blocks = [_block(config, index) for index in range(config.n_layer)]
    wte, wpe = V * C, config.n_ctx * C if config.position == "learned" else 0
    ln_f = _norm(config) * residuals.row(config.residual).ln_f
    lm_head = (0 if config.tie_embeddings else V * C) + V * config.lm_head_bias
    return Parameters(
        total=wte + wpe + sum(blocks) + ln_f + lm_head,
        wte=wte,
        wpe=wpe,
        blocks=sum(blocks),
        per_block=blocks[-1] if blocks else 0,
        attn_weights_per_block=4 * C * config.n_head * config.d_head if blocks else 0,
        mlp_weights_per_block=C * (_mlp_in(config) + config.d_mlp) if blocks else 0,
        ln_f=ln_f,
        lm_head=lm_head,
    )


def flops_per_token(config: ModelConfig) -> dict[str, int]:
    """Multiplications and additions a token: `forward`, and `training` = 3 x forward.

    Two for each weight of a matrix product (the unembedding included, the look-ups not), and 4 H D for each pair of
    positions that attention joins: (T + 1) / 2 earlier ones on average over a full context.
    """
    config = config.resolved()
    counted = parameters(config)
    weights = config.n_layer * (counted.attn_weights_per_block + counted.mlp_weights_per_block)
    weights += config.vocab_size * config.d_model
    pairs = 2 * config.n_layer * config.n_head * config.d_head * (config.n_ctx + 1)
    forward = 2 * weights + pairs
    return {"forward": forward, "training": 3 * forward}


def memory(
    config: ModelConfig, micro_batch: int = 1, optimizer: str = "adamw", recompute: bool = False
) -> dict[str, int]:
    """Bytes in float32: what is exact (weights, gradients, optimizer, checkpoint, kv_cache), and two estimates.

    `activations` estimates what backward needs of a micro-batch of full windows: of every block, or with `recompute`
    what every block reads, and of one block the rest; `training` is the sum.
    """
    config = config.resolved()
    total = parameters(config).total
    matrices = config.n_layer * (parameters(config).attn_weights_per_block + parameters(config).mlp_weights_per_block)
    state = 2 * total - (matrices if optimizer == "muon" else 0)
    kept = [_kept_in_block(config, index) for index in range(config.n_layer)]
    blocks = config.n_layer * config.d_model + max(kept, default=0) if recompute else sum(kept)
    per_token = blocks + 2 * config.vocab_size + 2 * config.d_model  # logits and their softmax; the final norm
    activations = FLOAT * per_token * config.n_ctx * micro_batch
    return {
        "weights": FLOAT * total,
        "gradients": FLOAT * total,
        "optimizer": FLOAT * state,
        "checkpoint": FLOAT * (total + state),
        "kv_cache": FLOAT * 2 * config.n_layer * config.n_head * config.d_head * config.n_ctx,
        "activations": activations,
        "training": FLOAT * (2 * total + state) + activations,
    }


def _kept_in_block(config: ModelConfig, index: int) -> int:
    """Numbers a token that backward needs of one block: what its products, norms, activation and dropouts read."""
    C, HD, M = config.d_model, config.n_head * config.d_head, config.d_mlp
    slots = residuals.row(config.residual).slots(index, config.n_layer)
    joins = 2 if M else 1
    norm = 1 if config.norm == "layernorm" else 2
    kept = (norm * _norms_in_block(config, index) + joins * (1 + (slots.gain != "one"))) * C
    kept += 4 * HD + (config.position == "rotary" or config.qk_norm) * 4 * HD
    kept += _mlp_in(config) + (2 if config.activation in GATED else 1) * M
    kept += 2 * (C * ((config.attn_out_dropout > 0) + (config.mlp_out_dropout > 0)) + M * (config.mlp_dropout > 0))
    return kept + (3 * config.n_head * config.n_ctx if config.attn_dropout > 0 else config.n_head)


def summary(config: ModelConfig, micro_batch: int = 1, optimizer: str = "adamw", recompute: bool = False) -> dict:
    """Parameters, norms, operations and memory as one dict, as `mainstem info --json` prints it."""
    return {
        "parameters": asdict(parameters(config)),
        "norms": norms(config),
        "flops_per_token": flops_per_token(config),
        "memory_bytes": memory(config, micro_batch, optimizer, recompute),
    }
