"""nanoGPT's and minGPT's files: the same logits, and one message for each that is damaged, foreign or hostile."""

import json
import pickle
import re
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from formats import karpathy
from formats.karpathy import ARGS, C, H, L, T, V, checkpoint
from mainstem.errors import ConfigError, RunError, UserError
from mainstem.formats import nanogpt
from mainstem.formats.load import load
from mainstem.runs import checkpoint as ours

IDS = torch.randint(V, (3, T), generator=torch.Generator().manual_seed(5))


class Canary:
    """A pickle of it makes a file where it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Batch:
    """Something that is no weight."""


def saved(tmp_path, content, name="ckpt.pt"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


def read(file, **choices):
    return nanogpt.read(file, trust_pickle=True, **choices)


def refused(file, *said, kind=RunError, **choices):
    """The one line that it is refused with."""
    with pytest.raises(kind) as raised:
        read(file, **choices)
    message = str(raised.value)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    for words in said:
        assert words in message
    return message


def same(model, reference):
    """To 1e-12 in float64."""
    assert not model.training
    with torch.no_grad():
        logits, expected = model.double()(IDS), reference.double()(IDS)
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_gives_the_same_logits(tmp_path, bias, masked):
    """Without biases too; a bias that is not there is not in the model."""
    reference = karpathy.nanogpt(bias=bias, masked=masked)
    model = read(saved(tmp_path, checkpoint(reference, bias=bias)))
    config = model.config
    assert (config.n_layer, config.n_head, config.d_model, config.n_ctx, config.vocab_size) == (L, H, C, T, V)
    assert (config.bias, config.tie_embeddings, config.activation) == (bias, True, "gelu")
    dropouts = (config.embd_dropout, config.attn_dropout, config.attn_out_dropout, config.mlp_out_dropout)
    assert (*dropouts, config.mlp_dropout) == (0.2, 0.2, 0.2, 0.2, 0.0)
    assert any(name.endswith("bias") for name, _ in model.named_parameters()) == bias
    same(model, reference)


def test_nanogpt_of_its_first_month_computed_the_approximation(tmp_path):
    reference = karpathy.early_nanogpt()
    model = read(saved(tmp_path, checkpoint(reference, bias=None)))
    assert (model.config.bias, model.config.activation) == (True, "gelu_tanh")
    same(model, reference)


def test_nanogpt_of_the_months_after_it_is_told_by_the_caller(tmp_path):
    reference = karpathy.early_nanogpt()
    same(read(saved(tmp_path, checkpoint(reference)), activation="gelu_tanh"), reference)


@pytest.mark.parametrize("under", [None, "model", "state_dict"])
def test_the_weights_alone_are_enough(tmp_path, under):
    reference = karpathy.nanogpt(bias=False)
    weights = reference.state_dict()
    model = read(saved(tmp_path, weights if under is None else {under: weights}), n_head=H)
    assert (model.config.tie_embeddings, model.config.bias, model.config.dropout) == (True, False, 0.0)
    same(model, reference)


@pytest.mark.parametrize("make", [karpathy.mingpt, karpathy.mingpt_of_2020])
def test_mingpt_gives_the_same_logits(tmp_path, make):
    """Queries, keys and values of 2020 are three matrices, in another order."""
    reference = make()
    model = read(saved(tmp_path, reference.state_dict(), "model.pt"), n_head=H)
    assert not model.config.tie_embeddings
    same(model, reference)


def test_mingpt_of_2020_needs_no_masks(tmp_path):
    reference = karpathy.mingpt_of_2020()
    weights = {name: tensor for name, tensor in reference.state_dict().items() if not name.endswith("mask")}
    same(read(saved(tmp_path, weights), n_head=H), reference)


@pytest.mark.parametrize(
    "said", [{"n_head": H}, {"n_head": None, "model_type": "gpt-nano"}, {"n_head": H, "model_type": None}]
)
def test_mingpts_config_beside_it_says_the_heads(tmp_path, said):
    reference = karpathy.mingpt()
    file = saved(tmp_path, reference.state_dict())
    (tmp_path / "config.json").write_text(json.dumps({"system": {}, "model": said}))
    same(read(file), reference)


@pytest.mark.parametrize("beside", [None, "{}", "[]", '{"model": {"n_head": null, "model_type": "mine"}}'])
def test_unsaid_heads_are_asked_for(tmp_path, beside):
    file = saved(tmp_path, karpathy.mingpt().state_dict())
    if beside is not None:
        (tmp_path / "config.json").write_text(beside)
    refused(file, "give `n_head`")


def test_heads_that_do_not_fit_are_refused(tmp_path):
    refused(saved(tmp_path, karpathy.mingpt().state_dict()), "5 heads do not divide", kind=ConfigError, n_head=5)
    refused(saved(tmp_path, checkpoint(karpathy.nanogpt())), "n_head 3, but `n_head` is 4", n_head=4)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module._orig_mod."])
@pytest.mark.parametrize("make", [karpathy.nanogpt, karpathy.mingpt, karpathy.mingpt_of_2020])
def test_wrappers_are_taken_off(tmp_path, make, prefix):
    """Before the name and inside it."""
    reference = make()
    weights = {f"{prefix}{name}": tensor for name, tensor in reference.state_dict().items()}
    weights = {name.replace(".h.0.", ".h.0._orig_mod."): tensor for name, tensor in weights.items()}
    same(read(saved(tmp_path, OrderedDict(weights)), n_head=H), reference)


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    found = checkpoint(karpathy.nanogpt())
    found["model"]["module.lm_head.weight"] = torch.zeros(V, C)
    refused(saved(tmp_path, found), "lm_head.weight occurs twice")


@pytest.mark.parametrize(
    ("make", "of_args"),
    [
        (lambda: karpathy.nanogpt(masked=True), False),  # of either half of 2023, or minGPT's copy of GPT-2
        (lambda: karpathy.mingpt(masked=False), False),
        (lambda: karpathy.nanogpt(tied=False, masked=True, bias=False), False),
        (lambda: karpathy.nanogpt(tied=False), True),
    ],
)
def test_a_form_of_several_programs_is_refused_until_its_activation_is_given(tmp_path, make, of_args):
    reference = make()
    bias = "transformer.ln_f.bias" in reference.state_dict()
    file = saved(tmp_path, checkpoint(reference, bias=bias) if of_args else reference.state_dict())
    refused(file, "give `activation`", n_head=H)
    activation = "gelu_tanh" if reference.transformer["h"][0].activation is karpathy.tanh_gelu else "gelu"
    same(read(file, n_head=H, activation=activation), reference)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"n_layer": 3}, "model_args has n_layer 3, but the weights have 2"),
        ({"n_embd": 6}, "n_embd 6, but the weights have 12"),
        ({"block_size": 10**12}, f"block_size {10**12}, but the weights have 6"),
        ({"vocab_size": "many"}, "vocab_size 'many', but the weights have 13"),
        ({"use_rmsnorm": True}, "use_rmsnorm True, which may change what the model computes"),
        ({"biass": True}, "did you mean 'bias'?"),
        ({"bias": False}, "it has transformer.h.0.attn.c_attn.bias"),
        ({"n_layer": torch.tensor([1, 2])}, "not a dict of plain values"),
    ],
)
def test_model_args_that_the_weights_contradict_are_refused(tmp_path, args, said):
    refused(saved(tmp_path, checkpoint(karpathy.nanogpt(), **args)), said)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"n_head": 5}, "5 heads"),
        ({"n_head": "3"}, "should be int"),
        ({"bias": "no"}, "should be bool"),
        ({"dropout": 2.0}, "dropout"),
    ],
)
def test_model_args_that_no_model_has_are_refused(tmp_path, args, said):
    refused(saved(tmp_path, checkpoint(karpathy.nanogpt(), **args)), said, kind=ConfigError)


NAMES = {
    karpathy.nanogpt: ("transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.weight", "transformer.wpe.weight"),
    karpathy.mingpt: ("transformer.h.1.attn.c_proj.bias", "lm_head.weight", "transformer.wte.weight"),
    karpathy.mingpt_of_2020: ("blocks.1.mlp.2.weight", "head.weight", "pos_emb", "blocks.0.attn.query.bias"),
}
HARMS = {
    "gone": lambda tensor: None,
    "turned": lambda tensor: tensor.mT if tensor.ndim > 1 else tensor[None],
    "short": lambda tensor: tensor[..., :-1],
    "nan": lambda tensor: tensor.clone().index_fill_(-1, torch.tensor(0), torch.nan),
    "whole": lambda tensor: tensor.long(),
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "words": lambda tensor: "a tensor",
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(("make", "name"), [(make, name) for make, names in NAMES.items() for name in names])
def test_a_harmed_tensor_is_one_message(tmp_path, make, name, harm):
    weights = dict(make().state_dict())
    weights[name] = HARMS[harm](weights[name])
    content = {key: tensor for key, tensor in weights.items() if tensor is not None}
    if harm == "gone" and name == "lm_head.weight":
        content["transformer.wte.weight"][0] = torch.nan  # without it, it is nanoGPT's
    refused(saved(tmp_path, content), kind=UserError, n_head=H, activation="gelu")


@pytest.mark.parametrize("make", NAMES)
def test_a_tensor_too_many_is_one_message(tmp_path, make):
    weights = make().state_dict()
    refused(saved(tmp_path, weights | {"ln_g.weight": torch.ones(C)}), "it has ln_g.weight", n_head=H)
    more = next(name for name in weights if ".0." in name).replace(".0.", ".999999999.")
    refused(saved(tmp_path, weights | {more: torch.ones(C)}), n_head=H)


def test_not_a_number_in_a_tied_matrix_is_named(tmp_path):
    reference = karpathy.nanogpt()
    with torch.no_grad():
        reference.lm_head.weight[3, 2] = torch.inf - torch.inf
    refused(saved(tmp_path, checkpoint(reference)), "transformer.wte.weight is not finite")


@pytest.mark.parametrize("wrong", [torch.ones(1, 1, T, T), torch.ones(T, T).tril(), torch.ones(1, 1, 4, 4).tril()])
@pytest.mark.parametrize(
    ("make", "name"), [(karpathy.mingpt, "transformer.h.0.attn.bias"), (karpathy.mingpt_of_2020, "blocks.0.attn.mask")]
)
def test_only_the_causal_mask_is_left_out(tmp_path, make, name, wrong):
    weights = make().state_dict() | {name: wrong}
    refused(saved(tmp_path, weights), "transformer.h.0.attn.bias is not the causal mask of 6 positions", n_head=H)


def test_two_forms_in_one_file_are_refused(tmp_path):
    weights = karpathy.mingpt_of_2020().state_dict() | karpathy.mingpt().state_dict()
    refused(saved(tmp_path, weights), "is a name of today's minGPT", n_head=H)


@pytest.mark.parametrize(
    "content", [{}, [], 3, {"model": 3}, {3: torch.ones(2)}, {"model": {}}, {"model_args": [1]}, torch.ones(2)]
)
def test_other_contents_are_refused(tmp_path, content):
    refused(saved(tmp_path, content))


def test_half_precision_and_the_old_container_open(tmp_path):
    reference = karpathy.nanogpt().bfloat16()
    same(read(saved(tmp_path, checkpoint(reference))), reference)
    torch.save(checkpoint(reference), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    same(read(tmp_path / "old.pt"), reference)


def test_what_was_read_is_saved_and_opened_again(tmp_path):
    reference = karpathy.mingpt_of_2020()
    ours.save(tmp_path / "run", read(saved(tmp_path, reference.state_dict()), n_head=H), None)
    same(load(tmp_path / "run")[0], reference)


def cut(content):
    return {f"first {n}": content[:n] for n in (0, 3, 100, len(content) // 2, len(content) - 20)}


def test_a_truncated_or_foreign_file_is_one_message(tmp_path):
    whole = saved(tmp_path, checkpoint(karpathy.nanogpt())).read_bytes()
    others = {
        "text": b"hello world\n" * 20,
        "json": b"{}",
        "pickle": pickle.dumps({"model": 1}, 4),
        "zip": b"PK\x05\x06" + bytes(18),
    }
    for name, content in (cut(whole) | others).items():
        (tmp_path / "없는 것.pt").write_bytes(content)
        said = refused(tmp_path / "없는 것.pt")
        assert "damaged, truncated or not a file of torch.save; copy it again" in said, name


@pytest.mark.parametrize("kind", ["pickle", "script"])
def test_pytorch_says_nothing_of_its_own(tmp_path, kind):
    """It would be a second message."""
    file = tmp_path / "ckpt.pt"
    file.write_bytes(pickle.dumps({"model": 1}, 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if kind == "script":
            torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
            said.clear()
        refused(file)
    assert not said


def test_a_flipped_byte_never_escapes(tmp_path):
    """Each byte of the pickle inside, one after the other: opened or refused, and nothing else."""
    file = saved(tmp_path, {"model": {"a": torch.ones(2)}})
    whole = file.read_bytes()
    start = whole.index(b"\x80\x02")
    for at in range(start, start + 150):
        harmed = bytearray(whole)
        harmed[at] ^= 0x15
        file.write_bytes(harmed)
        refused(file, kind=UserError)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place", ["whole", "model", "optimizer", "args", "plain pickle"])
def test_a_hostile_pickle_is_never_run(tmp_path, place, protocol):
    """With and without trust."""
    canary = Canary(tmp_path / "canary")
    found = checkpoint(karpathy.nanogpt())
    contents = {"whole": canary, "model": found | {"model": canary}, "optimizer": found | {"optimizer": [canary]}}
    contents |= {"args": found | {"model_args": ARGS | {"dropout": canary}}, "plain pickle": canary}
    file = tmp_path / "ckpt.pt"
    if place == "plain pickle":
        file.write_bytes(pickle.dumps(canary, protocol))
    else:
        torch.save(contents[place], file, pickle_protocol=protocol)
    with pytest.raises(RunError, match=r"which can run any code when it is loaded; .* `trust_pickle`"):
        nanogpt.read(file)
    refused(file)
    assert not canary.path.exists()
    pickle.loads(pickle.dumps(canary))
    assert canary.path.exists()  # it would have been


def test_what_else_is_in_a_file_is_named(tmp_path):
    file = saved(tmp_path, {"model": karpathy.nanogpt().state_dict(), "batch": Batch()})
    refused(file, f"it holds '{__name__}.Batch', which is not a tensor or a plain value")


def test_an_old_torch_is_refused(tmp_path, monkeypatch):
    file = saved(tmp_path, checkpoint(karpathy.nanogpt()))
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1+cpu"))
    refused(file, "PyTorch 2.9.1+cpu", "CVE-2026-24747", "2.10 or newer")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0"))
    read(file)


def test_an_absent_file_is_named(tmp_path):
    for name, said in (("없는.pt", "no such file"), (".", "a folder; give the .pt file in it")):
        with pytest.raises(RunError, match=re.escape(f"{tmp_path / name}: {said}")):
            read(tmp_path / name)
