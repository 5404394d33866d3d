"""The training loops that `gpu.py` times: ours in several ways, nanoGPT's form, and `transformers`."""

import functools
import gc
import importlib.util
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt2 import gpt2, unlike_gpt2
from benchmarks.reference import Model, Recipe
from mainstem import counts
from mainstem.config import ModelConfig, TrainConfig
from mainstem.model.block import Block
from mainstem.model.gpt import GPT
from mainstem.model.kernels.gelu import gelu_bias
from mainstem.model.mlp import MLP
from mainstem.training.device import Device
from mainstem.training.evaluate import loss_sum
from mainstem.training.optim import Optimizer
from mainstem.training.torch_compile import compile_blocks

PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "RTX A6000": 155e12,
}  # fmt: skip
"""Dense bfloat16 products with float32 sums, FLOP/s, by part of the device's name; NVIDIA's data sheets."""
CLIP = 1.0
OURS = (
    "plain", "compiled as the loop does", "compiled", "compiled, our gelu", "compiled, padded vocabulary",
)  # fmt: skip
PEERS = ("nanoGPT-style", "nanoGPT-style, compiled", "transformers")
Report = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What is measured, where, and for how long."""

    config: ModelConfig
    batch: int
    device: Device
    seconds: float
    """Of each timed loop."""
    dry: bool
    deadline: float
    """On the clock of `time.perf_counter`: after it nothing further begins."""

    @property
    def where(self) -> torch.device:
        """The device itself."""
        return self.device.device

    @property
    def dtype(self) -> torch.dtype:
        """Of products."""
        return self.device.autocast_dtype or torch.float32

    @property
    def peak(self) -> float | None:
        """FLOP/s; None for a device that the table does not know."""
        name = torch.cuda.get_device_name(self.where) if self.where.type == "cuda" else ""
        return next((peak for part, peak in PEAKS.items() if part in name), None)

    def ids(self, *shape: int) -> Tensor:
        """Random tokens, the same at every call."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.config.vocab_size, shape, generator=generator).to(self.where)


class OurGelu(nn.Module):
    """An MLP whose bias and tanh-GELU are our kernel; it shares the weights."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.c_fc, self.c_proj = mlp.c_fc, mlp.c_proj

    def forward(self, x: Tensor, tap: None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.c_proj(gelu_bias(F.linear(x, self.c_fc.weight), self.c_fc.bias))


def ours(bench: Bench, how: str) -> tuple[Callable[[], Tensor], Callable[[], Any], nn.Module, str]:
    """Our loss, our optimizer's step, the model, and what was said; `how` is one of the rows of `training`."""
    padded = -(-bench.config.vocab_size // 64) * 64
    model = GPT(bench.config.replace(vocab_size=padded) if "padded" in how else bench.config).to(bench.where).train()
    ids, said = bench.ids(bench.batch, bench.config.n_ctx + 1), ""
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    optimizer = Optimizer(model, TrainConfig(), fused=bench.device.fused)
    for block in model.blocks:
        assert isinstance(block, Block)
        assert block.mlp is not None
        if "gelu" in how:
            block.mlp = OurGelu(block.mlp)  # type: ignore[assignment]
    if how == "compiled as the loop does":
        said = compile_blocks(model, x, y, bench.device)
    elif how != "plain":
        for block in model.blocks:
            block.compile(dynamic=False)

    def loss() -> Tensor:
        with bench.device.autocast():
            return loss_sum(model, x, y) / y.numel()

    def move() -> None:
        optimizer.step(1.0)
        optimizer.zero_grad()

    return loss, move, model, said


def peer(bench: Bench, name: str) -> tuple[Callable[[], Tensor], Callable[[], Any], nn.Module, str]:
    """The same of another program: nanoGPT's form, as it is or compiled with its loss, or `transformers`."""
    config, ids = bench.config, bench.ids(bench.batch, bench.config.n_ctx + 1)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if name == "transformers":
        model = gpt2(GPT(config)).to(bench.where).train()
    else:
        shape = Recipe(layers=config.n_layer, heads=config.n_head, width=config.d_model, context=config.n_ctx)
        model = Model(shape, config.vocab_size, seed=1).to(bench.where)

    def call() -> Tensor:
        if name == "transformers":
            return model(x, labels=x).loss
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    call = torch.compile(call) if "compiled" in name else call
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=bench.device.fused)

    def loss() -> Tensor:
        with bench.device.autocast():
            return call()

    def move() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return loss, move, model, ""


def training(bench: Bench) -> Report:
    """Steps of ours in several ways, and of the peers: tokens a second, MFU, and the memory of a step."""
    ways = {f"mainstem, {how}": functools.partial(ours, bench, how) for how in OURS}
    ways |= {name: functools.partial(peer, bench, name) for name in PEERS}
    why_not = unlike_gpt2(bench.config) or "not installed"
    if why_not != "not installed" or importlib.util.find_spec("transformers") is None:
        del ways["transformers"]
    rows: list[Report] = []
    for name, make in ways.items():
        try:
            if time.perf_counter() > bench.deadline:
                raise TimeoutError("left out: no time was left")
            rows.append({"loop": name, **steps(bench, *make())})
        except Exception as error:
            traceback.print_exc()
            rows.append({"loop": name, "error": first_line(error)})
        gc.collect()
        torch.compiler.reset()
        if bench.where.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": rows} | ({} if "transformers" in ways else {"transformers": why_not})


def steps(bench: Bench, loss: Callable[[], Tensor], move: Callable[[], Any], model: nn.Module, said: str) -> Report:
    """Run steps for a while after some that warm up, clipped at 1, and weigh one."""

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        move()

    start = time.perf_counter()
    step()
    warm = time.perf_counter() - start
    each = seconds(step, bench.where, rounds=3)
    each = seconds(step, bench.where, rounds=max(3, int(bench.seconds / each)))
    rate = bench.batch * bench.config.n_ctx / each
    flops = rate * counts.flops_per_token(bench.config)["training"]
    found: Report = {"tokens_per_s": rate, "ms": 1e3 * each, "mfu": bench.peak and flops / bench.peak}
    found |= {"TFLOPs": flops / 1e12, "first_step_s": warm, "said": said}
    if bench.where.type == "cuda":
        before = torch.cuda.memory_allocated(bench.where)
        torch.cuda.reset_peak_memory_stats(bench.where)
        kept = loss()
        found["activations_MB"] = (torch.cuda.memory_allocated(bench.where) - before) / 1e6
        del kept
        step()
        found["step_peak_MB"] = (torch.cuda.max_memory_allocated(bench.where) - before) / 1e6
    return found


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 20) -> float:
    """The mean time of a call in seconds, after three that are not timed; the device is synchronized."""
    synchronize = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for _ in range(3):
        work()
    synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    synchronize()
    return (time.perf_counter() - start) / rounds


def first_line(error: Exception) -> str:
    """What an error says, on one line."""
    return (str(error).strip() or repr(error)).splitlines()[0]
