"""The views are the model: what they write and read is what a forward pass does, with the scales that it recorded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.circuits.head_weights import heads, ov, qk
from mainstem.circuits.paths import NoPath, check_path
from mainstem.circuits.weights import reader, readers, writer, writers
from mainstem.errors import ConfigError
from models import ROWS, Change, build, configs, error, few, normal, record, small, tokens


def read_by(model, ids, change=None):
    """Every point, and what each reader reads, before rotation and the norm over the head, by the reader's label."""
    seen, outputs = {}, {}
    for name, module in model.named_modules():
        if name.endswith(("c_attn", "c_fc")):
            module.register_forward_hook(lambda _, x, y, name=name: outputs.update({name: y}))
    points = record(model, ids) if change is None else {}
    logits = points["logits"] if change is None else model(ids, tap=change)
    for index, block in enumerate(model.blocks):
        parts = outputs[f"blocks.{index}.attn.c_attn"].unflatten(-1, (3, block.attn.n_head, -1))
        for h in range(block.attn.n_head):
            seen |= {f"L{index}H{h}.{role}": parts[:, :, i, h] for i, role in enumerate("QKV")}
        if block.mlp is not None:
            names = [f"{index}_mlp.gate", f"{index}_mlp.up"] if block.mlp.gated else [f"{index}_mlp_in"]
            seen |= dict(zip(names, outputs[f"blocks.{index}.mlp.c_fc"].chunk(len(names), dim=-1), strict=True))
    return points, seen | {"unembed": logits}


def stream_at(model, points, place):
    """The stream that the join at this place reads, (B, T, C)."""
    stack = model.joins()
    return points["resid_final" if place == len(stack) else stack[place].reads]


def over(points, scales):
    """The product of the recorded scales that a view leaves out."""
    return math.prod((points[scale] for scale in scales), start=torch.ones(1))


@few
@given(st.data())
@pytest.mark.parametrize("residual", ROWS)
def test_readers_read_what_the_model_reads(residual, data):
    """Up to a constant: the biases, which depend on no input."""
    model = build(data.draw(configs(residual=residual, qk_norm=False)))
    points, seen = read_by(model, tokens(model.config))
    assert list(seen) == list(readers(model))
    for label, view in readers(model).items():
        value = stream_at(model, points, view.place) @ view.matrix / over(points, view.scales)
        constant = seen[label] - value
        assert error(constant - constant[:1, :1] + seen[label], seen[label]) < 1e-10


@few
@given(configs(bias=False, qk_norm=True, position="none"))
def test_a_norm_over_the_head_leaves_the_direction(config):
    model = build(config)
    points = record(model, tokens(config))
    for label in ("L0H0.Q", "L0H0.K"):
        view = reader(model, label)
        value = stream_at(model, points, 0) @ view.matrix
        actual = points[f"blocks.0.attn.{label[-1].lower()}"][:, :, 0]
        cosine = torch.cosine_similarity(value, actual, dim=-1)
        assert view.direction_only
        assert f"{label}: direction only" in view.notes[-1]
        if actual.abs().max() > 1e-6:  # a head of one channel, centred, is nothing
            assert error(cosine, torch.ones_like(cosine)) < 1e-10
    assert not reader(model, "L0H0.V").direction_only


@few
@given(st.data())
@pytest.mark.parametrize("residual", ROWS)
def test_writers_write_what_the_model_writes(residual, data):
    """Without biases the heads sum to attn_out; ln_out and gain are in the views, and the scale stands beside them."""
    model = build(data.draw(configs(residual=residual, bias=False)))
    ids = tokens(model.config)
    points, written = record(model, ids), writers(model)
    assert torch.equal(written["embed"].matrix[ids], points["embed"])
    for index, block in enumerate(model.blocks):
        here, total = f"blocks.{index}.", 0
        for h in range(block.attn.n_head):
            view = written[f"L{index}H{h}"]
            total = total + points[here + "attn.z"][:, :, h] @ view.matrix / over(points, view.scales)
        assert error(total, points[here + "attn_out"]) < 1e-10
        if block.mlp is not None:
            view = written[f"{index}_mlp_out"]
            value = points[here + "mlp.post"] @ view.matrix / over(points, view.scales)
            assert error(value, points[here + "mlp_out"]) < 1e-10


@few
@given(st.data())
@pytest.mark.parametrize("residual", ROWS)
def test_a_path_is_the_linear_path(residual, data):
    """All writes are held as they were, but for one that is moved. What that changes at a reader, times its scale, is
    what the virtual weights say; a reader before it, or behind a skip of 0, reads nothing new.
    """
    model = build(data.draw(configs(residual=residual, bias=False, qk_norm=False, lm_head_bias=False)))
    ids = tokens(model.config)
    points, seen = read_by(model, ids)
    writes = [p for p in points if p.endswith(("embed", "attn_out", "mlp_out"))]
    scales = {p for p in points if p.endswith("scale")}
    source = data.draw(st.sampled_from(list(writers(model).values())))
    moved, now = normal(*ids.shape, source.weight.shape[0]), {}
    changes = {p: lambda _, p=p: points[p] for p in writes} | {p: lambda s, p=p: now.setdefault(p, s) for p in scales}
    point = source.label
    if source.place >= 0:
        point = model.joins()[source.place].write
    changes[point] = lambda _: points[point] + moved @ source.matrix
    _, after = read_by(model, ids, Change(changes))

    for label, target in readers(model).items():
        change = after[label] * over(now, target.scales) - seen[label] * over(points, target.scales)
        try:
            skips = check_path(model, source, target)
        except ConfigError as reason:
            if "ln_add" not in str(reason):
                assert change.abs().max() < 1e-10
        else:
            assert error(change, skips * moved @ source.matrix @ target.matrix) < 1e-10


@pytest.mark.parametrize(
    ("residual", "writes", "reads", "reason"),
    [
        ("pre", "L1H0", "L1H1.Q", r"L1H1\.Q reads before L1H0 has written"),
        ("pre", "0_mlp_out", "0_mlp_in", "reads before 0_mlp_out has written"),
        ("pre", "2_mlp_out", "L0H0.V", "reads before"),
        ("post", "embed", "0_mlp_in", r"blocks\.0\.res_1\.ln_add, a norm over the stream itself, lies between"),
        ("post", "L0H0", "0_mlp_in", r"blocks\.0\.res_1\.ln_add"),
        ("deepnorm", "2_mlp_out", "unembed", r"blocks\.2\.res_2\.ln_add"),
        ("mix", "L0H0", "L1H0.K", r"blocks\.0\.res_1\.ln_add"),
        ("mix", "embed", "L2H0.V", r"blocks\.0\.res_1\.ln_add"),
        ("no_skip", "embed", "0_mlp_in", r"blocks\.0\.res_1\.skip is 0"),
        ("no_skip_bare", "L0H0", "L1H0.V", r"blocks\.0\.res_2\.skip is 0"),
    ],
)
def test_where_there_is_no_path_the_reason_is_said(residual, writes, reads, reason):
    model = build(small(residual))
    with pytest.raises(NoPath, match=f"^{writes} -> {reads}: no virtual weights, for .*{reason}"):
        check_path(model, writer(model, writes), reader(model, reads))


@pytest.mark.parametrize(
    ("residual", "writes", "reads"),
    [
        ("post", "embed", "L0H1.V"),
        ("deepnorm", "embed", "L0H0.Q"),
        ("mix", "L1H0", "unembed"),
        ("no_skip", "embed", "L0H0.K"),
        ("no_skip", "L1H1", "1_mlp_in"),
        ("no_skip_bare", "2_mlp_out", "unembed"),
    ],
)
def test_where_nothing_lies_between_there_is_one(residual, writes, reads):
    model = build(small(residual))
    assert check_path(model, writer(model, writes), reader(model, reads)) == 1.0


@few
@given(configs(position="rotary", bias=False, qk_norm=False, residual="pre"), st.integers(0, 6))
def test_qk_at_an_offset_is_the_product_of_a_query_and_a_key_so_far_before_it(config, offset):
    model = build(config)
    points = record(model, tokens(config))
    read = stream_at(model, points, 0) / points["blocks.0.res_1.ln_in.scale"]  # (B, T, C)
    q, k = points["blocks.0.attn.q"][:, :, 0], points["blocks.0.attn.k"][:, :, 0]
    product = qk(model, 0, 0, offset).dense()
    for t in range(offset, q.shape[1]):
        value = torch.einsum("bc,cd,bd->b", read[:, t], product, read[:, t - offset])
        assert error(value, (q[:, t] * k[:, t - offset]).sum(-1)) < 1e-10
    assert torch.equal(qk(model, 0, 0).dense(), qk(model, 0, 0, offset=1).dense())


@few
@given(configs(bias=False, qk_norm=False, residual="none", position="none"))
def test_ov_is_what_a_head_writes_for_what_it_reads(config):
    model = build(config)
    points = record(model, tokens(config))
    pattern = points["blocks.0.attn.pattern"]  # (B, H, T, T)
    written = sum(pattern[:, h] @ points["embed"] @ ov(model, 0, h).dense() for h in range(config.n_head))
    assert error(written, points["blocks.0.attn_out"]) < 1e-10


def test_an_offset_is_for_rotary_positions_and_for_earlier_keys():
    with pytest.raises(ConfigError, match=r"offset: 2 is not supported; .* `position` is learned"):
        qk(build(small()), 0, 0, offset=2)
    with pytest.raises(ConfigError, match="offset: -1 is a key after the query"):
        qk(build(small(position="rotary")), 0, 0, offset=-1)


def test_labels_are_in_the_order_of_the_forward_pass():
    model = build(small(n_layer=2, activation="swiglu"))
    heads_of = [f"L{index}H{h}" for index in range(2) for h in range(2)]
    roles = [f"{head}.{role}" for head in heads_of for role in "QKV"]
    mlps = [[f"{index}_mlp.gate", f"{index}_mlp.up"] for index in range(2)]
    assert list(writers(model)) == ["embed", "pos_embed", *heads_of[:2], "0_mlp_out", *heads_of[2:], "1_mlp_out"]
    assert list(readers(model)) == [*roles[:6], *mlps[0], *roles[6:], *mlps[1], "unembed"]
    assert "1_mlp_in" in readers(build(small(n_layer=2)))


def test_an_unknown_label_is_answered_with_the_nearest():
    model = build(small())
    with pytest.raises(ConfigError, match=r"writer: 'L9H0' is not in this model; did you mean 'L[012]H0'"):
        writer(model, "L9H0")
    with pytest.raises(ConfigError, match=r"reader: '1_mlp_on' is not in this model; did you mean '1_mlp_in'"):
        reader(model, "1_mlp_on")
    with pytest.raises(ConfigError, match=r"'L0H5\.V' is not in this model"):
        ov(model, 0, 5)


def test_scales_that_are_left_out_are_named():
    model = build(small("sandwich"))
    assert writer(model, "L1H0").scales == ("blocks.1.res_1.ln_out.scale",)
    assert reader(model, "1_mlp_in").scales == ("blocks.1.res_2.ln_in.scale",)
    assert reader(model, "unembed").notes == ("unembed: up to 1 / ln_f.scale, a positive number for each token",)
    assert writer(model, "embed").notes == ()


def test_the_model_is_seen_and_not_touched():
    """A view follows a weight that changes; folding changes none."""
    model = build(small("sandwich"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    view = writer(model, "L0H1")
    old = view.matrix
    heads(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        model.blocks[0].attn.c_proj.weight.mul_(2)
    assert torch.equal(view.matrix, 2 * old)
    assert not view.matrix.requires_grad


def test_half_precision_is_widened():
    model = build(small(), torch.bfloat16)
    views = [*writers(model).values(), *readers(model).values()]
    assert {view.matrix.dtype for view in views} == {torch.float32}


@pytest.mark.parametrize(
    ("residual", "norm", "read"),
    [
        ("pre", "layernorm", 11),
        ("pre", "rmsnorm", 12),
        ("none", "layernorm", 12),
        ("mix", "layernorm", 11),  # the post block's readers do not centre, and no head has a path to them
        ("reordered", "layernorm", 12),  # ln_f centres alone
        ("post", "layernorm", 12),
    ],
)
def test_a_mean_that_nobody_reads_is_no_dimension(residual, norm, read):
    every = heads(build(small(residual, norm=norm)))
    assert every.width == read
    assert (every.W_O.mean(-1).abs().max() < 1e-15) == (read == 11)
    with pytest.raises(ConfigError, match="a model without blocks has no heads"):
        heads(build(small(residual, norm=norm, n_layer=0)))
