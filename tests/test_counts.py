"""Law 10: the closed formulas against models that are built, and against known answers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from mainstem import counts, residuals
from mainstem.model.gpt import GPT
from mainstem.model.norms import LayerNorm, RMSNorm
from mainstem.presets import PRESETS, preset
from models import ROWS, Change, configs, few, kept, record, small, tokens

KNOWN = {
    "andrea-12m": 11_925_888,
    "andrea-120m": 92_331_264,
    "andrea-480m": 467_857_920,
    "gpt2": 124_439_808,
}


def numel(module):
    """Parameters; a matrix that is tied counts once, an absent module has none."""
    return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0


def counted(model):
    """The same parts, counted in a model."""
    last = model.blocks[-1] if len(model.blocks) else None
    matrices = dict.fromkeys(("attn", "mlp"), 0)
    for name, parameter in last.named_parameters() if last is not None else ():
        if parameter.dim() == 2:
            matrices[name.split(".")[0]] += parameter.numel()
    tied = model.lm_head.weight is model.wte.weight
    return counts.Parameters(
        total=numel(model),
        wte=numel(model.wte),
        wpe=numel(model.wpe),
        blocks=numel(model.blocks),
        per_block=numel(last),
        attn_weights_per_block=matrices["attn"],
        mlp_weights_per_block=matrices["mlp"],
        ln_f=numel(model.ln_f),
        lm_head=numel(model.lm_head) - tied * numel(model.wte),
    )


def norms(model):
    return sum(isinstance(m, LayerNorm | RMSNorm) and "attn." not in name for name, m in model.named_modules())


@few
@given(st.data())
@pytest.mark.parametrize("residual", ROWS)
def test_formulas_are_the_model(residual, data):
    model = GPT(data.draw(configs(residual=residual)))
    assert counts.parameters(model.config) == counted(model)
    assert counts.norms(model.config) == norms(model)


@pytest.mark.parametrize("name", PRESETS)
def test_formulas_are_the_presets(name):
    """Built without memory, so that the largest fits anywhere."""
    with torch.device("meta"):
        model = GPT(preset(name).model)
    assert counts.parameters(model.config) == counted(model)
    assert counts.parameters(model.config).total == KNOWN.get(name, numel(model))
    assert counts.norms(model.config) == norms(model)


def test_a_model_without_blocks_is_embedding_and_unembedding():
    config = small(n_layer=0)
    parameters = counts.parameters(config)
    assert (parameters.blocks, parameters.per_block) == (0, 0)
    assert parameters.total == numel(GPT(config))


def test_andrea_120m_by_parts():
    """Tied and untied wholes, a block, W_1 and W_2, 25 norms."""
    config = preset("andrea-120m").model
    parameters = counts.parameters(config)
    assert parameters.per_block == 7_087_872
    assert parameters.blocks == 85_054_464
    assert parameters.mlp_weights_per_block == 4_718_592 == 2 * 768 * 3072
    assert counts.norms(config) == 25
    assert counts.parameters(config.replace(tie_embeddings=False)).total == 98_820_096


@few
@given(configs(n_ctx=7, qk_norm=False))
def test_floating_point_operations_are_those_pytorch_counts(config):
    """One window of n_ctx tokens. PyTorch counts every pair of positions, ours those that a causal mask leaves."""
    model, ids = GPT(config), tokens(config, rows=1)
    config = model.config
    plain = Change({f"blocks.{i}.attn.pattern": lambda pattern: pattern.clone() for i in range(config.n_layer)})
    with FlopCounterMode(display=False) as counter:
        model(ids, tap=plain)
    T = config.n_ctx
    hidden = 4 * config.n_layer * config.n_head * config.d_head * T * (T - 1) // 2
    assert T * counts.flops_per_token(config)["forward"] == counter.get_total_flops() - hidden


def test_training_is_three_times_forward():
    flops = counts.flops_per_token(preset("gpt2").model)
    assert flops["training"] == 3 * flops["forward"]


@few
@given(configs(n_ctx=7))
def test_exact_memory_is_the_models(config):
    """Weights, gradients, AdamW's two moments, and keys and values of a full context, in bytes."""
    model = GPT(config)
    points, memory = record(model, tokens(config, rows=1)), counts.memory(config)
    kept = [value for point, value in points.items() if point.endswith((".attn.k", ".attn.v"))]
    assert memory["weights"] == memory["gradients"] == sum(parameter.nbytes for parameter in model.parameters())
    assert memory["kv_cache"] == sum(value.nbytes for value in kept)
    assert memory["optimizer"] == 2 * memory["weights"]
    assert memory["checkpoint"] == 3 * memory["weights"]


def test_muon_keeps_one_moment_of_the_blocks_matrices():
    config = preset("andrea-nano").model
    parameters = counts.parameters(config)
    matrices = parameters.attn_weights_per_block + parameters.mlp_weights_per_block
    adamw, muon = (counts.memory(config, optimizer=name)["optimizer"] for name in ("adamw", "muon"))
    assert adamw - muon == 4 * config.n_layer * matrices


@pytest.mark.parametrize("changes", [{}, {"norm": "rmsnorm", "activation": "swiglu", "qk_norm": True}])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("residual", residuals.RESIDUALS)
def test_the_activations_estimate_covers_what_backward_keeps(residual, dropout, changes):
    """It is the tensors saved for one window (each storage once, weights aside), or at most four tenths more."""
    config = preset("tiny").model.replace(residual=residual, dropout=dropout, **changes)
    model, ids = GPT(config).train(), tokens(config, 1, config.n_ctx)
    assert 1 <= counts.memory(config)["activations"] / kept(model, lambda: cross_entropy(model(ids)[0], ids[0])) < 1.4


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("residual", residuals.RESIDUALS)
def test_with_recompute_it_covers_what_every_block_reads_and_one_block_whole(residual, dropout):
    """The estimate, against what the pass keeps and what the block that is computed again keeps."""
    config = preset("tiny").model.replace(residual=residual, dropout=dropout, n_layer=6)
    model, ids = GPT(config).train(), tokens(config, 1, config.n_ctx)
    model.recompute = True
    x, view = model.embed(ids)
    block = max(kept(model, lambda block=block: block(x, view)) for block in model.blocks)
    whole = block + kept(model, lambda: cross_entropy(model(ids)[0], ids[0]))
    estimates = [counts.memory(config, recompute=choice)["activations"] for choice in (True, False)]
    assert 1 <= estimates[0] / whole < 1.4
    assert estimates[0] < estimates[1] / 2


def test_summary_holds_them_all():
    config = preset("tiny").model
    summary = counts.summary(config, micro_batch=2, optimizer="muon", recompute=True)
    assert summary["parameters"]["total"] == counts.parameters(config).total
    assert summary["norms"] == counts.norms(config)
    assert summary["flops_per_token"] == counts.flops_per_token(config)
    assert summary["memory_bytes"] == counts.memory(config, 2, "muon", True)
