"""The documents' parts, written plainly: the oracles to which our model is held. Nothing here imports `mainstem.model`.

`state` is always a model's weights under our names. The functions that rename them return views, never copies, so a
gradient that is taken through an oracle lands on the weights under our names.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = dict[str, Tensor]


# Mini GPT: a list of heads, four dropouts, pre-norm.


class Head(nn.Module):
    """One causal head: softmax(q k^T / sqrt(D)) v."""

    def __init__(self, d_model: int, d_head: int, dropout: float):
        super().__init__()
        self.key = nn.Linear(d_model, d_head)
        self.query = nn.Linear(d_model, d_head)
        self.value = nn.Linear(d_model, d_head)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.key(x), self.query(x), self.value(x)  # (B, T, D)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])  # (B, T, T)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(future, -math.inf).softmax(-1)
        return self.dropout(pattern) @ v


class MultiHeadAttention(nn.Module):
    """Heads side by side, concatenated, projected."""

    def __init__(self, d_model: int, n_head: int, dropout: float):
        super().__init__()
        self.heads = nn.ModuleList(Head(d_model, d_model // n_head, dropout) for _ in range(n_head))
        self.proj = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.proj(torch.cat([head(x) for head in self.heads], dim=-1)))


class FeedForward(nn.Module):
    """Four times as wide inside, GELU by erf."""

    def __init__(self, d_model: int, dropout: float):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d_model, 4 * d_model),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * d_model, d_model),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Block(nn.Module):
    """The two pre-norm lines."""

    def __init__(self, d_model: int, n_head: int, dropout: float):
        super().__init__()
        self.sa = MultiHeadAttention(d_model, n_head, dropout)
        self.ffwd = FeedForward(d_model, dropout)
        self.ln1 = nn.LayerNorm(d_model)
        self.ln2 = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.sa(self.ln1(x))
        x = x + self.ffwd(self.ln2(x))
        return x


class MiniGPT(nn.Module):
    """Embeddings, blocks, a final norm, and an untied head with a bias."""

    def __init__(self, vocab_size: int, n_ctx: int, n_layer: int, n_head: int, d_model: int, dropout: float):
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, d_model)
        self.pos_embed = nn.Embedding(n_ctx, d_model)
        self.blocks = nn.Sequential(*(Block(d_model, n_head, dropout) for _ in range(n_layer)))
        self.ln_f = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]))  # (B, T, C)
        return self.lm_head(self.ln_f(self.blocks(x)))


MINI_NAMES = {
    "wte": "token_embed",
    "wpe": "pos_embed",
    "attn.c_proj": "sa.proj",
    "mlp.c_fc": "ffwd.net.0",
    "mlp.c_proj": "ffwd.net.3",
    "res_1.ln_in": "ln1",
    "res_2.ln_in": "ln2",
}


def mini_weights(state: Mapping[str, Tensor], n_head: int) -> Weights:
    """Our weights under Mini GPT's names; the fused c_attn, (3 H D, C), is split into query, key, value and heads."""
    weights: Weights = {}
    for name, value in state.items():
        module, kind = name.rsplit(".", 1)
        block, inside = (module[:9], module[9:]) if module.startswith("blocks.") else ("", module)
        if inside != "attn.c_attn":
            weights[f"{block}{MINI_NAMES.get(inside, inside)}.{kind}"] = value
            continue
        for part, heads in zip(("query", "key", "value"), value.chunk(3), strict=True):
            for h, head in enumerate(heads.chunk(n_head)):
                weights[f"{block}sa.heads.{h}.{part}.{kind}"] = head
    return weights


def mini_forward(ids: Tensor, state: Mapping[str, Tensor], *, n_layer: int, n_head: int) -> Tensor:
    """Mini GPT's logits, (B, T, V), for our weights, dropout off."""
    (vocab_size, d_model), n_ctx = state["wte.weight"].shape, state["wpe.weight"].shape[0]
    mini = MiniGPT(vocab_size, n_ctx, n_layer, n_head, d_model, dropout=0.1).eval()
    return torch.func.functional_call(mini, mini_weights(state, n_head), ids, strict=True)


# ANDREA: six lines a block, every product as x @ W.


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + bias


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(x: Tensor, w: Mapping[str, Tensor], n_head: int) -> Tensor:
    q, k, v = (x @ w["W_qkv"] + w["b_qkv"]).chunk(3, dim=-1)  # (B, T, C)
    q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(-3, -2) for part in (q, k, v))  # (B, H, T, D)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    z = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return z.transpose(-3, -2).flatten(-2) @ w["W_o"] + w["b_o"]


def block_forward(x: Tensor, w: Mapping[str, Tensor], n_head: int) -> Tensor:
    h = layer_norm(x, w["g_1"], w["c_1"])
    h = attention(h, w, n_head)
    x = x + h
    h = layer_norm(x, w["g_2"], w["c_2"])
    h = gelu_tanh(h @ w["W_1"] + w["b_1"]) @ w["W_2"] + w["b_2"]
    return x + h


def model_forward(ids: Tensor, w: Mapping[str, Tensor], *, n_layer: int, n_head: int) -> Tensor:
    """Logits, (B, T, V); `w` as `andrea_weights` names them, a block's with `{l}.` before them."""
    x = w["W_E"][ids] + w["W_P"][: ids.shape[1]]
    for layer in range(n_layer):
        x = block_forward(x, {name.removeprefix(f"{layer}."): value for name, value in w.items()}, n_head)
    return layer_norm(x, w["g_f"], w["c_f"]) @ w["W_E"].T


ANDREA_NAMES = {
    "wte.weight": "W_E",
    "wpe.weight": "W_P",
    "res_1.ln_in.weight": "g_1",
    "res_1.ln_in.bias": "c_1",
    "attn.c_attn.weight": "W_qkv",
    "attn.c_attn.bias": "b_qkv",
    "attn.c_proj.weight": "W_o",
    "attn.c_proj.bias": "b_o",
    "res_2.ln_in.weight": "g_2",
    "res_2.ln_in.bias": "c_2",
    "mlp.c_fc.weight": "W_1",
    "mlp.c_fc.bias": "b_1",
    "mlp.c_proj.weight": "W_2",
    "mlp.c_proj.bias": "b_2",
    "ln_f.weight": "g_f",
    "ln_f.bias": "c_f",
}


def andrea_weights(state: Mapping[str, Tensor]) -> Weights:
    """Our weights under ANDREA's names; ours are (out, in), ANDREA's (in, out), so W_1 is (C, 4 C)."""
    weights: Weights = {}
    for name, value in state.items():
        block, inside = (name[7:9], name[9:]) if name.startswith("blocks.") else ("", name)
        matrix = value.dim() == 2 and block
        weights[block + ANDREA_NAMES[inside]] = value.T if matrix else value
    return weights


# One join at a time.


class TransformerSublayer(nn.Module):
    """Any branch in post-norm: norm(x + dropout(f(x)))."""

    def __init__(self, sublayer: nn.Module, d_model: int, dropout: float = 0.1):
        super().__init__()
        self.sublayer = sublayer
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.sublayer(x)))


class PreNormSublayer(TransformerSublayer):
    """Its pre-norm twin: x + dropout(f(norm(x)))."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.sublayer(self.norm(x)))


def reference_join(
    name: str,
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    norms: Mapping[str, Callable[[Tensor], Tensor]],
    gain: Tensor | None,
    drop: Callable[[Tensor], Tensor],
    index: int,
    depth: int,
) -> Tensor:
    """One join, row by row as its source writes it. A norm or gain that the row does not have is never touched."""
    match name:
        case "pre":
            return x + drop(f(norms["ln_in"](x)))
        case "post":
            return norms["ln_add"](x + drop(f(x)))
        case "sandwich":
            return x + drop(norms["ln_out"](f(norms["ln_in"](x))))
        case "reordered":
            return x + drop(norms["ln_out"](f(x)))
        case "none":
            return x + drop(f(x))
        case "deepnorm":
            return norms["ln_add"]((2 * depth) ** 0.25 * x + drop(f(x)))
        case "rezero":
            return x + drop(gain * f(x))
        case "layerscale":
            return x + drop(gain * f(norms["ln_in"](x)))
        case "lns":
            return x + drop(f(norms["ln_in"](x) / math.sqrt(index + 1)))
        case "mix" if index < depth / 4:
            return norms["ln_add"](x + drop(f(x)))
        case "mix":
            return x + drop(f(norms["ln_in"](x)))
        case "no_skip":
            return drop(f(norms["ln_in"](x)))
        case "no_skip_bare":
            return drop(f(x))
    raise AssertionError(f"the papers' side of row {name!r} is not written")


def norm_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The norm with a module's gain and bias, by PyTorch's function."""
    shape, weight, bias = module.weight.shape, module.weight, getattr(module, "bias", None)
    if isinstance(module, nn.RMSNorm):
        return lambda x: F.rms_norm(x, shape, weight, module.eps)
    return lambda x: F.layer_norm(x, shape, weight, bias, module.eps)


# Any config, written out.


def turned(x: Tensor, base: float) -> Tensor:
    """x (B, T, H, D) with pair i, dimensions i and i + D / 2, turned by the angle t base^(-2 i / D) at position t.

    As complex numbers: a turn is a product with e^(i angle). Su et al. 2021, equation 14.
    """
    T, D = x.shape[1], x.shape[-1]
    angles = torch.arange(T).double()[:, None, None] * base ** (-torch.arange(0, D, 2).double() / D)  # (T, 1, D / 2)
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def activated(name: str, h: Tensor) -> Tensor:
    """An MLP's activation; a gated one takes gate and up side by side."""
    gate, up = h.chunk(2, -1)
    match name:
        case "gelu":
            return h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        case "gelu_tanh":
            return gelu_tanh(h)
        case "relu":
            return h.clamp(min=0)
        case "relu2":
            return h.clamp(min=0) ** 2
        case "swiglu":
            return gate * torch.sigmoid(gate) * up
        case "geglu":
            return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    raise AssertionError(f"activation {name!r} is not written")


def plain_forward(ids: Tensor, state: Mapping[str, Tensor], config: Any) -> Tensor:
    """Logits, (B, T, V), of any resolved config without dropout; `state` under our names."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    def norm(name: str) -> Callable[[Tensor], Tensor]:
        gain, bias = state[f"{name}.weight"], state.get(f"{name}.bias", 0.0)
        if config.norm == "rmsnorm":
            return lambda x: rms_norm(x, gain, config.norm_eps)
        return lambda x: layer_norm(x, gain, bias, config.norm_eps)

    def attend(index: int, x: Tensor) -> Tensor:
        name, scale = f"blocks.{index}.attn", config.attn_scale / (index + 1 if config.attn_scale_by_depth else 1)
        parts = linear(f"{name}.c_attn", x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (config.n_head, config.d_head)) for part in parts)  # (B, T, H, D)
        if config.qk_norm:
            q, k = norm(f"{name}.q_norm")(q), norm(f"{name}.k_norm")(k)
        if config.position == "rotary":
            q, k = turned(q, config.rope_base), turned(k, config.rope_base)
        scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        z = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, -math.inf).softmax(-1), v)
        return linear(f"{name}.c_proj", z.flatten(-2))

    def feed(index: int, x: Tensor) -> Tensor:
        name = f"blocks.{index}.mlp"
        return linear(f"{name}.c_proj", activated(config.activation, linear(f"{name}.c_fc", x)))

    x = state["wte.weight"][ids]
    if config.position == "learned":
        x = x + state["wpe.weight"][: ids.shape[1]]
    for index in range(config.n_layer):
        for join, branch in (("res_1", attend), ("res_2", feed))[: 2 if config.d_mlp else 1]:
            place, slots = f"blocks.{index}.{join}", ("ln_in", "ln_out", "ln_add")
            norms = {slot: norm(f"{place}.{slot}") for slot in slots if f"{place}.{slot}.weight" in state}
            x = reference_join(
                config.residual, partial(branch, index), x, norms=norms, gain=state.get(f"{place}.gain.weight"),
                drop=lambda y: y, index=index, depth=config.n_layer,
            )  # fmt: skip
    if "ln_f.weight" in state:
        x = norm("ln_f")(x)
    return linear("lm_head", x)
