"""`mainstem info PRESET|RUN`: what a model is made of, from its config alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mainstem import counts
from mainstem.cli.parts.arguments import Positional, config_of, parse
from mainstem.cli.parts.screen import Screen
from mainstem.config import ModelConfig
from mainstem.errors import UserError
from mainstem.presets import PRESETS


@dataclass(frozen=True)
class Info:
    """Count parameters, norms, FLOPs per token and memory from the config alone; no weights are read."""

    target: Positional[str]
    """A preset (README lists them) or a RUN."""
    json: bool = False
    """One object on stdout."""
    model: ModelConfig = field(default_factory=ModelConfig)


def main(argv: Sequence[str]) -> None:
    """Parse, count, print."""
    words = [word for word in argv if not word.startswith("-")]
    target = next((word for word in words if word in PRESETS or Path(word).is_dir()), next(iter(words), None))
    if not target and not {"-h", "--help"} & set(argv):
        raise UserError(f"info: name a preset or a RUN first; presets: {', '.join(PRESETS)}")
    config = config_of(target) if target else ModelConfig()
    command = parse(Info, "info", argv, Info(target or "tiny", model=config))
    screen, config = Screen(command.json), command.model.resolved()
    summary = counts.summary(config)
    about = PRESETS[command.target].about if command.target in PRESETS else "run"
    screen.say(
        f"{command.target} ({about}): {config.n_layer} blocks, {config.d_model} wide, {config.n_head} heads of "
        f"{config.d_head}, {config.n_ctx} positions, residual {config.residual}"
    )
    screen.table(["parameters", ""], [[name.replace("_", " "), n] for name, n in summary["parameters"].items()])
    screen.say(f"  norms {summary['norms']}; tied matrices count once")
    screen.table(["FLOPs per token", ""], [[name, n] for name, n in summary["flops_per_token"].items()])
    memory = summary["memory_bytes"]
    rows = [[name.replace("_", " "), f"{n / 1e6:,.1f}"] for name, n in memory.items()]
    screen.table(["memory, float32, one window", "MB"], rows)
    screen.result({"name": command.target, "config": config.to_dict(), **summary})
