"""A write to the stream and the norm that reads it next: stream = x + write, normed = norm(stream), in one pass.

LayerNorm (Ba et al. 2016) with or without bias, and RMSNorm (Zhang and Sennrich 2019). What is normed is the stream as
it is stored, so both outputs belong together to the bit. Backward is one pass too; the gradients of gain and bias are
summed without atomics, so that the same device gives the same bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mainstem.config import NORMS
from mainstem.errors import ConfigError, nearest
from mainstem.model.kernels.launch import check, check_shape, programs, programs_at_once, tile


def add_norm(
    x: Tensor,
    write: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    norm: str = "layernorm",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + write, norm(x + write)), (..., C) each, by our kernel: float32 inside, each rounded once.

    Args:
        x: (..., C), the stream.
        write: what is added, of x's shape; the sum has the wider of the two types.
        gain: (C,).
        bias: (C,), or None; RMSNorm has none.
        eps: added to the variance, or to the mean square.
        norm: `layernorm` or `rmsnorm`.
        dtype: of the normed stream; the stream's if None.

    Differentiable once, with respect to x, write, gain and bias. It stands in a compiled graph as one operation. Raises
    ConfigError for other shapes, for float64, for an unknown norm, and without Triton.
    """
    _check_norm(norm, bias)
    check("add_norm", x=x, write=write, gain=gain, bias=bias)
    check_shape("add_norm", "write", write, tuple(x.shape))
    check_shape("add_norm", "gain", gain, (x.shape[-1],))
    check_shape("add_norm", "bias", bias, (x.shape[-1],))
    dtype = dtype or torch.promote_types(x.dtype, write.dtype)
    stream, normed, _ = _forward(x, write, gain, bias, eps, norm == "layernorm", dtype)
    return stream, normed


def plain_add_norm(
    x: Tensor,
    write: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    norm: str = "layernorm",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in PyTorch's own operations: the oracle, and what a compiler is given."""
    _check_norm(norm, bias)
    stream, width = x + write, (x.shape[-1],)
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    gain, bias = gain.to(wide.dtype), None if bias is None else bias.to(wide.dtype)
    centred = norm == "layernorm"
    normed = F.layer_norm(wide, width, gain, bias, eps) if centred else F.rms_norm(wide, width, gain, eps)
    return stream, normed.to(dtype or stream.dtype)


def _check_norm(norm: str, bias: Tensor | None) -> None:
    if norm not in NORMS:
        raise ConfigError(f"norm: unknown value {norm!r}; {nearest(norm, NORMS)}")
    if norm == "rmsnorm" and bias is not None:
        raise ConfigError("norm: rmsnorm has no bias, and one was given; give None")


@torch.library.custom_op("mainstem::add_norm", mutates_args=())
def _forward(
    x: Tensor, write: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream, its norm, and of every row the mean, if it is taken out, and 1 / scale: (2 or 1, rows)."""
    width, x = x.shape[-1], x.contiguous()
    stream = torch.empty_like(x, dtype=torch.promote_types(x.dtype, write.dtype))
    normed, rows, t = torch.empty_like(x, dtype=dtype), x.numel() // max(1, width), tile(width)
    statistics = x.new_empty((1 + centred, rows), dtype=torch.float32)
    if rows:
        with torch.cuda.device_of(x):
            programs().add_norm_forward[(-(-rows // t.rows),)](
                x, write.contiguous(), gain.contiguous(), gain if bias is None else bias.contiguous(),
                stream, normed, statistics[0], statistics[-1], rows, width, eps,
                CENTRED=centred, BIASED=bias is not None, **t.options,
            )  # fmt: skip
    return stream, normed, statistics


@torch.library.custom_op("mainstem::add_norm_backward", mutates_args=())
def _backward(
    stream: Tensor,
    gain: Tensor,
    statistics: Tensor,
    dstream: Tensor | None,
    dnormed: Tensor,
    centred: bool,
    x_dtype: torch.dtype,
    write_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx and dwrite in their types (dwrite empty where they are one type), dgain and dbias in float32."""
    width, rows, t = stream.shape[-1], statistics.shape[1], tile(stream.shape[-1])
    dx = torch.empty_like(stream, dtype=x_dtype)
    dwrite = stream.new_empty(stream.shape if x_dtype != write_dtype else 0, dtype=write_dtype)
    count = max(1, min(-(-rows // t.rows), programs_at_once(stream)))
    partial = stream.new_empty((2, count, width), dtype=torch.float32)
    if not rows:
        return dx, dwrite, stream.new_zeros(width, dtype=torch.float32), stream.new_zeros(width, dtype=torch.float32)
    with torch.cuda.device_of(stream):
        programs().add_norm_backward[(count,)](
            stream, gain.contiguous(), statistics[0], statistics[-1],
            stream if dstream is None else dstream.contiguous(), dnormed.contiguous(), dx, dwrite, partial, rows, width,
            CENTRED=centred, ARRIVES=dstream is not None, SPLIT=x_dtype != write_dtype, **t.options,
        )  # fmt: skip
    return dx, dwrite, partial[0].sum(0), partial[1].sum(0)


@_forward.register_fake
def _(
    x: Tensor, write: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // max(1, x.shape[-1])
    stream = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, write.dtype))
    return stream, x.new_empty(x.shape, dtype=dtype), x.new_empty((1 + centred, rows), dtype=torch.float32)


@_backward.register_fake
def _(
    stream: Tensor,
    gain: Tensor,
    statistics: Tensor,
    dstream: Tensor | None,
    dnormed: Tensor,
    centred: bool,
    x_dtype: torch.dtype,
    write_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dwrite = stream.new_empty(stream.shape if x_dtype != write_dtype else 0, dtype=write_dtype)
    dgain, dbias = (gain.new_empty(gain.shape, dtype=torch.float32) for _ in range(2))
    return stream.new_empty(stream.shape, dtype=x_dtype), dwrite, dgain, dbias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, write, gain, bias, _, ctx.centred, _ = inputs
    stream, _, statistics = output
    ctx.dtypes, ctx.bias = (x.dtype, write.dtype), None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(stream, gain, statistics)


def _gradients(ctx: Any, dstream: Tensor | None, dnormed: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    """With respect to x, write, gain, bias; None for the rest."""
    stream, gain, statistics = ctx.saved_tensors
    if dnormed is None:
        dx, dwrite = (None if dstream is None else dstream.to(dtype) for dtype in ctx.dtypes)
        return dx, dwrite, None, None, None, None, None
    dx, dwrite, dgain, dbias = _backward(stream, gain, statistics, dstream, dnormed, ctx.centred, *ctx.dtypes)
    if ctx.dtypes[0] == ctx.dtypes[1]:
        dwrite = dx
    dbias = None if ctx.bias is None else dbias.to(ctx.bias)
    return dx, dwrite, dgain.to(gain.dtype), dbias, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
