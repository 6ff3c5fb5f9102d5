"""The nodes as torch ops: importing this module registers `torch.ops.mxfp8.*`. It loads no native code by itself.

`numpy_nodes.py` defines the results, and `contract.TORCH_OPS` lists the ops that are nodes. A dtype of None is
float32, and in weight_gemm the dtype of x. AOTInductor cannot package a ScalarType with any other default (torch 2.13
writes the default out as an int and refuses to read it).

A file per kind of op: checks, fake kernel, CPU kernel, and in OPS the rows that register them. The schema of a node's
op follows from its row of the contract. The other files:

cuda.py      CUDA kernels, through CuPy
operands.py  the rows of OPS, and the checks of all ops
products.py  the matrix products of a gemm with leading dimensions
schemas.py   the schema of a node's op, from its row of the contract
gradients.py  shared by the ops with gradients
cached_weights.py  quantized weights that live for several calls
constant_weights.py  weights in the layout of the kernels, on the CPU
sharding.py  the ops on DTensors; only programs with DTensors import it, as the import takes half a second

Elements and scales are uint8 tensors: `module.to(dtype)` changes float8 buffers, but leaves these alone. Cut them
along the blocked axis only between blocks, both alike: elements[..., 32 * i : 32 * j] with scales[..., i:j]. If a view
begins elsewhere or reshapes this axis, the shapes fit and the values are wrong; no op detects this.

linear_train uses quantize_both for a gradient [M, N]: it returns quantize(x) and quantize(x.t()), and on a GPU reads x
once. grouped_linear_train is linear_train for each group of rows; quantize_groups and grouped_wgrad make the gradients
of its weights.

Gradients: linear_train and product have all gradients, linear_packed and weight_gemm the gradients of x and bias (the
packed weight is frozen), gemm the gradient of its bias, grouped_gemm the gradient of values. All are in reverse mode,
by backward() and by torch.func.grad, and pass straight through the rounding. A second derivative of linear_train and
its grouped form raises an error, and so does forward mode. quantize returns integers, which pass no gradient on: it
raises an error if x requires a gradient, and so does
conv. dequantize and embedding take integers, which have no gradients.

Autocast casts the x of linear_train and its grouped form, like the x of F.linear, and never a weight; the other ops
compute in the dtypes of their arguments. torch.vmap loops over the ops, with a warning; it refuses linear_train and its
grouped form. Results are contiguous.

The ops are registered straight with the dispatcher (`torch.library.Library`) rather than with `custom_op`, which costs
three times as much per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from mxfp8_ops import contract
from mxfp8_ops.torch_ops import (
    conv,
    embedding,
    gemm,
    grouped,
    grouped_training,
    packed,
    quantize,
    train_product,
    training,
)
from mxfp8_ops.torch_ops.cached_weights import weight_cache
from mxfp8_ops.torch_ops.constant_weights import set_prepack
from mxfp8_ops.torch_ops.operands import Op

__all__ = ["LIBRARY", "OPS", "register", "set_prepack", "weight_cache"]

OPS: Final[tuple[Op, ...]] = (
    *(*quantize.OPS, *gemm.OPS, *conv.OPS, *embedding.OPS, *grouped.OPS),
    *(*train_product.OPS, *packed.OPS, *training.OPS, *grouped_training.OPS),
)
"""Every op of namespace `mxfp8`."""


def _on_cuda(name: str) -> Callable[..., Any]:
    """Returns the CUDA kernel of an op, which needs CuPy; nothing of it is imported before its first call."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        from mxfp8_ops.torch_ops import cuda

        return getattr(cuda, name)(*args, **kwargs)

    return kernel


def register(op: Op, library: Any) -> None:
    """Defines an op in `library`, a torch.library.Library of namespace `mxfp8`, with all its kernels."""
    # A schema may be written over several lines; torch wants one.
    library.define(" ".join(op.schema.split()), tags=(torch.Tag.pt2_compliant_tag,))
    for key, kernel in op.kernels.items():
        library.impl(op.name, kernel, key, with_keyset=key == "Autograd")
    # An op that is made of others runs on every device of these others: it needs no kernel of its own.
    if "CPU" in op.kernels and "CompositeExplicitAutograd" not in op.kernels:
        library.impl(op.name, _on_cuda(op.name), "CUDA")
    full_name = f"{contract.DOMAIN}::{op.name}"
    if op.fake is not None:
        torch.library.register_fake(full_name, op.fake, lib=library)
    if op.vmap is not None:
        torch.library.register_vmap(full_name, op.vmap, lib=library)


LIBRARY: Final[Any] = torch.library.Library(contract.DOMAIN, "DEF")  # type: ignore[no-untyped-call]
"""Keeps the registrations alive."""

for _op in OPS:
    register(_op, LIBRARY)
