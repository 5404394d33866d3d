"""Every parameter in exactly one group, by its role; Muon and AdamW as they are written; a state that returns."""

import pytest
import torch
from hypothesis import given

from mainstem.config import OPTIMIZERS, TrainConfig
from mainstem.errors import RunError
from mainstem.model.gpt import GPT
from mainstem.training.evaluate import loss_sum
from mainstem.training.optim import Muon, Optimizer, orthogonalise, roles
from models import ROWS, configs, few, small, tokens


def backward(model, seed=1):
    """Gradients of a small batch."""
    ids = torch.randint(model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    (loss_sum(model, ids[:, :-1], ids[:, 1:]) / 14).backward()


def check_groups(model, optimizer):
    """Law 10; and what Muon holds is the blocks' matrices and nothing else."""
    groups = Optimizer(model, TrainConfig(optimizer=optimizer)).groups()
    held = [name for _, _, names in groups for name in names]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    parameters = dict(model.named_parameters())
    matrices = {n for n, p in parameters.items() if n.startswith("blocks.") and n.endswith("weight") and p.dim() == 2}
    by_muon = {name for kind, _, names in groups for name in names if kind == "muon"}
    assert by_muon == (matrices if optimizer == "muon" else set())
    embeddings = {name for name in parameters if name.split(".")[0] in ("wte", "wpe", "lm_head")} - {"lm_head.bias"}
    decayed = {name for _, decay, names in groups for name in names if decay}
    assert decayed == matrices | embeddings


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("d_mlp", [-1, 0])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("residual", ROWS)
def test_every_parameter_is_in_one_group(residual, tied, d_mlp, optimizer):
    check_groups(GPT(small(residual, tie_embeddings=tied, d_mlp=d_mlp)), optimizer)


@few
@given(configs())
def test_every_parameter_is_in_one_group_of_any_config(config):
    for optimizer in OPTIMIZERS:
        check_groups(GPT(config), optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("residual", ROWS)
def test_a_model_without_blocks_can_be_stepped(residual, optimizer):
    model = GPT(small(residual, n_layer=0))
    check_groups(model, optimizer)
    before = model.wte.weight.detach().clone()
    step = Optimizer(model, TrainConfig(optimizer=optimizer))
    backward(model)
    step.step(1.0)
    assert not torch.equal(before, model.wte.weight)


def test_roles_are_what_parameters_are():
    untied = roles(GPT(small(tie_embeddings=False, lm_head_bias=True, qk_norm=True)))
    assert set(untied.values()) == {"matrix", "embedding", "head", "vector"}
    assert untied["lm_head.weight"] == "head"
    assert untied["wte.weight"] == untied["wpe.weight"] == "embedding"
    assert untied["lm_head.bias"] == untied["blocks.0.attn.c_attn.bias"] == untied["ln_f.weight"] == "vector"
    tied = roles(GPT(small()))
    assert "lm_head.weight" not in tied
    assert tied["wte.weight"] == "embedding"


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 64)])
def test_orthogonalised_singular_values_are_near_1(shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(x))
    wide = values[..., : int(0.9 * min(shape))]  # of a square one, the least can be too small for five turns
    assert wide.min() > 0.65
    assert wide.max() < 1.25


def test_orthogonalising_keeps_the_singular_vectors():
    x = torch.randn(1, 8, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x[0], full_matrices=False)
    turned = u.T @ orthogonalise(x)[0] @ v.T
    assert (turned - torch.diag(turned.diagonal())).abs().max() < 1e-10


@pytest.mark.parametrize("shape", [(12, 12), (36, 12), (12, 30)])
def test_a_batch_is_orthogonalised_one_by_one(shape):
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    singly = torch.cat([orthogonalise(each[None]) for each in x])
    assert torch.allclose(orthogonalise(x), singly, rtol=0, atol=1e-12)


def test_a_zero_gradient_gives_a_zero_update():
    assert torch.equal(orthogonalise(torch.zeros(1, 4, 6)), torch.zeros(1, 4, 6))


def test_muon_steps_as_it_is_written():
    """Momentum, Nesterov, q, k and v each on their own, sqrt(rows / columns), decoupled decay; three steps."""
    lr, beta, decay = 0.02, 0.9, 0.1
    generator = torch.Generator().manual_seed(4)
    shapes = {"c_attn": (36, 12), "c_proj": (12, 12), "c_proj_2": (12, 12), "c_fc": (48, 12)}
    weights = {n: torch.nn.Parameter(torch.randn(s, generator=generator).double()) for n, s in shapes.items()}
    expected = {name: w.detach().clone() for name, w in weights.items()}
    momentum = {name: torch.zeros_like(w) for name, w in expected.items()}
    rows = {name: (8, 16, 12) if name == "c_attn" else (len(w),) for name, w in weights.items()}
    muon = Muon(weights.values(), {id(weights["c_attn"]): (8, 16, 12)}, lr=lr, momentum=beta, weight_decay=decay)
    for _ in range(3):
        for name, w in weights.items():
            w.grad = grad = torch.randn(w.shape, generator=generator).double()
            momentum[name] = beta * momentum[name] + (1 - beta) * grad
            update = beta * momentum[name] + (1 - beta) * grad
            for part, old in zip(update.split(rows[name]), expected[name].split(rows[name]), strict=True):
                scale = max(1.0, part.shape[0] / part.shape[1]) ** 0.5
                old.mul_(1 - lr * decay).sub_(lr * scale * orthogonalise(part[None])[0])
        muon.step()
    for name, w in weights.items():
        assert torch.allclose(w.detach(), expected[name], rtol=0, atol=1e-12), name


def test_queries_keys_and_values_are_orthogonalised_each_on_their_own():
    """Of the model's own c_attn: a step moves each third by what its gradient alone makes of it."""
    model, config = GPT(small()), TrainConfig(optimizer="muon", muon_lr=0.1, weight_decay=0.0)
    weight = model.blocks[1].attn.c_attn.weight
    optimizer, before = Optimizer(model, config), weight.detach().clone()
    backward(model)
    update = (1 - config.momentum**2) * weight.grad  # Nesterov's, at the first step
    optimizer.step(1.0)
    for new, old, part in zip(weight.chunk(3), before.chunk(3), update.chunk(3), strict=True):
        assert torch.allclose(old - new, 0.1 * orthogonalise(part[None])[0], rtol=0, atol=1e-5)


def test_adamw_is_torchs_own():
    """With decay on matrices and embeddings alone, and the rate a share of the peak."""
    config = TrainConfig(lr=1e-2, weight_decay=0.3, beta1=0.8, beta2=0.9)
    ours, theirs = GPT(small()), GPT(small())
    optimizer = Optimizer(ours, config, fused=False)
    parameters = dict(theirs.named_parameters())
    vector = {name for name, role in roles(theirs).items() if role == "vector"}
    reference = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": 0.0 if name in vector else config.weight_decay}
            for name, p in parameters.items()
        ],
        lr=config.lr,
        betas=(0.8, 0.9),
    )
    for step, share in enumerate((0.5, 1.0, 0.25)):
        for group in reference.param_groups:
            group["lr"] = config.lr * share
        for model in (ours, theirs):
            backward(model, seed=step)
        optimizer.step(share)
        reference.step()
    for name, p in ours.named_parameters():
        assert torch.allclose(p, parameters[name], rtol=0, atol=1e-7), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_that_returns_makes_the_same_next_step(optimizer):
    """To the bit, through names and tensors alone."""
    config = TrainConfig(optimizer=optimizer, lr=1e-2)
    model, twin = GPT(small()), GPT(small())
    one = Optimizer(model, config)
    for step in range(3):
        backward(model, seed=step)
        one.step(1.0)
    twin.load_state_dict(model.state_dict())
    two = Optimizer(twin, config)
    two.load_tensors({name: tensor.clone() for name, tensor in one.tensors().items()}, step=3)
    for each, optim in ((model, one), (twin, two)):
        backward(each, seed=9)
        optim.step(0.7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert one.tensors().keys() == two.tensors().keys()
    assert all(torch.equal(tensor, two.tensors()[name]) for name, tensor in one.tensors().items())


def test_zero_grad_drops_the_gradients():
    model = GPT(small())
    optimizer = Optimizer(model, TrainConfig(optimizer="muon"))
    backward(model)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda t: t.pop("wpe.weight.exp_avg_sq"), r"wpe\.weight\.exp_avg_sq is missing"),
        (lambda t: t.pop("blocks.1.mlp.c_fc.weight.momentum"), r"blocks\.1\.mlp\.c_fc\.weight\.momentum is missing"),
        (lambda t: t.update({"wte.weight.exp_avg": torch.zeros(3)}), r"wte\.weight\.exp_avg is .* another shape"),
        (lambda t: t.update({"wte.weight.momentum": torch.zeros(3)}), r"wte\.weight\.momentum belongs to no parameter"),
        (lambda t: t.update({"x": torch.zeros(3)}), r"optim\.safetensors: x belongs to no parameter"),
    ],
)
def test_a_state_that_does_not_fit_is_named(harm, said):
    model = GPT(small())
    optimizer = Optimizer(model, TrainConfig(optimizer="muon"))
    backward(model)
    optimizer.step(1.0)
    tensors = optimizer.tensors()
    harm(tensors)
    with pytest.raises(RunError, match=said):
        Optimizer(GPT(small()), TrainConfig(optimizer="muon")).load_tensors(tensors, 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("residual", ROWS)
def test_every_parameter_has_a_state_after_one_step(residual, optimizer):
    """So that a checkpoint of any row can be resumed: none is left without a gradient."""
    model = GPT(small(residual, qk_norm=True, tie_embeddings=False, lm_head_bias=True))
    one, config = Optimizer(model, TrainConfig(optimizer=optimizer)), TrainConfig(optimizer=optimizer)
    ids = tokens(model.config)
    loss_sum(model, ids[:, :-1], ids[:, 1:]).backward()
    one.step(1.0)
    Optimizer(GPT(model.config), config).load_tensors(one.tensors(), 1)
    assert {name.rpartition(".")[0] for name in one.tensors()} == {name for name, _ in model.named_parameters()}
