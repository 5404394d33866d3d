"""Whether our kernels run: measured once on the device, at the model's own shape, against what the compiler makes.

Ours are taken only where they give the same result and are at least as fast. Whoever asks gets the figures with the
answer, to be said where a person sees them.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mainstem import residuals
from mainstem.config import ModelConfig
from mainstem.model.kernels.gelu import gelu_bias, plain_gelu_bias
from mainstem.model.kernels.norm import add_norm, plain_add_norm

TOLERANCE = 2e-2
"""Largest difference, over the largest value, at which two results in bfloat16 are one."""
Work = Callable[[], Sequence[Tensor]]
Timer = Callable[[Work], float]


@dataclass(frozen=True)
class Choice:
    """What was measured for one kernel, forward and backward."""

    name: str
    ours: float | None = None
    """Seconds; None if it was not timed."""
    theirs: float | None = None
    """Of the other side."""
    other: str = "compiled"
    """What that is: the plain form compiled, or `plain`, as it is, where the compiler fails."""
    fault: str = ""
    """Why ours cannot be taken, whatever its time."""

    @property
    def takes_ours(self) -> bool:
        """Whether our kernel runs."""
        return not self.fault and self.ours is not None and self.theirs is not None and self.ours <= self.theirs

    def __str__(self) -> str:
        """One sentence for a notice."""
        side = "ours" if self.takes_ours else "the compiler's" if self.other == "compiled" else "PyTorch's"
        if self.fault:
            return f"{self.name}: {side} ({self.fault})"
        return f"{self.name}: {side} ({_micro(self.ours)} ours, {_micro(self.theirs)} {self.other})"


def seconds(work: Callable[[], object], device: torch.device | str, rounds: int = 20) -> float:
    """The mean of some calls, after three that are not timed, with everything finished that they started."""
    device = torch.device(device)
    for _ in range(3):
        work()
    _finish(device)
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    _finish(device)
    return (time.perf_counter() - start) / rounds


def faster(name: str, ours: Work, compiled: Work, plain: Work, timer: Timer, rounds: int = 3) -> Choice:
    """Compare two ways to the same tensors, and time them by turns.

    Args:
        name: of the kernel.
        ours, compiled, plain: called without arguments; outputs and gradients, in one order.
        timer: the seconds of one call.
        rounds: turns, of which the median counts.

    If ours raises it is not taken; if the compiled form does, the plain one is compared and timed in its place.
    """
    try:
        mine = ours()
    except Exception as error:  # whatever a broken kernel raises, the other side is there
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        return Choice(name, fault=f"ours failed: {reason}")
    try:
        other, theirs, wanted = "compiled", compiled, compiled()
    except Exception:  # of a broken compiler
        other, theirs, wanted = "plain", plain, plain()
    differences = [_difference(a, b) for a, b in zip(mine, wanted, strict=True)]
    if not all(difference <= TOLERANCE for difference in differences):  # NaN is no agreement
        said = ", ".join(f"{difference:.1e}" for difference in differences)
        return Choice(name, other=other, fault=f"ours differs by {said} from the {other} form")
    turns = [(timer(ours), timer(theirs)) for _ in range(rounds)]
    return Choice(name, median(turn[0] for turn in turns), median(turn[1] for turn in turns), other)


class Case(NamedTuple):
    """One kernel at one shape, ready to be called forward and backward."""

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    """With respect to each of which is differentiated."""
    arriving: tuple[Tensor, ...]
    """The gradient that arrives at each output."""

    def work(self, form: Callable[..., Any]) -> Work:
        """A call of a form: its outputs, then the gradient of each input."""

        def run() -> Sequence[Tensor]:
            outputs = form(*self.inputs)
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            return *outputs, *torch.autograd.grad(outputs, self.inputs, self.arriving)

        return run

    def exact(self) -> Sequence[Tensor]:
        """What the plain form gives in float64."""
        wide = [[t.detach().double() for t in tensors] for tensors in (self.inputs, self.arriving)]
        case = self._replace(inputs=tuple(t.requires_grad_() for t in wide[0]), arriving=tuple(wide[1]))
        return case.work(self.plain)()


def cases(
    config: ModelConfig, tokens: int, device: torch.device | str, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Case]:
    """Every kernel that the model has a place for, on random numbers: `gelu_bias`, `add_norm`.

    Args:
        config: the model's.
        tokens: B T of a micro-batch.
        device: where.
        dtype: what the model's products return, and what they read; the stream and the parameters are float32.
    """
    config, found = config.resolved(), {}
    C, M, norm = config.d_model, config.d_mlp, config.norm

    generator = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def case(ours: Any, plain: Any, inputs: Sequence[Tensor], arriving: Sequence[Tensor]) -> Case:
        return Case(ours, plain, tuple(t.requires_grad_() for t in inputs), tuple(arriving))

    def normed(form: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, write: Tensor, gain: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            narrow = None if x.dtype == torch.float64 else dtype
            return form(x, write, gain, bias, config.norm_eps, norm, narrow)

        return call

    if config.activation == "gelu_tanh" and config.bias and M:
        product, arrives = drawn(tokens, M, dtype=dtype), drawn(tokens, M, dtype=dtype)
        found["gelu_bias"] = case(gelu_bias, plain_gelu_bias, (product, drawn(M)), (arrives,))
    slots = residuals.row(config.residual).slots(config.n_layer - 1, config.n_layer)
    if slots.ln_in and slots.skip == 1 and not slots.ln_add:
        biases = [drawn(C)] if norm == "layernorm" and config.bias else []
        inputs = drawn(tokens, C), drawn(tokens, C, dtype=dtype), drawn(C), *biases
        arriving = drawn(tokens, C), drawn(tokens, C, dtype=dtype)
        found["add_norm"] = case(normed(add_norm), normed(plain_add_norm), inputs, arriving)
    return found


def choose(
    config: ModelConfig,
    tokens: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    names: Collection[str] = ("gelu_bias", "add_norm"),
    timer: Timer | None = None,
    compiler: Callable[..., Any] = partial(torch.compile, dynamic=False),  # noqa: B008 - nothing in it changes
) -> dict[str, Choice]:
    """Measure each of `cases` and say which side runs.

    Args:
        config, tokens, device, dtype: those of `cases`.
        names: the kernels that are asked for; each takes seconds, most of them the compiler's.
        timer: the seconds of one call; None: the clock, and then ours are taken on a CUDA device alone.
        compiler: what makes the other side of a plain form.
    """
    device = torch.device(device)
    if timer is None and device.type != "cuda":
        there = cases(config, 1, "cpu").keys() & names
        return {name: Choice(name, fault=f"no CUDA device: {device}") for name in there}
    time_one = timer or (lambda work: seconds(work, device))
    return {
        name: faster(name, case.work(case.ours), case.work(compiler(case.plain)), case.work(case.plain), time_one)
        for name, case in cases(config, tokens, device, dtype).items()
        if name in names
    }


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().float(), b.detach().float()
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _micro(value: float | None) -> str:
    return "not timed" if value is None else f"{value * 1e6:.1f} us"
