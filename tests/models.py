"""Random small models, and what the tests do to them."""

from collections.abc import Callable, Mapping

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mainstem import residuals
from mainstem.config import ACTIVATIONS, AUTO, NORMS, POSITIONS, ModelConfig
from mainstem.model.gpt import GPT
from mainstem.model.tap import Recorder

B, T = 2, 7
ROWS = tuple(residuals.RESIDUALS)
UNCUT = tuple(name for name in ROWS if name not in ("post", "deepnorm", "no_skip", "no_skip_bare"))
"""Law 4's rows: skip 1 and no norm over the sum; of `mix`, the pre blocks."""

few = settings(deadline=None, max_examples=12)


def configs(**fixed: object) -> st.SearchStrategy[ModelConfig]:
    """Small configs over every choice that is not fixed, dropout off."""
    choices = {
        "vocab_size": st.just(11),
        "n_ctx": st.just(8),
        "n_layer": st.integers(1, 3),
        "n_head": st.sampled_from((1, 2, 3)),
        "d_model": st.just(12),
        "d_head": st.sampled_from((AUTO, 6)),
        "attn_scale": st.sampled_from((AUTO, 0.7)),
        "attn_scale_by_depth": st.booleans(),
        "d_mlp": st.sampled_from((AUTO, AUTO, 0)),
        "residual": st.sampled_from(ROWS),
        "norm": st.sampled_from(NORMS),
        "activation": st.sampled_from(ACTIVATIONS),
        "position": st.sampled_from(POSITIONS),
        "bias": st.booleans(),
        "tie_embeddings": st.booleans(),
        "lm_head_bias": st.booleans(),
        "qk_norm": st.booleans(),
        "rope_base": st.sampled_from((10000.0, 20.0)),
        "norm_eps": st.sampled_from((1e-5, 1e-2)),
    }
    return st.builds(ModelConfig, **choices | {field: st.just(value) for field, value in fixed.items()})


def small(residual: str = "pre", **changes: object) -> ModelConfig:
    """One small config of three blocks."""
    shape = {"vocab_size": 11, "n_ctx": 8, "n_layer": 3, "n_head": 2, "d_model": 12, "residual": residual}
    return ModelConfig(**shape | changes)


def stir(module: nn.Module, dtype: torch.dtype = torch.float64, by: float = 0.2) -> None:
    """Move every parameter away from where it starts, so that no gain is 1 and no bias 0; evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    module.to(dtype).eval()


def build(config: ModelConfig, dtype: torch.dtype = torch.float64, by: float = 0.2) -> GPT:
    """The model, stirred."""
    model = GPT(config)
    stir(model, dtype, by)
    return model


def tokens(config: ModelConfig, rows: int = B, length: int = T) -> Tensor:
    """Ids, (B, T)."""
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def normal(*shape: int) -> Tensor:
    """Standard normal values, float64, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def record(model: GPT, ids: Tensor, **arguments: Tensor) -> dict[str, Tensor]:
    """Every point of one forward pass, and the `logits`."""
    tap = Recorder(model.points())
    logits = model(ids, tap=tap, **arguments)
    return tap.values | {"logits": logits}


def kept(model: GPT, forward: Callable[[], Tensor]) -> int:
    """Bytes that a pass with gradients keeps for backward: each storage once, the model's weights aside."""
    found = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = forward()  # what it keeps lives as long as it does
    assert graph.requires_grad
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(found.values())


def error(value: Tensor, expected: Tensor) -> float:
    """max |value - expected| / max |expected|."""
    return ((value - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()


class Change:
    """A tap that puts a function of the tensor in its place, at each of its points."""

    def __init__(self, changes: Mapping[str, Callable[[Tensor], Tensor]]):
        self.points = changes

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        return self.points[point](tensor)
