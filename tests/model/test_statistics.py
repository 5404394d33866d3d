"""What is recorded of a norm is what the norm did."""

import torch
from hypothesis import given

from models import build, configs, error, few, record, tokens


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
