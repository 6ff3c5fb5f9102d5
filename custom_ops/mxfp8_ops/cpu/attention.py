"""Attention of NumPy arrays in the native library; its error stays within `numpy_nodes.attention_error_bound`."""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING

import numpy as np

from mxfp8_ops import contract, formats, native
from mxfp8_ops.cpu.operands import array, contiguous, empty, thread_count
from mxfp8_ops.formats import VALUE_DTYPES
from mxfp8_ops.nodes.attention import AttentionSettings, Past, check_attention
from mxfp8_ops.numerics import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mxfp8_ops.nodes.attention import AttentionOptions


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    past: Past | None = None,
    *,
    threads: int = 0,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array, Array]:
    """Returns (y, present_key, present_value), as `numpy_nodes.attention` does."""
    settings = AttentionSettings(**options)
    # Types are checked before shapes are read: an operand that is not an array may have no shape.
    named = {"q": q, "k": k, "v": v}
    named |= {} if mask is None else {"mask": mask}
    named |= {} if past is None else dict(zip(("past_key", "past_value"), past, strict=True))
    for name, operand in named.items():
        array("attention", name, operand)
    sizes = check_attention("attention", (q, k, v), mask, past, settings.heads)
    rounding = formats.activation_dtype(settings.activation_dtype).onnx_dtype
    named = {name: contiguous("attention", x) for name, x in named.items()}
    presents = [(sizes.batch, sizes.kv_heads, sizes.total, d) for d in (sizes.d, sizes.dv)]
    results = [empty("attention", shape, q.dtype) for shape in (sizes.y, *presents)]
    arguments = native.AttentionArguments(
        dtype=VALUE_DTYPES[q.dtype.name].onnx_dtype, activation_dtype=rounding, causal=settings.is_causal,
        nan_guard=settings.nan_guard, scale=settings.scale, batch=sizes.batch, rows=sizes.rows, keys=sizes.keys,
        past=sizes.past, q_heads=sizes.q_heads, kv_heads=sizes.kv_heads, d=sizes.d, dv=sizes.dv,
        y=results[0].ctypes.data, present_key=results[1].ctypes.data, present_value=results[2].ctypes.data,
        **{name: x.ctypes.data for name, x in named.items()},
    )  # fmt: skip
    # The library broadcasts a mask of four sizes along sizes of 1. ONNX aligns a shorter shape at the last dimension.
    if mask is not None:
        arguments.mask_dtype = contract.BOOL if mask.dtype == np.bool_ else VALUE_DTYPES[mask.dtype.name].onnx_dtype
        arguments.mask_sizes[:] = (*(1,) * (4 - mask.ndim), *mask.shape)
    status = native.load().mxfp8_attention(byref(arguments), thread_count("attention", threads))
    native.check("attention", status)
    y, present_key, present_value = results
    return y, present_key, present_value
