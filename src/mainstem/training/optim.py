"""Optimizers: every parameter in exactly one group, chosen by what it is in the model and never by its name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.config import TrainConfig
from mainstem.errors import RunError
from mainstem.model.attention import Attention
from mainstem.model.gpt import GPT


def roles(model: GPT) -> dict[str, str]:
    """The role of every parameter by name: matrix (of a block), embedding, head (when untied) or vector (the rest)."""
    found: dict[int, str] = {}
    for embedding in (model.wte, model.wpe):
        if embedding is not None:
            found[id(embedding.weight)] = "embedding"
    found.setdefault(id(model.lm_head.weight), "head")
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            found[id(module.weight)] = "matrix"
    return {name: found.get(id(parameter), "vector") for name, parameter in model.named_parameters()}


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices to a batch x, (N, R, K), roughly: singular values near 1.

    A quintic Newton-Schulz iteration in x's own precision (Jordan et al. 2024, Muon).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), in float32 and batched over matrices of one shape.

    A parameter may hold several matrices one above the other (c_attn holds q, k and v); each is iterated by itself. The
    update of a matrix is scaled by sqrt(max(1, rows / columns)).

    Args:
        parameters: matrices, (rows, columns).
        stacked: the rows of each matrix in a parameter, by the parameter's id, where it holds several.
        defaults: lr, momentum, weight_decay.
    """

    def __init__(
        self, parameters: Iterable[Tensor], stacked: Mapping[int, Sequence[int]] | None = None, **defaults: Any
    ):
        super().__init__(parameters, defaults)
        self._stacked = stacked or {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])  # Nesterov
                rows = list(self._stacked.get(id(p), (len(p),)))
                for weight, piece in zip(p.split(rows), update.split(rows), strict=True):
                    shapes.setdefault(tuple(weight.shape), []).append((weight, piece))
            for (height, width), pairs in shapes.items():
                updates = orthogonalise(torch.stack([piece for _, piece in pairs]))
                scale = group["lr"] * max(1.0, height / width) ** 0.5
                weights = [weight for weight, _ in pairs]
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(updates.unbind()), alpha=-scale)


class Optimizer:
    """AdamW, or Muon for the blocks' matrices with AdamW for the rest; its state as named tensors.

    Matrices, embeddings and the head decay; vectors do not.
    """

    def __init__(self, model: GPT, config: TrainConfig, fused: bool = True):
        role, self._named, self._fused = roles(model), dict(model.named_parameters()), fused
        matrices = [p for name, p in self._named.items() if role[name] == "matrix"]
        by_muon = set(matrices) if config.optimizer == "muon" else set()
        decayed = [p for name, p in self._named.items() if role[name] != "vector" and p not in by_muon]
        plain = [p for name, p in self._named.items() if role[name] == "vector"]
        adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=fused,
        )
        self._parts: list[torch.optim.Optimizer] = [adamw]
        if by_muon:
            attentions = (site.branch for site in model.joins() if isinstance(site.branch, Attention))
            muon = Muon(
                matrices,
                {id(attn.c_attn.weight): attn.rows for attn in attentions},
                lr=config.muon_lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
            self._parts.append(muon)
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self._parts]

    def groups(self) -> list[tuple[str, float, list[str]]]:
        """Each group's optimizer, weight decay and parameters by name; together they are every parameter once."""
        names = {id(p): name for name, p in self._named.items()}
        return [
            (type(part).__name__.lower(), group["weight_decay"], [names[id(p)] for p in group["params"]])
            for part in self._parts
            for group in part.param_groups
            if group["params"]
        ]

    def step(self, rate: float) -> None:
        """Move every parameter at this share of the peak rates."""
        for part, peaks in zip(self._parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * rate
            part.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The state by `{parameter}.{moment}`, ready for a file; the count of steps is kept elsewhere."""
        names = {id(p): name for name, p in self._named.items()}
        return {
            f"{names[id(p)]}.{key}": value.contiguous()
            for part in self._parts
            for p, state in part.state.items()
            for key, value in state.items()
            if key != "step"
        }

    def load_tensors(self, tensors: dict[str, Tensor], step: int) -> None:
        """Take up a saved state after `step` steps. Raises RunError naming the first tensor that does not fit."""
        names = {id(p): name for name, p in self._named.items()}
        expected: set[str] = set()
        for part in self._parts:
            keys = ("momentum",) if isinstance(part, Muon) else ("exp_avg", "exp_avg_sq")
            for group in part.param_groups:
                for p in group["params"]:
                    state: dict[str, Tensor] = {}
                    for key in keys:
                        full = f"{names[id(p)]}.{key}"
                        expected.add(full)
                        if full not in tensors or tensors[full].shape != p.shape:
                            raise RunError(f"optim.safetensors: {full} is missing or of another shape")
                        state[key] = tensors[full].to(p.device, p.dtype)
                    if not isinstance(part, Muon):
                        state["step"] = torch.tensor(float(step), device=p.device if self._fused else "cpu")
                    part.state[p] = state
        if extra := sorted(set(tensors) - expected):
            raise RunError(f"optim.safetensors: {extra[0]} belongs to no parameter of this optimizer")
