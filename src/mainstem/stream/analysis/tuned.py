"""The tuned lens (Belrose et al. 2023, 2303.08112): an affine map at each depth, trained to say what the end will say.

A depth's stream is written in a basis of its own, which the unembedding was not made for; the logit lens reads it all
the same. Here each depth before the last has a map h -> h + h W + b, which begins as the identity, and so as the logit
lens. It is trained to make KL(final || softmax(unembed(h + h W + b))) small. Nothing of the model is changed.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from mainstem import atomic
from mainstem.errors import ConfigError, DataError, RunError, TrainingFailed, nearest
from mainstem.model.gpt import GPT
from mainstem.model.mode import evaluating
from mainstem.model.names import FINAL
from mainstem.model.tap import Recorder
from mainstem.results import Rows
from mainstem.stream.analysis.lens import at_once, depths
from mainstem.stream.distributions import divergence, log_probabilities
from mainstem.training.optim import Muon

FORMAT = "mainstem-tuned-lens/1"
FIELDS = ("residual", "norm", "norm_eps", "n_layer", "d_model", "vocab_size")
"""The fields of the model's config that a lens is bound to, besides its points."""
AGAIN = "train it again with mainstem inspect tune RUN"


class TunedLens(nn.Module):
    """A map for each depth before the last of one model: `tuned(x, point)`.

    `weight[i]`, (C, C), and `bias[i]`, (C,), are those of `points[i]`, and zero until they are trained.

    Args:
        model: whose stream it reads; the maps take its precision and device.
    """

    def __init__(self, model: GPT):
        super().__init__()
        self.points, self.unembedding = depths(model), unembedding_hash(model)
        C, like = model.config.d_model, model.lm_head.weight
        before = self.points[:-1]
        self.weight = nn.ParameterList(torch.zeros(C, C, dtype=like.dtype, device=like.device) for _ in before)
        self.bias = nn.ParameterList(torch.zeros(C, dtype=like.dtype, device=like.device) for _ in before)

    def forward(self, x: Tensor, point: str) -> Tensor:
        """The stream (..., C) at one of the `points`, as the unembedding reads it. At `resid_final` it stays as it is.

        Raises ConfigError for another name.
        """
        if point == FINAL:
            return x
        if point not in self.points:
            raise ConfigError(f"point: {point!r} is not a depth of this lens; {nearest(point, self.points)}")
        index = self.points.index(point)
        return x + x @ self.weight[index].to(x) + self.bias[index].to(x)

    def __repr__(self) -> str:
        maps = f"an affine map of width {self.weight[0].shape[0]} at each of {len(self.weight)} depths"
        return f"TunedLens: {maps}, {self.points[0]} to {self.points[-2]}" if len(self.weight) else "TunedLens: no map"

    def check(self, model: GPT) -> None:
        """Raise ConfigError for a model with another unembedding or other depths than the lens was made for."""
        if self.points != depths(model) or self.unembedding != unembedding_hash(model):
            raise ConfigError(f"tuned: this lens was made for another model; {AGAIN}")

    def save(self, path: Path, model: GPT) -> None:
        """Write one safetensors file, whole or not at all: the maps, and what they were made for.

        Raises TrainingFailed for a map that is not finite or a full disk, RunError if the folder is not there.
        """
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in self.tensors()}
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise TrainingFailed(f"{path}: {name} is not finite, so nothing was saved; lower `lr`")
        self.check(model)
        hashes = {"unembedding": self.unembedding, "weights": weights_hash(model)}
        metadata = {"format": FORMAT, "model": _made_for(model), **hashes}
        atomic.write_bytes(path, save(tensors, metadata))

    @classmethod
    def load(cls, path: Path, model: GPT, notice: Callable[[str], None] = lambda text: None) -> Self:
        """The lens in a file, for the model that it was made for.

        `notice` is told where the model's blocks have changed since, under the same unembedding.

        Raises RunError for a file that is damaged or no tuned lens, for a model of another shape, and for one whose
        unembedding is not, number for number, that which the lens was trained with.
        """
        metadata, tensors = _read(path)
        if metadata.get("format") != FORMAT:
            raise RunError(f"{path}: no tuned lens (its format is {metadata.get('format')!r}, not {FORMAT!r}); {AGAIN}")
        if metadata.get("model") != _made_for(model):
            raise RunError(f"{path}: made for a model of another shape ({metadata.get('model')}); {AGAIN}")
        if metadata.get("unembedding") != unembedding_hash(model):
            raise RunError(f"{path}: made for another unembedding; {AGAIN}")
        if metadata.get("weights") != weights_hash(model):
            notice(f"{path}: the blocks have changed since this lens was trained; {AGAIN}")
        tuned = cls(model)
        parameters = dict(tuned.tensors())
        for name in sorted(parameters.keys() ^ tensors.keys()):
            raise RunError(f"{path}: damaged ({name} is {'missing' if name in parameters else 'too many'}); {AGAIN}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                if tensors[name].shape != parameter.shape or not torch.isfinite(tensors[name]).all():
                    raise RunError(f"{path}: damaged ({name} is not finite, or of another shape); {AGAIN}")
                parameter.copy_(tensors[name])
        return tuned

    def tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The maps by their names in a file: `{point}.weight`, (C, C), and `{point}.bias`, (C,)."""
        for point, weight, bias in zip(self.points, self.weight, self.bias, strict=False):  # the last point has none
            yield f"{point}.weight", weight
            yield f"{point}.bias", bias


def unembedding_hash(model: GPT) -> str:
    """The sha256 of `ln_f` and `lm_head`, names and float32 numbers: the same in every precision that holds those."""
    return _hash(model, ("ln_f", "lm_head"))


def weights_hash(model: GPT) -> str:
    """A hash of all the model's weights and its config."""
    return _hash(model, ("",))


def _hash(model: GPT, parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for name, parameter in model.get_submodule(part).named_parameters():
            digest.update(f"{part}.{name}{tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class TuningStep:
    """One step of training."""

    step: int
    """Steps done, this one included."""
    lr: float
    kl: list[float]
    """KL(final || lens) at each depth but the last: nats, the mean over the step's windows, before the step."""

    @property
    def label(self) -> str:
        """The step."""
        return f"step {self.step}"

    @property
    def value(self) -> float:
        """The mean KL over the depths, in nats."""
        return sum(self.kl) / len(self.kl)


def train_lens(
    model: GPT,
    windows: Callable[[int], Tensor],
    *,
    steps: int = 200,
    lr: float = 0.3,
    progress: Callable[[TuningStep], None] = lambda step: None,
    should_stop: Callable[[], None] = lambda: None,
) -> tuple[TunedLens, Rows[TuningStep]]:
    """A tuned lens for the model, and the steps that made it.

    A step is one forward pass without gradients; then each depth's map is trained by itself, one after the other.

    W goes by Muon and b by Adam, at rates that fall in a line to 0. The stream may be far smaller at one depth than at
    another, and the gradient that much larger, so no one rate of plain SGD suits all depths. A step of Muon moves each
    singular value of W by about its rate, which moves the stream by that share of itself, whatever its size.

    Nothing is drawn at random: on one machine and number of threads, equal windows make the same lens to the bit.

    Args:
        model: read in evaluation mode; its weights are not touched.
        windows: step, counted from 0, -> ids (B, T): a pure function, as `text.tokens.Windows.batch` is.
        steps: of the optimizers.
        lr: Muon's rate at the first step; Adam's is a tenth of it.
        progress: called after each step.
        should_stop: called before each step; it may raise.

    Raises ConfigError for a model without blocks and for steps or lr out of range, TrainingFailed for a KL that is not
    finite.
    """
    if steps < 1 or not 0 < lr < math.inf:
        raise ConfigError(f"steps {steps}, lr {lr:g}: steps must be at least 1 and lr above 0")
    tuned = TunedLens(model)
    history: Rows[TuningStep] = Rows(title="steps: the mean KL of each, nats")
    if len(tuned.points) == 1:
        raise ConfigError("n_layer: the model has no blocks, so its only depth is the last, which has no map")
    optimizers = (
        (lr, Muon(tuned.weight, lr=lr, momentum=0.9, weight_decay=0.0)),
        (0.1 * lr, torch.optim.Adam(tuned.bias, betas=(0.9, 0.95))),
    )
    with evaluating(model):
        for step in range(steps):
            should_stop()
            kl = _gradients(model, tuned, windows(step))
            for point, value in zip(tuned.points, kl, strict=False):  # the last has none
                if not math.isfinite(value):
                    raise TrainingFailed(f"the lens's KL at {point} is {value} at step {step + 1}; lower `lr` ({lr:g})")
            left = 1 - step / steps
            for peak, optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = peak * left
                optimizer.step()
                optimizer.zero_grad()
            history.append(TuningStep(step + 1, lr * left, kl))
            progress(history[-1])
    return tuned, history


def lens_kl(model: GPT, windows: Iterable[Tensor], tuned: TunedLens | None = None) -> list[float]:
    """KL(final || lens) at each of `depths`: nats, the mean over every position of the windows, each ids (B, T).

    Without `tuned` it is the logit lens's. Raises DataError where there is no window.
    """
    points, count = depths(model), 0
    total = torch.zeros(len(points), dtype=torch.float64)
    with evaluating(model), torch.no_grad():
        for ids in windows:
            count += ids.numel()
            for streams in _parts(model, ids):
                final = log_probabilities(model.unembed(streams[-1]))
                for index, (point, x) in enumerate(zip(points, streams, strict=True)):
                    read = x if tuned is None else tuned(x, point)
                    total[index] += divergence(final, log_probabilities(model.unembed(read))).sum().item()
    if count == 0:
        raise DataError("there are no windows to weigh the lens on; give some text")
    return (total / count).tolist()


def _gradients(model: GPT, tuned: TunedLens, ids: Tensor) -> list[float]:
    """The mean KL at each depth but the last, and its gradient, left at the maps' parameters and nowhere else."""
    kl_by_depth = [0.0] * len(tuned.weight)
    for *streams, last in _parts(model, ids):
        with torch.no_grad():
            final = log_probabilities(model.unembed(last))
        for index, x in enumerate(streams):
            own = [tuned.weight[index], tuned.bias[index]]
            with torch.enable_grad():
                log_p = log_probabilities(model.unembed(tuned(x, tuned.points[index])))
                kl = divergence(final, log_p).sum() / ids.numel()
            for parameter, gradient in zip(own, torch.autograd.grad(kl, own), strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            kl_by_depth[index] += kl.item()
    return kl_by_depth


def _parts(model: GPT, ids: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The stream at each depth, (n, C), over as many positions as are unembedded together."""
    points = depths(model)
    tap = Recorder(points)
    with torch.no_grad():
        model.stream(ids.to(model.lm_head.weight.device), tap=tap)
    size = at_once(model.config.vocab_size)
    return zip(*(tap.values[point].flatten(0, 1).split(size) for point in points), strict=True)


def _made_for(model: GPT) -> str:
    """What a lens is made for besides the unembedding's numbers, as its file says it."""
    config = model.config.to_dict()
    return json.dumps({**{name: config[name] for name in FIELDS}, "points": depths(model)[:-1]})


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a safetensors file says of itself, and its tensors, on the CPU."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{path}: not found; make it with mainstem inspect tune RUN") from None
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path}: not readable ({error}); {AGAIN}") from None
