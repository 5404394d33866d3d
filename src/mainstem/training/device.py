"""One place that decides where a model runs and in which precision."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mainstem.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """Where and how: bfloat16 autocast on CUDA that has it, float32 elsewhere; no gradient scaler anywhere."""

    device: torch.device
    autocast_dtype: torch.dtype | None = None

    @classmethod
    def choose(cls, name: str = "auto") -> "Device":
        """The policy for a name. Raises ConfigError if this machine has no such device."""
        has_mps = torch.backends.mps.is_available()
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ConfigError(f"device: {name!r} is not a device; choose auto, cpu, cuda, cuda:1 or mps") from None
        count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(has_mps)}.get(device.type, 0)
        if (device.index or 0) >= count:
            raise ConfigError(f"device: {name!r} is not on this machine (it has {count} of them); try cpu")
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return cls(device, torch.bfloat16 if bf16 else None)

    @property
    def fused(self) -> bool:
        """Whether the fused AdamW runs here."""
        return self.device.type in ("cpu", "cuda")

    @property
    def replays_dropout(self) -> bool:
        """Whether `torch.utils.checkpoint` keeps the state that dropout draws from here."""
        return self.device.type in ("cpu", "cuda")

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """The random state that dropout draws from follows from the seed inside, and is restored after it."""
        index = () if self.device.type == "mps" else (self.device,)
        module = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        cpu, own = torch.get_rng_state(), None if module is None else module.get_rng_state(*index)
        torch.default_generator.manual_seed(seed)
        if module is not None:
            with contextlib.nullcontext() if self.device.type == "mps" else module.device(self.device):
                module.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_rng_state(cpu)
            if module is not None:
                module.set_rng_state(own, *index)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context for forward passes."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)
