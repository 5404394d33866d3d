"""Law 12: gradients at the points of the stream."""

import pytest
import torch

from models import ROWS, Change, build, error, normal, record, small, tokens

STREAM = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


def loss_of(logits):
    return logits.square().mean() + logits[..., 0].mean()


def gradients(model, ids):
    """Every point of the stream, and the loss's gradient there."""
    points = record(model, ids)
    names = [name for name in points if name.rsplit(".", 1)[-1] in (*STREAM, "embed", "pos_embed", "resid_final")]
    found = torch.autograd.grad(loss_of(points["logits"]), [points[name] for name in names], retain_graph=True)
    return points, dict(zip(names, found, strict=True))


@pytest.mark.parametrize("residual", ROWS)
def test_gradients_are_finite_differences(residual):
    """At every point, along one direction, by the central difference of fourth order; float64."""
    model = build(small(residual))
    ids = tokens(model.config)
    _, gradient = gradients(model, ids)
    direction, step = normal(*ids.shape, model.config.d_model), 3e-4

    def loss(point, by):
        return loss_of(model(ids, tap=Change({point: lambda x: x + by * direction}))).item()

    for point, value in gradient.items():
        near, far = (loss(point, h) - loss(point, -h) for h in (step, 2 * step))
        slope = (8 * near - far) / (12 * step)
        assert slope == pytest.approx((value * direction).sum().item(), rel=1e-7, abs=1e-9), point


@pytest.mark.parametrize("residual", ROWS)
def test_at_a_join_the_skips_part_and_the_branchs_part_sum(residual):
    """The gradient at the sum is the write's; skip times it, and it through the branch, is the gradient before."""
    model = build(small(residual))
    points, gradient = gradients(model, tokens(model.config))
    for index, block in enumerate(model.blocks):
        for join, before, write in (("res_1", "resid_pre", "attn_out"), ("res_2", "resid_mid", "mlp_out")):
            before, write = f"blocks.{index}.{before}", f"blocks.{index}.{write}"
            (branch,) = torch.autograd.grad(points[write], points[before], gradient[write], retain_graph=True)
            assert error(getattr(block, join).skip(gradient[write]) + branch, gradient[before]) < 1e-10


def test_silent_blocks_pass_the_gradient_unchanged():
    """With zero output projections the gradient is the same at every depth."""
    model = build(small())
    for block in model.blocks:
        for parameter in (*block.attn.c_proj.parameters(), *block.mlp.c_proj.parameters()):
            torch.nn.init.zeros_(parameter)
    _, gradient = gradients(model, tokens(model.config))
    for index in range(model.config.n_layer):
        assert torch.equal(gradient[f"blocks.{index}.resid_pre"], gradient["resid_final"])
