"""Training as a generator of events over (model, data, config): no folder, no lock, no file.

Everything that a step does follows from (seed, step): which windows it reads, and what dropout drops. So weights,
optimizer moments and a step number are all that training resumes from. `mainstem.training.keeper` writes a run folder
from the events.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mainstem.config import ModelConfig, TrainConfig
from mainstem.errors import ConfigError, RunError, TrainingFailed
from mainstem.model.gpt import GPT
from mainstem.model.kernels.gelu_backend import choose_gelu
from mainstem.model.mode import evaluating
from mainstem.model.quantized import weights_of
from mainstem.runs import checkpoint
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tokens import Prepared, Windows, bytes_per_token
from mainstem.training import allocator, doctor, torch_compile
from mainstem.training.device import Device
from mainstem.training.evaluate import evaluate
from mainstem.training.events import CheckpointDue, Evaluated, Evaluating, Event, Notice, Observed, Sampled, Step
from mainstem.training.optim import Optimizer
from mainstem.training.step import TrainStep
from mainstem.training.vitals import Vitals, first_non_finite


class NonFinite(TrainingFailed):
    """A loss, gradient or held-out loss that is not finite; the optimizer has not stepped on it."""

    def __init__(self, step: int, what: str, where: str, bad_weights: bool, fix: str):
        self.found = f"step {step:,} is not finite ({what}), first at {where}; nothing of it was kept"
        super().__init__(f"{self.found}; {fix} and start again")
        self.step, self.where, self.fix = step, where, fix
        self.bad_weights = bad_weights
        """Whether the weights as they are gave it, so that their checkpoint is of no use."""


@dataclass(frozen=True)
class State:
    """All that training resumes from, after `step` steps. The tensors are copies."""

    step: int
    model: dict[str, Tensor]
    """The weights, by parameter name."""
    optimizer: dict[str, Tensor]
    """The optimizer's moments, by `{parameter}.{moment}`."""
    best: float = math.inf
    """The lowest held-out loss so far."""
    evaluated: int = -1
    """The step of the last evaluation."""


@dataclass
class Training:
    """Training in memory: `for event in Training(config, TrainConfig(), data).events()` runs to the last step.

    Args:
        model_config: the model to build; vocab_size must be the tokenizer's.
        config: how it is trained.
        data: the token files.
        sample: called with model and tokenizer every `sample_every` steps, returns the text to show.
        should_stop: called often; it raises Interrupted to end training at a safe point. `events` goes on from there.

    The model, the optimizer and the windows that this process computes are one rank's; the step's loss, gradient norm,
    events and decisions are the run's. Raises ConfigError for what does not fit in memory or cannot be computed on the
    device, and DataError for too short a text.
    """

    model_config: ModelConfig
    config: TrainConfig
    data: Prepared
    sample: Callable[[GPT, Tokenizer], str] | None = None
    should_stop: Callable[[], None] = lambda: None

    done: int = field(default=0, init=False)
    """Steps done."""
    best: float = field(default=math.inf, init=False)
    """The lowest held-out loss so far."""
    evaluated: int = field(default=-1, init=False)
    """The step of the last evaluation."""

    def __post_init__(self) -> None:
        config, n_ctx, vocab_size = self.config, self.model_config.n_ctx, self.model_config.vocab_size
        self.device = Device.choose(config.device)
        if self.device.device.type == "cpu" and not (memory := doctor.memory(self.model_config, config)).ok:
            raise ConfigError(memory.text)
        self._require_replay()
        self.windows = Windows(self.data.train, n_ctx, config.seed, vocab_size, str(self.data.path))
        self.token_bytes = bytes_per_token(self.data.tokenizer)
        self.model = GPT(self.model_config, seed=config.seed).to(self.device.device)
        self.model.recompute = config.recompute
        tokens = config.windows_at_once * n_ctx
        self.kernels = choose_gelu(self.model, self.device.device, tokens, compiled=config.compile)
        self.optimizer = Optimizer(self.model, config, fused=self.device.fused)
        self.train_step = TrainStep(self.model, self.optimizer, config, self.device)

    def events(self) -> Iterator[Event]:
        """Train to the last step, from step `done`.

        While it runs, PyTorch's compiler may have a higher recompile limit (with `compile`); PyTorch's random state is
        changed during a step alone. `training.allocator` says what stays set in the C library's allocator.

        Raises NonFinite before the optimizer steps on such numbers, and what `should_stop` raises.
        """
        with contextlib.ExitStack() as stack:
            if self.done < self.config.steps:
                self.optimizer.zero_grad()  # what an interrupted step has left
                (allocator.return_freed if self.config.recompute else allocator.keep_freed)()
                if self.config.compile:
                    stack.enter_context(torch_compile.recompile_limit(self.model))
                    x, y = (self._to_device(part[: self.config.windows_at_once]) for part in self._batch())
                    yield Notice(torch_compile.compile_blocks(self.model, x, y, self.device))
                self.model.train()
            yield from self._evaluate_if_due()
            while self.done < self.config.steps:
                yield from self._step()
                if _due(self.done, self.config.save_every) or self._evaluation_is_due():
                    yield CheckpointDue(self.done)  # before an evaluation: a run that dies in it has lost nothing
                yield from self._evaluate_if_due()

    def state(self) -> State:
        """What training resumes from, now: a value of its own."""
        weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        moments = {name: tensor.clone() for name, tensor in self.optimizer.tensors().items()}
        return State(self.done, weights, moments, self.best, self.evaluated)

    def load_state(self, state: State) -> None:
        """Go on from a state. Raises RunError naming the first tensor that does not fit."""
        checkpoint.fill(self.model, state.model, lambda name: "state")
        self.resume(state.step, state.optimizer)
        self.best, self.evaluated = state.best, state.evaluated

    def resume(self, step: int, moments: dict[str, Tensor]) -> None:
        """Go on after `step` steps with the model's weights as they are and the optimizer's saved moments."""
        self.optimizer.load_tensors(moments, step)
        self.done = step

    def begin_with(self, model: GPT, tokenizer: Tokenizer | None, name: object) -> None:
        """Take another model's weights as the initial ones; rows past the tokenizer's ids are padding and dropped.

        Raises RunError, which begins with `name`, for weights of another shape, tokenizer or precision.
        """
        if tokenizer is not None and tokenizer.hash != self.data.tokenizer.hash:
            raise RunError(
                f"{name}: trained with another tokenizer than these tokens; prepare the text with its own "
                f"(`tokenizer` {name})"
            )
        if (weights := weights_of(model)) != "fp32":
            raise RunError(f"{name}: its weights are {weights}; take the model that they were quantized from")
        tensors = {key: parameter.detach() for key, parameter in model.named_parameters()}
        for key in tensors.keys() & {"wte.weight", "lm_head.weight"}:
            tensors[key] = tensors[key][: self.data.tokenizer.vocab_size]
        checkpoint.fill(self.model, tensors, lambda key: name)

    def _batch(self) -> tuple[np.ndarray, np.ndarray]:
        """What the next step reads and predicts: x, y, each (B, T)."""
        return self.windows.batch(self.done, self.config.batch_size)

    def _to_device(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.device.device)

    def _step(self) -> Iterator[Event]:
        start, config = time.perf_counter(), self.config
        inputs, targets = self._batch()
        tokens, size = targets.size, int(self.token_bytes[targets].sum())
        x, y = self._to_device(inputs), self._to_device(targets)
        with self.device.seeded(_mix(config.seed, self.done)):  # dropout follows from (seed, step)
            vitals = Vitals(self.model, x, y, self.device) if _due(self.done, config.vitals_every) else None
            loss, grad_norm = self.train_step.gradient(x, y, self.should_stop)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = f"loss {loss:g}, gradient norm {grad_norm:g}"
            bad_weights = not math.isfinite(loss) and self.evaluated != self.done
            raise NonFinite(self.done + 1, what, self._first_bad(x), bad_weights, self._rates())
        rate = self.train_step.move(self.done, grad_norm)
        self.done += 1
        bits = loss * tokens / math.log(2) / max(1, size)
        yield Step(self.done, loss, bits, config.lr * rate, grad_norm, tokens, time.perf_counter() - start)
        if vitals is not None:
            yield Observed(self.done - 1, vitals.rows(self.done - 1))
        if self.sample is not None and _due(self.done, config.sample_every):
            with evaluating(self.model):
                text = self.sample(self.model, self.data.tokenizer)
            yield Sampled(self.done, text)

    def _evaluation_is_due(self) -> bool:
        return self.done == self.config.steps or (self.done > 0 and _due(self.done, self.config.eval_every))

    def _evaluate_if_due(self) -> Iterator[Event]:
        if not self._evaluation_is_due() or self.evaluated == self.done or len(self.data.val) < 2:
            return
        yield Evaluating(self.done, len(self.data.val) - 1)
        start = time.perf_counter()
        result = evaluate(
            self.model,
            self.data.val,
            self.token_bytes,
            batch_size=self.config.batch_size,
            device=self.device,
            should_stop=self.should_stop,
        )
        if not math.isfinite(result.loss):
            what = f"held-out loss {result.loss:g}"
            raise NonFinite(self.done, what, "the held-out text", bad_weights=True, fix=self._rates())
        seconds, self.evaluated = time.perf_counter() - start, self.done
        is_best = result.loss < self.best
        self.best = min(self.best, result.loss)
        yield Evaluated(self.done, result, is_best, seconds)

    def _require_replay(self) -> None:
        """Refuse activation checkpointing where dropout could not be replayed. Raises ConfigError."""
        model = self.model_config.resolved()
        dropouts = (model.attn_dropout, model.attn_out_dropout, model.mlp_dropout, model.mlp_out_dropout)
        if self.config.recompute and any(dropouts) and not self.device.replays_dropout:
            raise ConfigError(
                f"recompute: on {self.device.device} dropout in the blocks cannot be drawn a second time; "
                "leave out `recompute`, or set `dropout` 0"
            )

    def _rates(self) -> str:
        muon = f" and `muon_lr` (it is {self.config.muon_lr:g})" if self.config.optimizer == "muon" else ""
        return f"lower `lr` (it is {self.config.lr:g}){muon} or lengthen `warmup`,"

    def _first_bad(self, x: Tensor) -> str:
        """The first point of the stream that is not finite on this batch; else the first gradient, from the end."""
        point = first_non_finite(self.model, x, self.device, self.config.windows_at_once)
        parameters = reversed(list(self.model.named_parameters()))
        bad = (name for name, p in parameters if p.grad is not None and not torch.isfinite(p.grad).all())
        return point or next((f"the gradient of {name}" for name in bad), "the loss")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mix(seed: int, step: int) -> int:
    """One 64-bit seed from two numbers, without near repeats for near steps."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])
