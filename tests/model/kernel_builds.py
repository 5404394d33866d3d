"""The Triton programs are compiled for CUDA devices, which needs no device: run by `test_kernels`."""

import inspect

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from mainstem.model.kernels import programs
from mainstem.model.kernels.launch import tile

pytestmark = pytest.mark.skipif(
    "constexprs" not in inspect.signature(ASTSource.__init__).parameters, reason="needs a newer triton"
)
TENSORS = {"gelu_bias_forward": 3, "gelu_bias_backward": 5}
"""How many tensors a program takes; the first two have the product's type."""


@pytest.mark.parametrize(("width", "dtype"), [(1, "fp32"), (130, "bf16"), (3072, "bf16")])
@pytest.mark.parametrize("name", TENSORS)
def test_gelu_is_built(name, width, dtype):
    """Specialized as a launch would, for compute capability 9.0 (bf16) or 8.0."""
    function, t = getattr(programs, name), tile(width)
    constant = {"ROWS": t.rows, "BLOCK": t.block} | ({"width": 1} if width == 1 else {})
    types = [f"*{dtype}"] * 2 + ["*fp32"] * (TENSORS[name] - 2) + ["i32", "i32"]
    signature = dict(zip(function.arg_names, types, strict=False)) | dict.fromkeys(constant, "constexpr")
    source = ASTSource(function, {arg: signature[arg] for arg in function.arg_names}, constant)
    options = {option: value for option, value in t.options.items() if option not in constant}
    assert compile(source, target=GPUTarget("cuda", 90 if dtype == "bf16" else 80, 32), options=options).asm["cubin"]
