"""Our kernels as Triton builds them for a device, which it does without one: run by `test_kernels`."""

import inspect

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from mainstem.model.kernels import programs
from mainstem.model.kernels.launch import tile

pytestmark = pytest.mark.skipif(
    "constexprs" not in inspect.signature(ASTSource.__init__).parameters, reason="needs a newer triton"
)
GELU = {"gelu_bias_forward": 3, "gelu_bias_backward": 5}
NORM = {"add_norm_forward": 8, "add_norm_backward": 9}
"""How many tensors a program is given, of which the first two have the product's type here."""


def built(name, width, tensors, dtype, **flags):
    """The program as its launch would specialise it, for a device of capability 9.0 (bf16) or 8.0."""
    function, t = getattr(programs, name), tile(width, 1024 if name in GELU else None)
    constant = {**flags, "ROWS": t.rows, "BLOCK": t.block} | ({"width": 1} if width == 1 else {})
    types = [f"*{dtype}"] * 2 + ["*fp32"] * (tensors - 2) + ["i32", "i32", "fp32"]
    signature = dict(zip(function.arg_names, types, strict=False)) | dict.fromkeys(constant, "constexpr")
    source = ASTSource(function, {arg: signature[arg] for arg in function.arg_names}, constant)
    options = {option: value for option, value in t.options.items() if option not in constant}
    return compile(source, target=GPUTarget("cuda", 90 if dtype == "bf16" else 80, 32), options=options)


@pytest.mark.parametrize(("width", "dtype"), [(1, "fp32"), (130, "bf16"), (3072, "bf16")])
@pytest.mark.parametrize("name", GELU)
def test_gelu_is_built(name, width, dtype):
    assert built(name, width, GELU[name], dtype).asm["cubin"]


@pytest.mark.parametrize(("width", "dtype"), [(1, "fp32"), (130, "bf16"), (768, "fp32")])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("name", NORM)
def test_norms_are_built(name, centred, width, dtype):
    flags = {"BIASED": centred} if name == "add_norm_forward" else {"ARRIVES": centred, "SPLIT": not centred}
    assert built(name, width, NORM[name], dtype, CENTRED=centred, **flags).asm["cubin"]
