"""`mainstem inspect tune RUN`: train a tuned lens on the run's own text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstem import atomic
from mainstem.cli.inspect.lens import LENS
from mainstem.cli.parts.arguments import parse
from mainstem.cli.parts.inspection import Opening, finish, held_out, open_model
from mainstem.cli.parts.screen import Screen
from mainstem.cli.parts.signals import stoppable
from mainstem.errors import UserError
from mainstem.formats.run import prepared
from mainstem.runs.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Tune(Opening):
    """Train a tuned lens: one affine map per depth that brings its prediction close to the model's own."""

    data: str | None = None
    """A prepared folder; by default the run's own data."""
    out: str | None = None
    """The file to write; by default tuned-lens.safetensors in the run's folder."""
    steps: int = 200
    """Training steps."""
    batch_size: int = 4
    """Windows per step."""
    lr: float = 0.3
    """Peak learning rate: the largest relative change of the stream in one step."""
    seed: int = 1
    """Random seed of the order of the windows."""
    held_out: int = 16
    """Windows of held-out text that it is evaluated on, before and after."""


def main(argv: Sequence[str]) -> None:
    """Parse, train, save, print."""
    command = parse(Tune, "inspect tune", argv)
    screen = Screen(command.json)
    import torch

    model, tokenizer = open_model(command, screen)
    from mainstem.stream.analysis.lens import depths, label
    from mainstem.stream.analysis.tuned import TuningStep, lens_kl, train_lens
    from mainstem.text.tokens import Windows

    train = prepared(command.run, command.data, tokenizer).train
    windows = Windows(train, model.config.n_ctx, command.seed, model.config.vocab_size)
    val = list(held_out(command.run, command.data, model, tokenizer, command.held_out))
    if command.out is None and not RunFolder(command.run).exists():
        raise UserError(f"{command.run}: nothing is written beside a model that is no run of ours; give --out FILE")
    out = atomic.replaceable(Path(command.out or Path(command.run) / LENS))  # before anything is trained
    with screen.bar("tuning", command.steps) as bar, stoppable() as check:

        def show(done: TuningStep) -> None:
            bar.at(done.step, f"KL {sum(done.kl) / len(done.kl):.3f}")

        def batch(step: int) -> torch.Tensor:
            return torch.from_numpy(windows.batch(step, command.batch_size)[0]).to(model.wte.weight.device)

        before = lens_kl(model, val)
        tuned, _ = train_lens(model, batch, steps=command.steps, lr=command.lr, progress=show, should_stop=check)
        after = lens_kl(model, val, tuned)
    tuned.save(out, model)
    labels = [label(point) for point in depths(model)]
    screen.say(f"KL to the model's own distribution, nats, on {len(val)} held-out windows")
    screen.table(("depth", "logit lens", "tuned lens"), zip(labels, before, after, strict=True))
    screen.say(f"wrote {out}")
    through = f"--lens {command.out or 'tuned'}"
    screen.say(f'next  mainstem inspect lens {command.run} "..." {through}')
    rows = [{"label": name, "logit_lens": b, "tuned_lens": a} for name, b, a in zip(labels, before, after, strict=True)]
    result = {"lens": str(out), "steps": command.steps, "rows": rows}
    arrays = {"labels": labels, "logit_lens": before, "tuned_lens": after}
    finish(command, screen, result, lambda: arrays)
