"""How a program is laid over a tensor, and what it can be given."""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mainstem.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16)
PER_WARP = 256
"""Numbers of a tile to a warp: eight a thread, which are one or two loads of 16 bytes."""


def programs() -> ModuleType:
    """The Triton programs, compiled for the device at their first launch. Raises ConfigError without Triton."""
    try:
        return importlib.import_module("mainstem.model.kernels.programs")
    except ImportError as error:
        raise ConfigError(f"kernels: Triton cannot be loaded ({error}); pip install triton (Linux only)") from None


class Tile(NamedTuple):
    """Rows and columns of a program's tile, and the warps that share it."""

    rows: int
    block: int
    warps: int

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of a launch; products and sums are fused whatever Triton's default is."""
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.warps, "enable_fp_fusion": True}


def tile(width: int, widest: int | None = None) -> Tile:
    """A tile for rows of `width` numbers: a whole row wide, or at most `widest`; several rows if they are short."""
    block = 1 << (width - 1).bit_length()
    block = block if widest is None else min(block, widest)
    rows = max(1, 4 * PER_WARP // block)
    return Tile(rows, block, min(16, max(4, rows * block // PER_WARP)))


def programs_at_once(x: Tensor) -> int:
    """Programs among which the rows are shared out where sums over rows are taken: a device's fill, no more."""
    return 8 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3


def check(name: str, **tensors: Tensor | None) -> None:
    """Raise ConfigError for a type that the programs do not hold, naming the tensor."""
    for what, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ConfigError(f"{name}: {what} is {tensor.dtype}; give {known}, or take plain_{name}")


def check_shape(name: str, what: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ConfigError for a shape other than the one that is needed."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ConfigError(f"{name}: {what} has shape {tuple(tensor.shape)}; it must be {shape}")
