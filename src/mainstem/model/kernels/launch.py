"""How Triton programs are launched: the module that holds them, their tiles, and how many run at once."""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mainstem.errors import ConfigError

PER_WARP = 256
"""Elements of a tile per warp: eight per thread, which are one or two loads of 16 bytes."""
WIDEST = 1024
"""Most columns of a tile."""


def programs() -> ModuleType:
    """The Triton programs, compiled for the device at their first launch. Raises ConfigError without Triton."""
    try:
        return importlib.import_module("mainstem.model.kernels.programs")
    except ImportError as error:
        raise ConfigError(f"kernels: Triton cannot be loaded ({error}); pip install triton (Linux only)") from None


class Tile(NamedTuple):
    """Rows and columns of a program's tile, and the warps that compute it."""

    rows: int
    block: int
    warps: int

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch; multiply-adds are fused whatever Triton's default is."""
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.warps, "enable_fp_fusion": True}


def tile(width: int) -> Tile:
    """The tile for rows of `width` elements: at most WIDEST columns, and several rows if these are short."""
    block = min(1 << (width - 1).bit_length(), WIDEST)
    rows = max(1, 4 * PER_WARP // block)
    return Tile(rows, block, min(16, max(4, rows * block // PER_WARP)))


def max_programs(x: Tensor) -> int:
    """The most programs among which rows are divided where sums over rows are taken: as many as fill x's device."""
    return 8 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
