"""The nodes as torch ops: importing this module registers `torch.ops.mxfp8.*`. It loads no native code by itself.

    quantize(x, axis=-1, element_format="e4m3", scale_rounding="ceil") -> (elements, scales)
    dequantize(elements, scales, axis=-1, element_format="e4m3", dtype=None) -> values
    gemm(a, a_scales, b, b_scales, bias=None, a_format="e4m3", b_format="e4m3", dtype=None) -> values
    weight_gemm(x, b, b_scales, bias=None, b_format="e4m3", dtype=None) -> values
    grouped_gemm(a, a_scales, b, b_scales, offs, a_format="e4m3", b_format="e4m3", dtype=None) -> values
    linear_train(x, weight, bias=None, fp8_format="E4M3", scale_rounding="ceil") -> values
    quantize_both(x, element_format="e4m3", scale_rounding="ceil") -> (elements, scales, elements, scales)

A dtype of None is float32, and that of x in weight_gemm: a ScalarType with any other default cannot be packaged by
AOTInductor (torch 2.13 writes the default out as an int and refuses to read it).

Their meaning is that of `numerics.py`; `torch_shapes.py` has the checks and fake kernels, `torch_kernels.py` the CPU
kernels, `torch_cuda.py` those of CUDA devices (through CuPy), `torch_training.py` the one op that trains,
`torch_grouped.py` the one for mixtures of experts, which has no ONNX node. Elements and scales are uint8 tensors:
`module.to(dtype)` leaves them alone, which it does not do to float8 buffers. quantize_both is what linear_train
needs of a gradient [M, N]: quantize(x) and quantize(x.t()), reading it once on a GPU.

Gradients: linear_train has all of them. weight_gemm has those of x and bias, so that adapters train on a packed model.
Both have them in reverse mode, by backward() and by torch.func.grad; forward mode raises. quantize passes none back and
warns if one is wanted, as torch does for grouped_gemm; gemm and dequantize take integers, which have none.

Autocast casts the x of linear_train, as it does that of F.linear, and never a weight; the other ops compute in the
dtypes they are given. torch.vmap makes one call of the first four (`torch_vmap.py`), refuses linear_train, and loops
over the others, with a warning. Results are contiguous.

The ops are registered straight with the dispatcher (`torch.library.Library`) rather than with `custom_op`, which costs
three times as much per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from mxfp8_ops import contract
from mxfp8_ops.torch_ops import cpu as torch_kernels
from mxfp8_ops.torch_ops import grouped as torch_grouped
from mxfp8_ops.torch_ops import shapes as torch_shapes
from mxfp8_ops.torch_ops import training as torch_training
from mxfp8_ops.torch_ops import vmap as torch_vmap

SCHEMAS: Final = (
    """quantize(Tensor x, int axis=-1, str element_format="e4m3", str scale_rounding="ceil") -> (Tensor, Tensor)""",
    """dequantize(Tensor elements, Tensor scales, int axis=-1, str element_format="e4m3", ScalarType? dtype=None)
    -> Tensor""",
    """gemm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor? bias=None, str a_format="e4m3",
    str b_format="e4m3", ScalarType? dtype=None) -> Tensor""",
    """weight_gemm(Tensor x, Tensor b, Tensor b_scales, Tensor? bias=None, str b_format="e4m3",
    ScalarType? dtype=None) -> Tensor""",
    """quantize_both(Tensor x, str element_format="e4m3", str scale_rounding="ceil")
    -> (Tensor, Tensor, Tensor, Tensor)""",
    """grouped_gemm(Tensor a, Tensor? a_scales, Tensor b, Tensor b_scales, Tensor offs, str a_format="e4m3",
    str b_format="e4m3", ScalarType? dtype=None) -> Tensor""",
    """linear_train(Tensor x, Tensor weight, Tensor? bias=None, str fp8_format="E4M3", str scale_rounding="ceil")
    -> Tensor""",
)
"""The ops of namespace `mxfp8`, as torch reads them."""


def _on_cuda(name: str) -> Callable[..., Any]:
    """Returns the CUDA kernel of an op, which needs CuPy; nothing of it is imported before its first call."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        from mxfp8_ops.torch_ops import cuda as torch_cuda

        return getattr(torch_cuda, name)(*args, **kwargs)

    return kernel


def _register() -> Any:
    library: Any = torch.library.Library(contract.DOMAIN, "DEF")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        library.define(" ".join(schema.split()), tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.partition("(")[0]
        fake = torch_grouped.empty if name == "grouped_gemm" else getattr(torch_shapes, name)
        torch.library.register_fake(f"{contract.DOMAIN}::{name}", fake, lib=library)
    for name in ("quantize", "quantize_both", "dequantize", "gemm", "weight_gemm"):
        library.impl(name, getattr(torch_kernels, name), "CPU")
        library.impl(name, _on_cuda(name), "CUDA")
    # On every device: these are made of the ops above.
    library.impl("grouped_gemm", torch_grouped.grouped_gemm, "CompositeExplicitAutograd")
    library.impl("linear_train", torch_training.linear_train, "CompositeExplicitAutograd")
    library.impl("linear_train", torch_training.autocast, "AutocastCPU")
    library.impl("linear_train", torch_training.autocast, "AutocastCUDA")
    for name in ("quantize", "dequantize", "gemm", "weight_gemm", "linear_train"):
        torch.library.register_vmap(f"{contract.DOMAIN}::{name}", getattr(torch_vmap, name), lib=library)
    library.impl("weight_gemm", torch_training.weight_gemm, "Autograd", with_keyset=True)
    library.impl("linear_train", torch_training.recorded, "Autograd")
    return library


LIBRARY: Final = _register()
"""Keeps the registrations alive."""
