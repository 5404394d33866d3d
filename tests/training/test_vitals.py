"""Vitals: each number against a plain recomputation, and no trace of the look in the run."""

import math

import pytest
import torch
from torch import nn

from mainstem.model.gpt import GPT
from mainstem.model.tap import Recorder
from mainstem.training.device import Device
from mainstem.training.vitals import COLUMNS, NEAR_ZERO, WINDOWS, Vitals, first_non_finite
from models import ROWS, build, error, small, tokens

CPU = Device.choose("cpu")


def look(model, rows=2):
    """A look at a batch, and the batch."""
    ids = tokens(model.config, rows)
    return Vitals(model, ids[:, :-1], ids[:, 1:], CPU), ids


def plain(model, ids):
    """The stream before each block and after the last, and what both branches of each block wrote, by hand."""
    C = model.config.d_model
    pos = torch.zeros(C).double() if model.wpe is None else model.wpe.weight[: ids.shape[1]]
    x, streams, mids, writes, patterns, hidden = model.wte(ids) + pos, [], [], [], [], []
    for block in model.blocks:
        x.retain_grad()
        streams.append(x)
        kept = Recorder(["attn_out", "attn.pattern", "mlp_out", "mlp.post", "resid_mid"])
        x = block(x, tap=kept)
        patterns.append(kept.values["attn.pattern"])
        hidden.append(kept.values.get("mlp.post"))
        writes.append((kept.values["attn_out"], kept.values.get("mlp_out")))
        mids.append(kept.values.get("resid_mid"))
        if mids[-1] is not None:
            mids[-1].retain_grad()
    x.retain_grad()
    return [*streams, x], mids, writes, patterns, hidden


def over_tokens(f, write, stream):
    """The mean of f(write, stream) over all tokens, one by one."""
    pairs = zip(write.flatten(0, 1).tolist(), stream.flatten(0, 1).tolist(), strict=True)
    values = [f(*pair) for pair in pairs]
    return sum(values) / len(values)


def length(v):
    return math.sqrt(sum(x * x for x in v))


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / (length(a) * length(b))


@pytest.mark.parametrize("d_mlp", [-1, 0])
@pytest.mark.parametrize("residual", ROWS)
def test_each_number_is_what_it_says(residual, d_mlp):
    """In every row of the table, attention-only models too."""
    model = build(small(residual, d_mlp=d_mlp, n_layer=2))
    looked, ids = look(model)
    streams, mids, writes, patterns, hidden = plain(model, ids[:, :-1])
    logits = model.unembed(streams[-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    before = [[p.detach().clone() for p in block.parameters()] for block in model.blocks]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.ones_like(p))
    rows = looked.rows(5)
    assert [(row["step"], row["block"]) for row in rows] == [(5, 0), (5, 1), (5, 2)]
    for row, stream in zip(rows, streams, strict=True):
        flat = stream.flatten().tolist()
        mean = sum(flat) / len(flat)
        assert row["stream"] == pytest.approx(math.sqrt(sum(v * v for v in flat) / len(flat)))
        assert row["mean"] == pytest.approx(mean, abs=1e-9)
        assert row["spread"] == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in flat) / len(flat)))
        assert row["gradient"] == pytest.approx(stream.grad.square().mean().sqrt().item(), rel=1e-5)
    for i, row in enumerate(rows[:-1]):
        pairs = [("attn", writes[i][0], streams[i])] + ([("mlp", writes[i][1], mids[i])] if d_mlp else [])
        for name, write, stream in pairs:
            ratio = over_tokens(lambda w, s: length(w) / length(s), write, stream)
            assert row[f"{name}_write"] == pytest.approx(ratio, rel=1e-5)
            assert row[f"{name}_cos"] == pytest.approx(over_tokens(cosine, write, stream), abs=1e-5)
        queries = patterns[i].flatten(0, 2).tolist()
        entropies = [-sum(p * math.log(p) for p in query if p) for query in queries]
        assert row["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
        firsts = [head[q][0] for each in patterns[i].tolist() for head in each for q in range(1, len(head))]
        assert row["first_token"] == pytest.approx(sum(firsts) / len(firsts), rel=1e-5)
        moved = 0.01 * math.sqrt(sum(p.numel() for p in before[i]))
        size = math.sqrt(sum(p.square().sum().item() for p in before[i]))
        assert row["update"] == pytest.approx(moved / size, rel=1e-6)
        if d_mlp:
            assert row["gradient_mid"] == pytest.approx(mids[i].grad.square().mean().sqrt().item(), rel=1e-5)
            flat = hidden[i].flatten().tolist()
            assert row["near_zero"] == pytest.approx(sum(abs(v) < NEAR_ZERO for v in flat) / len(flat))
        assert ("mlp_write" in row) == ("near_zero" in row) == bool(d_mlp)
        assert set(row) <= {"step", "block", *COLUMNS}
    assert set(rows[0]) == {"step", "block", *COLUMNS} or not d_mlp


@pytest.mark.parametrize("residual", ROWS)
def test_a_model_without_blocks_has_one_row(residual):
    looked, _ = look(build(small(residual, n_layer=0)))
    (row,) = looked.rows(0)
    assert set(row) == {"step", "block", "stream", "gradient", "mean", "spread"}
    assert all(math.isfinite(value) for value in row.values())


def test_a_write_of_nothing_is_no_division_by_zero():
    """ReZero at its start, and a stream of zeros."""
    model = GPT(small("rezero"))
    with torch.no_grad():
        model.wte.weight.zero_()
        model.wpe.weight.zero_()
    looked, _ = look(model)
    for row in looked.rows(0):
        assert all(math.isfinite(value) for value in row.values())


def test_the_gradients_are_autograds():
    """Against a tensor of the stream whose gradient is retained; the same windows, and no more."""
    model = build(small())
    looked, ids = look(model, rows=WINDOWS + 3)
    tap = Recorder(["blocks.1.resid_pre"])
    logits = model(ids[:WINDOWS, :-1], tap=tap)
    tap.values["blocks.1.resid_pre"].retain_grad()
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:WINDOWS, 1:].flatten(), reduction="sum").backward()
    expected = tap.values["blocks.1.resid_pre"].grad.square().mean().sqrt()
    assert error(torch.tensor(looked.rows(0)[1]["gradient"], dtype=torch.float64), expected) < 1e-5


@pytest.mark.parametrize("training", [True, False])
def test_a_look_leaves_no_trace(training):
    """Neither in the random state, nor in a gradient, nor in the mode; dropout is off while it looks."""
    model = GPT(small(dropout=0.5)).train(training)
    state = torch.get_rng_state()
    first, _ = look(model)
    second, _ = look(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert model.training == training
    assert first.rows(0) == second.rows(0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch looks at it while it traces
def test_compiled_blocks_are_looked_at_eagerly():
    """A tap would have each look compiled anew; the numbers are those of the plain model."""
    model, graphs = GPT(small()), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    expected, ids = look(model)
    for block in model.blocks:
        block.compile(backend=backend)
    looked, _ = look(model)
    assert first_non_finite(model, ids, CPU, 1) is None
    assert graphs == []
    assert looked.rows(0) == expected.rows(0)
    model(ids)
    assert len(graphs) >= 1


@pytest.mark.parametrize(
    ("parameter", "point"),
    [
        ("wte.weight", "blocks.0.resid_pre"),
        ("blocks.0.attn.c_proj.weight", "blocks.0.attn_out"),
        ("blocks.1.attn.c_attn.weight", "blocks.1.attn.pattern"),
        ("blocks.1.mlp.c_fc.weight", "blocks.1.mlp.post"),
        ("blocks.2.mlp.c_proj.bias", "blocks.2.mlp_out"),
    ],
)
def test_the_first_point_that_went_bad_is_named(parameter, point):
    """The look when the loss is already bad reads no pattern, so it names what follows from it."""
    model = build(small())
    assert first_non_finite(model, tokens(model.config), CPU, 1) is None
    with torch.no_grad():
        dict(model.named_parameters())[parameter].fill_(float("inf"))
    found = first_non_finite(model, tokens(model.config), CPU, 1)
    assert found == point.replace("attn.pattern", "attn_out")


@pytest.mark.parametrize("training", [True, False])
def test_looking_for_the_first_bad_point_restores_the_mode(training):
    """Also of a module that was in another mode than the model."""
    model = GPT(small(dropout=0.5)).train(training)
    model.blocks[1].train(not training)
    modes = [module.training for module in model.modules()]
    assert first_non_finite(model, tokens(model.config), CPU, 1) is None
    assert [module.training for module in model.modules()] == modes
