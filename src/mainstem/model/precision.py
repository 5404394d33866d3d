"""Numerics: conversion to float32 before sums, and division with a zero denominator."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype if wider, because sums in bfloat16 have three digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def over(part: Tensor, whole: Tensor) -> Tensor:
    """The quotient part / whole, and 0 where the whole is 0."""
    return torch.where(whole > 0, part / whole.where(whole > 0, 1), 0)
