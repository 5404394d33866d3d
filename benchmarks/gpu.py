"""What a GPU makes of mainstem: correctness against float64, training and decoding speed beside the peers, our kernels.

    python -m benchmarks gpu [--shape gpt2] [--batch 16] [--json]

Each part stands alone: one that fails is named with its error, and the others go on. MFU is the training FLOPs of
`mainstem.counts` (of attention the pairs that are not masked) a second, over the device's dense bfloat16 peak. Exits
with 1 if a part failed or a check did not hold, with 2 without a CUDA device. `--dry` takes the same path on a CPU at a
tiny shape, with Triton's interpreter and without a compiler: it tests this script, and its figures mean nothing.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_loops import Bench, Report, first_line, seconds, training
from mainstem import counts
from mainstem.config import ModelConfig, TrainConfig
from mainstem.generation.decoding import generate_ids
from mainstem.model.gpt import GPT
from mainstem.model.kernels.gelu import gelu_bias, plain_gelu_bias
from mainstem.model.kernels.gelu_backend import forward_and_backward
from mainstem.presets import PRESETS
from mainstem.runs.folder import RunFolder
from mainstem.text.corpus import Source
from mainstem.text.tokens import Prepared, prepare
from mainstem.training.device import Device
from mainstem.training.events import Saved, Step
from mainstem.training.keeper import Keeper
from mainstem.training.loop import Training

SHAPES = {"small": ("andrea-nano", 64), "andrea-120m": ("andrea-120m", 16), "gpt2": ("gpt2", 16)}
"""Preset and batch."""


def about(bench: Bench) -> Report:
    """The machine and the model."""
    config = bench.config
    found: Report = {"device": "the CPU, dry", "torch": torch.__version__, "dtype": str(bench.dtype)}
    if bench.where.type == "cuda":
        device = torch.cuda.get_device_properties(bench.where)
        found |= {"device": device.name, "memory_GB": device.total_memory / 1e9, "cuda": torch.version.cuda}
    found |= {"peak_TFLOPs": bench.peak and bench.peak / 1e12, "parameters": counts.parameters(config).total}
    found |= {"shape": f"{config.n_layer}/{config.n_head}/{config.d_model}, vocabulary {config.vocab_size}"}
    found |= {"context": config.n_ctx, "batch": bench.batch}
    if bench.peak is None:
        found["note"] = "this device's peak is not in the table: tokens a second, and no MFU"
    return found


def exactness(bench: Bench) -> Report:
    """Loss and gradients of a small model against float64 on the CPU: norm of the difference over the norm."""
    config = ModelConfig(vocab_size=512, n_ctx=64, n_layer=4, n_head=4, d_model=128)
    ids, exact = torch.randint(512, (4, 65), generator=torch.Generator().manual_seed(1)), GPT(config).double()
    found: Report = {}

    def gradients(model: GPT, device: torch.device) -> tuple[float, Tensor]:
        logits = model(ids[:, :-1].to(device)).flatten(0, 1)
        loss = F.cross_entropy(logits.double(), ids[:, 1:].flatten().to(device))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return loss.item(), torch.cat([g.flatten().double().cpu() for g in gradients])

    loss, gradient = gradients(exact, torch.device("cpu"))
    for name, autocast, tolerance in (("float32", False, 1e-4), ("autocast", True, 5e-2)):
        with bench.device.autocast() if autocast else contextlib.nullcontext():
            other, theirs = gradients(GPT(config).to(bench.where), bench.where)
        error = ((theirs - gradient).norm() / gradient.norm()).item()
        found |= {f"{name}_loss_error": abs(other - loss) / loss, f"{name}_gradient_error": error}
        found[f"{name}_ok"] = error < tolerance and abs(other - loss) / loss < tolerance
    return found


def attention(bench: Bench) -> Report:
    """Which fused attention the model's call takes by itself, and what each costs, forward and backward."""
    config = bench.config
    shape = bench.batch, config.n_head, config.n_ctx, config.d_head
    q, k, v = (torch.randn(shape, device=bench.where, dtype=bench.dtype, requires_grad=True) for _ in range(3))
    arriving = torch.randn_like(q)

    def work() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), arriving)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    names = {event.key for event in profile.key_averages() if event.key.startswith("aten::_scaled_dot_product")}
    found: Report = {"taken": sorted(name for name in names if not name.endswith("_backward"))}
    backends = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    for name in backends if bench.where.type == "cuda" else ("FLASH_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                found[f"{name.lower()}_ms"] = 1e3 * seconds(work, bench.where, rounds=5)
        except Exception as error:  # a backend that does not hold this shape
            found[f"{name.lower()}_ms"] = f"no ({first_line(error)})"
    return found


def kernels(bench: Bench) -> Report:
    """Triton's tanh-GELU and the compiler's, forward and backward, at several widths: time, and error to float64."""
    presets = ("andrea-nano",) if bench.dry else ("andrea-nano", "andrea-12m", "andrea-120m", "andrea-480m")
    (tokens, rounds), table = (6, 2) if bench.dry else (8192, 50), []
    for width in (PRESETS[preset].model.resolved().d_mlp for preset in presets):
        generator = torch.Generator(bench.where).manual_seed(1)
        draw = functools.partial(torch.randn, generator=generator, device=bench.where)
        product, dy = (draw(tokens, width).to(bench.dtype) for _ in range(2))
        tensors = product.requires_grad_(), draw(width).requires_grad_(), dy
        torch.compiler.reset()
        compiled = torch.compile(plain_gelu_bias, dynamic=False)
        row = {"kernel": "gelu_bias", "width": width, "tokens": tokens}
        for name, form in (("ours", gelu_bias), ("compiled", compiled), ("plain", plain_gelu_bias)):
            work = functools.partial(forward_and_backward, form, *tensors)
            row[f"{name}_us"] = 1e6 * seconds(work, bench.where, rounds)
        exact = forward_and_backward(plain_gelu_bias, *(t.detach().double().requires_grad_() for t in tensors))
        pairs = zip(forward_and_backward(gelu_bias, *tensors), exact, strict=True)
        off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        table.append(row | {"off_float64": off, "ok": off < 2e-2})
    return {"rows": table}


def decode(bench: Bench) -> Report:
    """Tokens a second of greedy text on the plain path, prompt and all."""
    new, prompt, table = (3 if bench.dry else 128), min(64, bench.config.n_ctx // 2), []
    for dtype in (torch.float32, torch.bfloat16):
        model = GPT(bench.config).to(bench.where, dtype).eval()
        for batch in (1, 16):
            prompts = bench.ids(batch, prompt).tolist()
            generate_ids(model, prompts, max_new_tokens=2, temperature=0)
            start = time.perf_counter()
            made = generate_ids(model, prompts, max_new_tokens=new, temperature=0)  # ids on the CPU: all is finished
            rate = sum(map(len, made)) / (time.perf_counter() - start)
            table.append({"dtype": str(dtype).removeprefix("torch."), "batch": batch, "tokens_per_s": rate})
    return {"rows": table}


def resume(bench: Bench) -> Report:
    """A run, the same again, one that is left after four steps and taken up, and one on the CPU: what do they share?

    On a CPU the bytes of the first three are one. On a GPU they need not be: sums by atomics have no order.
    """
    cpu = dataclasses.replace(bench, device=Device.choose("cpu"))
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        data = prepare(Source(("constitution-ko",)), place / "data", vocab_size=512)
        for event in run(bench, place / "resumed", data):
            if isinstance(event, Saved):
                break
        whole, again = (finished(bench, place / name, data) for name in ("whole", "again"))
        resumed, other = finished(bench, place / "resumed", data), finished(cpu, place / "cpu", data)
        losses = {name: losses_of(place / name) for name in ("whole", "again", "resumed", "cpu")}
    found: Report = {"same_twice": whole == again, "resumed_is_whole": whole == resumed, "cpu_is_whole": whole == other}
    for name in ("again", "resumed", "cpu"):
        pairs = zip(losses["whole"], losses[name], strict=True)
        found[f"losses_apart_{name}"] = max(abs(a - b) / a for a, b in pairs)
    return found | {"ok": found["losses_apart_resumed"] < 1e-2}


def losses_of(path: Path) -> list[float]:
    """Of every step of a run."""
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"]


def run(bench: Bench, path: Path, data: Prepared) -> Iterator[Any]:
    """The events of eight steps, saved after four."""
    model = PRESETS["tiny"].model.replace(vocab_size=data.tokenizer.vocab_size, dropout=0.1)
    config = TrainConfig(steps=8, batch_size=4, warmup=2, device=str(bench.where), save_every=4, vitals_every=0)
    return Keeper(RunFolder(path), Training(model, config, data)).events()


def finished(bench: Bench, path: Path, data: Prepared) -> tuple[bytes, ...]:
    """Weights and moments at the end of the run, taken up where it was left."""
    steps = [event for event in run(bench, path, data) if isinstance(event, Step)]
    assert steps[-1].step == 8
    last = RunFolder(path).checkpoint_at(8)
    return tuple((last / name).read_bytes() for name in ("model.safetensors", "optim.safetensors"))


PARTS: dict[str, Callable[[Bench], Report]] = {
    "about": about, "exactness": exactness, "attention": attention, "resume": resume, "decode": decode,
    "kernels": kernels, "training": training,
}  # fmt: skip


def sound(found: Report) -> bool:
    """Whether no part of a report is an error, and every check in it holds."""
    checks = [value for name, value in found.items() if name == "ok" or name.endswith("_ok")]
    return "error" not in found and all(checks) and all(map(sound, found.get("rows", ())))


def show(name: str, found: Report) -> None:
    """A part's report as lines, its rows as a table."""
    print(f"\n{name}")
    for key, value in found.items():
        if key != "rows":
            print(f"  {key:24} {plain(value)}")
    keys = list(dict.fromkeys(key for row in found.get("rows", ()) for key in row))
    cells = [keys, *([plain(row.get(key)) for key in keys] for row in found.get("rows", ()))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells if keys else ():
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plain(value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def main(argv: Sequence[str]) -> int:
    """Run the parts that were asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="andrea-120m")
    parser.add_argument("--batch", type=int, help="windows a step; each shape has its own")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each timed training loop")
    parser.add_argument("--limit", type=float, default=450.0, help="seconds after which nothing further begins")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--dry", action="store_true", help="a tiny shape on the CPU, to test this script")
    given = parser.parse_args(argv)
    if given.batch is not None and given.batch < 1:
        parser.error(f"--batch {given.batch} is not possible; give at least 1")
    if not given.dry and not torch.cuda.is_available():
        print("no CUDA device here; --dry runs the same path at a tiny shape on the CPU", file=sys.stderr)
        return 2
    preset, batch = SHAPES[given.shape]
    config = PRESETS[preset].model.replace(dropout=0.0).resolved()
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported: not yet
        torch.compiler.set_stance("force_eager")
        config, batch = ModelConfig(vocab_size=65, n_ctx=8, n_layer=2, n_head=2, d_model=16).resolved(), 2
    begun, device = time.perf_counter(), Device.choose("cpu" if given.dry else "cuda")
    deadline, each = begun + given.limit, 0.0 if given.dry else given.seconds
    bench = Bench(config, given.batch or batch, device, each, given.dry, deadline)
    result: Report = {}
    for name in given.parts:
        try:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"left out: {given.limit:.0f} seconds had passed")
            result[name] = PARTS[name](bench)
        except Exception as error:  # the other parts go on
            traceback.print_exc()
            result[name] = {"error": first_line(error)}
        if not given.json:
            show(name, result[name])
    result["seconds"], result["ok"] = time.perf_counter() - begun, all(map(sound, result.values()))
    said = "every check holds" if result["ok"] else "a part failed, or a check does not hold"
    print(json.dumps(result) if given.json else f"\n{said}; {result['seconds']:.0f} seconds")
    return 0 if result["ok"] else 1
