"""Points by the names that people bring: ours, patterns over ours, TransformerLens's. Every name means one tensor."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from mainstem.errors import ConfigError, nearest
from mainstem.model import names
from mainstem.model.gpt import GPT

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


def answered(model: GPT) -> list[str]:
    """Every name of ours that a trace of this model answers to, derived ones last."""
    points = model.points()
    blocks = [names.point(name, index) for index in range(len(model.blocks)) for name in DERIVED]
    possible = [name for name in blocks if _exists(name, points)]
    return points + possible + (["ln_f.normalized"] if "ln_f.scale" in points else [])


def _exists(derived: str, points: list[str]) -> bool:
    return derived.endswith(("scores", "result")) or derived.replace("normalized", "scale") in points


def resolve(key: Key, model: GPT) -> str:
    """Our name of one point.

    Args:
        key: `blocks.3.resid_pre`; `("resid_pre", 3)`, `("resid_pre", -1)`, `("q", 3, "attn")`, `("scale", 3, "ln1")`;
            `resid_pre3`, `k6`, `scale4ln1`; `blocks.3.hook_resid_pre`, `blocks.3.hook_in`, `ln_final.hook_scale`.
        model: whose points.

    Raises ConfigError, with the nearest name, for a point that the model does not have.
    """
    name = _spell(key, model)
    valid = answered(model)
    if name in valid:
        return name
    rotated = {"attn.hook_q": "attn.q", "attn.hook_k": "attn.k"}.get(names.split(name)[1])
    if rotated is not None:  # `_spell` let it stand: the other library means something else by it
        raise ConfigError(f"point: {name!r} is before norm and rotation; {rotated!r} is what enters the product")
    near = nearest(name, valid)
    if not near.startswith("did you mean"):  # as many as a deep model has points would help nobody
        kinds = (names.split(point) for point in valid)
        each = dict.fromkeys(names.point(name, None if block is None else "{l}") for block, name in kinds)
        near = f"valid: {', '.join(each)}"
    raise ConfigError(f"point: {key!r} is not in this model; {near}")


def _spell(key: Key, model: GPT) -> str:
    if isinstance(key, tuple):
        return _spell_tuple(key, model)
    if not isinstance(key, str):
        raise ConfigError(f"point: {key!r} is not a name; give ('resid_post', 3) or 'blocks.3.resid_post'")
    glued = _GLUED.fullmatch(key)
    if glued is not None:
        return _spell_tuple((glued[1], int(glued[2]), glued[3]), model)
    plain = key.replace("hook_", "")
    block, name = names.split(plain)
    if block is None:
        return _FOREIGN_ENDS.get(plain, plain)
    turned = model.config.position == "rotary" or model.config.qk_norm
    if turned and names.split(key)[1] in ("attn.hook_q", "attn.hook_k"):
        return key
    return names.point(_FOREIGN.get(name, name), block)


def _spell_tuple(key: tuple[str | int | None, ...], model: GPT) -> str:
    name, layer, part = (*key, None, None, None)[:3]
    if not (isinstance(name, str) and isinstance(layer, int | None) and isinstance(part, str | None) and len(key) <= 3):
        raise ConfigError(f"point: {key!r} is not a name; give ('resid_post', 3) or 'blocks.3.resid_post'")
    if layer is None:
        return _spell(name, model)
    L = len(model.blocks)
    if not -L <= layer < L:
        raise ConfigError(f"point: {key!r} asks for block {layer}; the model has {L}, from 0")
    if part is not None:
        name = f"{_PARTS.get(part, part)}.{name}"
    name = _FOREIGN.get(name, name)
    return names.point(_SHORT.get(name, name), layer % L)


def select(spec: str | Iterable[Key], model: GPT) -> list[str]:
    """Our names of several points, in the order of the forward pass.

    Args:
        spec: names as `resolve` takes them, and patterns: `*.attn_out`, `blocks.0.*`; `resid_post` alone means that of
            every block.
        model: whose points.

    Raises ConfigError for a name or pattern that matches nothing.
    """
    points = model.points()
    chosen: set[str] = set()
    for key in [spec] if isinstance(spec, str) else spec:
        matches = _matching(key, points) if isinstance(key, str) else []
        chosen.update(matches or [_point(key, model, points)])
    return [point for point in points if point in chosen]


def _matching(key: str, points: list[str]) -> list[str]:
    if any(mark in key for mark in "*?["):
        matches = [point for point in points if fnmatchcase(point, key)]
        if not matches:
            raise ConfigError(f"point: the pattern {key!r} matches nothing; {nearest(key.replace('*', ''), points)}")
        return matches
    name = _SHORT.get(key, key)
    return [point for point in points if names.split(point)[1] == name != point]


def _point(key: Key, model: GPT, points: list[str]) -> str:
    point = resolve(key, model)
    if point not in points:
        raise ConfigError(f"point: {point!r} is computed from others and cannot be captured; ask the trace for it")
    return point


def position(pos: int, T: int) -> int:
    """The position from 0. Raises ConfigError for one that T positions do not have."""
    if not -T <= pos < T:
        raise ConfigError(f"pos: {pos} is out of range; the text has {T} positions, from 0 (or from -1, backwards)")
    return pos % T


def size(point: str, model: GPT, batch: int, length: int) -> int:
    """How many numbers a point holds for (batch, length) tokens."""
    config, tokens, name = model.config, batch * length, point.split(".")[-1]
    if point.endswith(".pattern"):
        return tokens * length * config.n_head
    if name in ("mean", "scale"):
        return tokens
    if ".attn." in point:
        return tokens * config.n_head * config.d_head
    return tokens * (config.d_mlp if ".mlp." in point else config.d_model)
