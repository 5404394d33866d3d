"""Points by the names that people bring: ours, patterns over ours, TransformerLens's. Every name means one tensor."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from mainstem.config import ModelConfig
from mainstem.errors import ConfigError, nearest
from mainstem.model.tap import all_points

BUDGET = 4 << 30
"""Bytes that a capture or a table of rows may take unless it is told otherwise."""

Key = str | tuple[str | int | None, ...]

DERIVED = ("attn.scores", "attn.result", "res_1.ln_in.normalized", "res_2.ln_in.normalized")
"""What a block has besides its points, computed from them when a trace is asked for it: the scores before the softmax
(B, H, T, T), each head's write before `ln_out` and without the bias (B, T, H, C), and what a norm makes of the stream
before its gain and bias (B, T, C)."""

# TransformerLens's names (its 4.3, both spellings), after `blocks.{l}.` and without `hook_`
_FOREIGN = {
    "in": "resid_pre",
    "out": "resid_post",
    "attn.out": "attn_out",
    "mlp.out": "mlp_out",
    "attn.rot_q": "attn.q",
    "attn.rot_k": "attn.k",
    "attn.attn_scores": "attn.scores",
    "ln1.scale": "res_1.ln_in.scale",
    "ln2.scale": "res_2.ln_in.scale",
    "ln1.normalized": "res_1.ln_in.normalized",
    "ln2.normalized": "res_2.ln_in.normalized",
}
_FOREIGN_ENDS = {
    "embed.out": "embed",
    "pos_embed.out": "pos_embed",
    "ln_final.scale": "ln_f.scale",
    "ln_final.normalized": "ln_f.normalized",
}
_SHORT = {
    **{name: f"attn.{name}" for name in ("q", "k", "v", "z", "pattern", "scores", "result", "rot_q", "rot_k")},
    "attn_scores": "attn.scores",
    **{name: f"mlp.{name}" for name in ("pre", "post")},
}
_PARTS = {"a": "attn", "attn": "attn", "m": "mlp", "mlp": "mlp", "ln1": "ln1", "ln2": "ln2"}
_GLUED = re.compile(r"([a-z_]+?)(\d+)(attn|mlp|ln1|ln2|a|m)?")


def names(config: ModelConfig) -> list[str]:
    """Every name of ours that a trace of this model answers to, derived ones last."""
    points = all_points(config)
    blocks = [f"blocks.{index}.{name}" for index in range(config.n_layer) for name in DERIVED]
    possible = [name for name in blocks if _exists(name, points)]
    return points + possible + (["ln_f.normalized"] if "ln_f.scale" in points else [])


def _exists(derived: str, points: list[str]) -> bool:
    return derived.endswith(("scores", "result")) or derived.replace("normalized", "scale") in points


def resolve(key: Key, config: ModelConfig) -> str:
    """Our name of one point.

    Args:
        key: `blocks.3.resid_pre`; `("resid_pre", 3)`, `("resid_pre", -1)`, `("q", 3, "attn")`, `("scale", 3, "ln1")`;
            `resid_pre3`, `k6`, `scale4ln1`; `blocks.3.hook_resid_pre`, `blocks.3.hook_in`, `ln_final.hook_scale`.
        config: of the model.

    Raises ConfigError, with the nearest name, for a point that the model does not have.
    """
    name = _spell(key, config)
    valid = names(config)
    if name in valid:
        return name
    rotated = {"attn.hook_q": "attn.q", "attn.hook_k": "attn.k"}.get(".".join(name.split(".")[2:]))
    if rotated is not None:  # `_spell` let it stand: the other library means something else by it
        raise ConfigError(f"point: {name!r} is before norm and rotation; {rotated!r} is what enters the product")
    near = nearest(name, valid)
    if not near.startswith("did you mean"):  # as many as a deep model has points would help nobody
        near = f"valid: {', '.join(dict.fromkeys(re.sub(r'blocks.[0-9]+', 'blocks.{l}', point) for point in valid))}"
    raise ConfigError(f"point: {key!r} is not in this model; {near}")


def _spell(key: Key, config: ModelConfig) -> str:
    if isinstance(key, tuple):
        return _spell_tuple(key, config)
    glued = _GLUED.fullmatch(key)
    if glued is not None:
        return _spell_tuple((glued[1], int(glued[2]), glued[3]), config)
    plain = key.replace("hook_", "")
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", plain)
    if block is None:
        return _FOREIGN_ENDS.get(plain, plain)
    if re.fullmatch(r"attn\.hook_[qk]", key.split(".", 2)[2]) and (config.position == "rotary" or config.qk_norm):
        return key
    return f"blocks.{block[1]}.{_FOREIGN.get(block[2], block[2])}"


def _spell_tuple(key: tuple[str | int | None, ...], config: ModelConfig) -> str:
    name, layer, part = (*key, None, None)[:3]
    if not (isinstance(name, str) and isinstance(layer, int | None) and isinstance(part, str | None) and len(key) <= 3):
        raise ConfigError(f"point: {key!r} is not a name; give ('resid_post', 3) or 'blocks.3.resid_post'")
    if layer is None:
        return _spell(name, config)
    if not -config.n_layer <= layer < config.n_layer:
        raise ConfigError(f"point: {key!r} asks for block {layer}; the model has {config.n_layer}, from 0")
    if part is not None:
        name = f"{_PARTS.get(part, part)}.{name}"
    name = _FOREIGN.get(name, name)
    return f"blocks.{layer % config.n_layer}.{_SHORT.get(name, name)}"


def select(spec: str | Iterable[Key], config: ModelConfig) -> list[str]:
    """Our names of several points, in the order of the forward pass.

    Args:
        spec: names as `resolve` takes them, and patterns: `*.attn_out`, `blocks.0.*`; `resid_post` alone means that of
            every block.
        config: of the model.

    Raises ConfigError for a name or pattern that matches nothing.
    """
    points = all_points(config)
    chosen: set[str] = set()
    for key in [spec] if isinstance(spec, str) else spec:
        found = _matching(key, points) if isinstance(key, str) else []
        chosen.update(found or [_point(key, config, points)])
    return [point for point in points if point in chosen]


def _matching(key: str, points: list[str]) -> list[str]:
    if any(mark in key for mark in "*?["):
        found = [point for point in points if fnmatchcase(point, key)]
        if not found:
            raise ConfigError(f"point: the pattern {key!r} matches nothing; {nearest(key.replace('*', ''), points)}")
        return found
    name = _SHORT.get(key, key)
    return [point for point in points if point.startswith("blocks.") and point.split(".", 2)[2] == name]


def _point(key: Key, config: ModelConfig, points: list[str]) -> str:
    point = resolve(key, config)
    if point not in points:
        raise ConfigError(f"point: {point!r} is computed from others and cannot be captured; ask the trace for it")
    return point


def size(point: str, config: ModelConfig, batch: int, length: int) -> int:
    """How many numbers a point holds for (batch, length) tokens."""
    config, tokens, name = config.resolved(), batch * length, point.split(".")[-1]
    if point.endswith(".pattern"):
        return tokens * length * config.n_head
    if name in ("mean", "scale"):
        return tokens
    if ".attn." in point:
        return tokens * config.n_head * config.d_head
    return tokens * (config.d_mlp if ".mlp." in point else config.d_model)
