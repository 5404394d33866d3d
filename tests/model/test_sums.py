"""Law 1: sums close, for every row, carried through every later skip and norm.

`carried` writes the stream as rows, one for each write and each norm's bias. With its recorded scale a norm is linear:
each row is centred (LayerNorm), divided by that scale and multiplied by the gain, and the bias is one more row.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import ROWS, build, configs, error, few, record, tokens

PRECISIONS = st.sampled_from([(torch.float64, 1e-10), (torch.float32, 1e-5)])


def through(rows, norm, name, scale):
    """The rows of a sum, carried through the norm over it; the norm's bias is a row of its own."""
    if not list(norm.parameters()):
        return rows
    if isinstance(norm, torch.nn.LayerNorm):
        rows = {label: row - row.mean(-1, keepdim=True) for label, row in rows.items()}
    rows = {label: norm.weight * row / scale for label, row in rows.items()}
    bias = getattr(norm, "bias", None)
    return rows if bias is None else rows | {f"{name}.bias": bias.expand(*scale.shape[:-1], -1)}


def carried(model, points):
    """resid_final, (B, T, C), as rows."""
    rows = {name: points[name] for name in ("embed", "pos_embed") if name in points}
    for index, block in enumerate(model.blocks):
        for branch, join in (("attn_out", "res_1"), ("mlp_out", "res_2")):
            if hasattr(block, join):
                module, name = getattr(block, join), f"blocks.{index}.{join}.ln_add"
                rows = {label: module.skip(row) for label, row in rows.items()}
                rows[f"{index}_{branch}"] = points[f"blocks.{index}.{branch}"]
                rows = through(rows, module.ln_add, name, points.get(f"{name}.scale"))
    return rows


def head_rows(model, points, index):
    """attn_out of one block, (B, T, C), as a row for each head and each bias."""
    block, here = model.blocks[index], f"blocks.{index}."
    z, proj = points[here + "attn.z"], block.attn.c_proj  # (B, T, H, D)
    by_head = zip(z.unbind(2), proj.weight.chunk(z.shape[2], dim=1), strict=True)
    rows = {f"L{index}H{h}": z_h @ w_h.T for h, (z_h, w_h) in enumerate(by_head)}
    if proj.bias is not None:
        rows["c_proj.bias"] = proj.bias.expand_as(points["embed"])
    rows = through(rows, block.res_1.ln_out, "ln_out", points.get(f"{here}res_1.ln_out.scale"))
    return {label: block.res_1.gain(row) for label, row in rows.items()}


def logit_rows(model, points, token):
    """One token's logit, (B, T), as rows."""
    rows = through(carried(model, points), model.ln_f, "ln_f", points.get("ln_f.scale"))
    rows = {label: row @ model.lm_head.weight[token] for label, row in rows.items()}
    return rows if model.lm_head.bias is None else rows | {"lm_head.bias": model.lm_head.bias[token]}


@few
@given(st.data(), PRECISIONS)
@pytest.mark.parametrize("residual", ROWS)
def test_sums_close(residual, data, precision):
    """Law 1: the rows sum to resid_final, heads and biases to attn_out, an attribution's rows to the logit."""
    dtype, tolerance = precision
    model = build(data.draw(configs(residual=residual)), dtype)
    points = record(model, tokens(model.config))

    assert error(sum(carried(model, points).values()), points["resid_final"]) < tolerance
    assert error(sum(logit_rows(model, points, token=3).values()), points["logits"][..., 3]) < tolerance
    for index in range(model.config.n_layer):
        expected = points[f"blocks.{index}.attn_out"]
        assert error(sum(head_rows(model, points, index).values()), expected) < tolerance


@few
@given(configs())
def test_recorded_statistics_are_the_norms(config):
    """(x - mean) / scale, then gain and bias, is what each norm returned."""
    model, inside = build(config), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm) and "attn." not in name:
            module.register_forward_hook(lambda _, x, y, name=name: inside.update({name: (x[0], y)}))
    points = record(model, tokens(config))
    for name, (x, y) in inside.items():
        norm = model.get_submodule(name)
        expected = norm.weight * (x - points[f"{name}.mean"]) / points[f"{name}.scale"]
        assert error(y, expected if getattr(norm, "bias", None) is None else expected + norm.bias) < 1e-12
    assert len(inside) == sum(point.endswith(".scale") for point in points)
