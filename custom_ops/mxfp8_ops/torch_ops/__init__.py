"""The nodes as torch ops: importing this module registers `torch.ops.mxfp8.*`. It loads no native code by itself.

`SCHEMAS` lists the ops; their meaning is that of `numerics.py`, and `contract.TORCH_OPS` says which are nodes. A
dtype of None is float32, and that of x in weight_gemm: a ScalarType with any other default cannot be packaged by
AOTInductor (torch 2.13 writes the default out as an int and refuses to read it).

shapes.py    checks, and fake kernels
cpu.py       CPU kernels
cuda.py      kernels of CUDA devices, through CuPy
training.py  the op that trains, and gradients
grouped.py   the op for mixtures of experts
vmap.py      torch.vmap
products.py  the matrix products of a gemm with leading dimensions

Elements and scales are uint8 tensors: `module.to(dtype)` changes float8 buffers, but leaves these alone. quantize_both
gives linear_train what it needs of a gradient [M, N]: quantize(x) and quantize(x.t()), reading it once on a GPU.

Gradients: linear_train has all of them. weight_gemm has those of x and bias, so that adapters train on a packed model.
Both have them in reverse mode, by backward() and by torch.func.grad; forward mode raises. quantize passes none back and
warns if one is wanted, as torch does for grouped_gemm; gemm and dequantize take integers, which have none.

Autocast casts the x of linear_train, as it does that of F.linear, and never a weight; the other ops compute in the
dtypes they are given. torch.vmap makes one call of the first four (`vmap.py`), refuses linear_train, and loops
over the others, with a warning. Results are contiguous.

The ops are registered straight with the dispatcher (`torch.library.Library`) rather than with `custom_op`, which costs
three times as much per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from mxfp8_ops import contract
from mxfp8_ops.torch_ops import cpu, grouped, shapes, training, vmap

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
        from mxfp8_ops.torch_ops import cuda

        return getattr(cuda, name)(*args, **kwargs)

    return kernel


def _register() -> Any:
    library: Any = torch.library.Library(contract.DOMAIN, "DEF")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        library.define(" ".join(schema.split()), tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.partition("(")[0]
        fake = grouped.empty if name == "grouped_gemm" else getattr(shapes, name)
        torch.library.register_fake(f"{contract.DOMAIN}::{name}", fake, lib=library)
    for name in ("quantize", "quantize_both", "dequantize", "gemm", "weight_gemm"):
        library.impl(name, getattr(cpu, name), "CPU")
        library.impl(name, _on_cuda(name), "CUDA")
    # On every device: these are made of the ops above.
    library.impl("grouped_gemm", grouped.grouped_gemm, "CompositeExplicitAutograd")
    library.impl("linear_train", training.linear_train, "CompositeExplicitAutograd")
    library.impl("linear_train", training.autocast, "AutocastCPU")
    library.impl("linear_train", training.autocast, "AutocastCUDA")
    for name in ("quantize", "dequantize", "gemm", "weight_gemm", "linear_train"):
        torch.library.register_vmap(f"{contract.DOMAIN}::{name}", getattr(vmap, name), lib=library)
    library.impl("weight_gemm", training.weight_gemm, "Autograd", with_keyset=True)
    library.impl("linear_train", training.recorded, "Autograd")
    return library


LIBRARY: Final = _register()
"""Keeps the registrations alive."""
