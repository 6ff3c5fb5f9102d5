"""`mxfp8::embedding`: rows of a packed table. Results and errors are as in `numpy_nodes.py`; dtypes are torch's.

The op that corresponds to `torch.nn.functional.embedding`; negative indices count from the last row. The arguments
`padding_idx` and `scale_grad_by_freq` of that function change gradients only, and a packed table has none, so this op
does not have them. `max_norm`, which changes the table in place, has no counterpart.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops import contract, native
from mxfp8_ops.nodes.embedding import check_indices, embedding_shape
from mxfp8_ops.torch_ops.operands import (
    DTYPE_CODES,
    EMPTY,
    FORMAT_CODES,
    Op,
    check_codes,
    check_devices,
    check_dtype,
    library,
    plain,
    readable,
)
from mxfp8_ops.torch_ops.schemas import schema

INDEX_CODES: Final = {torch.int32: contract.INT32, torch.int64: contract.INT64}
"""Code of each dtype of indices in the native library."""


def check_embedding(
    indices: Tensor, b: Tensor, b_scales: Tensor, b_format: str = "e4m3", dtype: torch.dtype | None = None
) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Returns the result's shape and dtype and the format's code; raises the errors of `embedding` but for indices."""
    b_code, dtype = FORMAT_CODES[b_format], dtype or torch.float32
    if dtype not in DTYPE_CODES:
        check_dtype("embedding", dtype)
    shape = embedding_shape("embedding", indices, tuple(b.shape))
    check_codes("embedding", b, b_scales, -1)
    return shape, dtype, b_code


def _embedding_fake(indices: Tensor, b: Tensor, b_scales: Tensor, *args: Any) -> Tensor:
    check_devices("embedding", indices, b, b_scales)
    shape, dtype, _ = check_embedding(indices, b, b_scales, *args)
    return b.new_empty(shape, dtype=dtype)


def embedding_cpu(indices: Tensor, b: Tensor, b_scales: Tensor, *args: Any) -> Tensor:
    """Returns the rows of b [V, D] at `indices` [...] as [..., D], in float32 by default."""
    shape, dtype, b_code = check_embedding(indices, b, b_scales, *args)
    if not (plain(indices.itemsize, indices) and plain(1, b, b_scales)):
        indices, b, b_scales = readable("embedding", "indices b b_scales", indices, b, b_scales)
    y = EMPTY[dtype](*shape)
    status = library().mxfp8_embedding(
        INDEX_CODES[indices.dtype], indices.data_ptr(), indices.numel(), b_code, b.data_ptr(), b_scales.data_ptr(),
        *b.shape, DTYPE_CODES[dtype], y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if status:
        check_indices("embedding", indices.numpy(), b.shape[0])  # its error has the place in the tensor
        native.check("embedding", status)
    return y


def picked(indices: Tensor, b: Tensor, b_scales: Tensor, b_format: str, dtype: torch.dtype) -> Tensor:
    """Returns the rows, by other ops. The device reports an index outside of the table later."""
    # index_select takes no negative indices. No check here: it would wait for the device.
    flat = indices.reshape(-1)
    rows = torch.where(flat < 0, flat + b.shape[0], flat)
    elements, scales = b.index_select(0, rows), b_scales.index_select(0, rows)
    y: Tensor = torch.ops.mxfp8.dequantize.default(elements, scales, -1, b_format, dtype)
    return y.view(*indices.shape, b.shape[1])


OPS: Final = (
    Op(
        schema("embedding", contract.EMBEDDING),
        {"CPU": embedding_cpu},
        _embedding_fake,
    ),
)
