"""The functions of `numpy_nodes.py` on CuPy arrays: same names, same arguments, on the GPU and the current stream.

`quantize` and `dequantize` give the same bytes, except that all NaNs of `dequantize` have the same bits. Gemms
accumulate in float32 and stay within `numpy_nodes.gemm_error_bound`. No function waits for the device. The first call
imports CuPy and compiles kernels (`build.py`), so run a shape once before you capture it into a CUDA graph.

Errors are the errors of `numpy_nodes.py`, and BackendError without CuPy or a GPU.

Not verified on hardware yet: see src/cuda/README.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mxfp8_ops import checks, contract, formats, numerics, op_options
from mxfp8_ops.cuda import device, dispatch, execution, loader, planner
from mxfp8_ops.cuda.execution import Queue
from mxfp8_ops.cuda.planner import CODES, Gemm
from mxfp8_ops.nodes.embedding import embedding_shape
from mxfp8_ops.nodes.gemm import product_shape
from mxfp8_ops.nodes.quantize import check_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


def quantize(
    x: Any,
    *,
    axis: int = -1,
    element_format: str = "e4m3",
    scale_rounding: str = "ceil",
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Returns (elements, scales) of `x` [..., K, ...], blocked along `axis`, as `numpy_nodes.quantize` does."""
    increment = formats.scale_increment(formats.element_format(element_format), scale_rounding)
    checks.check_value_dtype("quantize", x.dtype)
    axis = checks.normalize_axis("quantize", x.ndim, axis)
    cupy, shape = device.cupy_module(), checks.scale_shape(x.shape, axis)
    if out is None:
        elements, scales = cupy.empty(x.shape, np.uint8), cupy.empty(shape, np.uint8)
    else:
        elements, scales = check_out("quantize", out, x, shape, cupy)
    x = cupy.ascontiguousarray(x)
    # The request has only addresses, so `x`, `elements` and `scales` must live until the work is queued.
    request = planner.Quantize(
        CODES[x.dtype.name], CODES[element_format], increment, planner.PLAIN, x.data.ptr,
        *checks.split_at(x.shape, axis), elements.data.ptr, scales.data.ptr,
    )  # fmt: skip
    _run(request)
    return elements, scales


def dequantize(
    elements: Any, scales: Any, *, axis: int = -1, element_format: str = "e4m3", dtype: str = "float32"
) -> Any:
    """Returns the values of (elements, scales), as `numpy_nodes.dequantize` does."""
    formats.element_format(element_format)
    axis = checks.normalize_axis("dequantize", elements.ndim, axis)
    checks.check_codes("dequantize", elements, scales, axis)
    cupy = device.cupy_module()
    elements, scales = cupy.ascontiguousarray(elements), cupy.ascontiguousarray(scales)
    y = cupy.empty(elements.shape, numerics.value_dtype(dtype))
    request = planner.Dequantize(
        CODES[element_format], CODES[dtype], elements.data.ptr, scales.data.ptr,
        *checks.split_at(elements.shape, axis), y.data.ptr,
    )  # fmt: skip
    _run(request)
    return y


def embedding(indices: Any, b: Any, b_scales: Any, *, b_format: str = "e4m3", dtype: str = "float32") -> Any:
    """Returns dequantize(b)[indices]: rows of b [V, D] for indices [...], as `numpy_nodes.embedding` does.

    An index out of range gives a row of NaN, not an error: a check of the indices would have to wait for the device.
    """
    formats.element_format(b_format)
    y_dtype, shape = numerics.value_dtype(dtype), embedding_shape("embedding", indices, b.shape)
    checks.check_codes("embedding", b, b_scales, -1)
    cupy = device.cupy_module()
    indices, b, b_scales = (cupy.ascontiguousarray(t) for t in (indices, b, b_scales))
    y, (v, d) = cupy.empty(shape, y_dtype), b.shape
    code = contract.INT32 if indices.dtype == np.int32 else contract.INT64
    at = indices.data.ptr, b.data.ptr, b_scales.data.ptr
    _run(planner.Embedding(code, CODES[b_format], CODES[dtype], *at, indices.size, v, d, y.data.ptr))
    return y


def gemm(
    a: Any, a_scales: Any, b: Any, b_scales: Any, bias: Any | None = None, **options: Unpack[op_options.Gemm]
) -> Any:
    """Returns dequantize(a) @ dequantize(b).T + bias; a [..., M, K], b [..., N, K], as in `numpy_nodes.gemm`."""
    kinds = op_options.gemm(**options)
    formats.element_format(kinds[0])
    return _gemm((a, a_scales), (b, b_scales), bias, kinds)


def weight_gemm(
    x: Any, b: Any, b_scales: Any, bias: Any | None = None, **options: Unpack[op_options.WeightGemm]
) -> Any:
    """Returns x @ dequantize(b).T + bias; x [..., M, K], b [..., N, K], as in `numpy_nodes.weight_gemm`."""
    b_format, dtype, activation_dtype = op_options.weight_gemm(**options)
    checks.check_value_dtype("gemm", x.dtype)
    rounding = formats.activation_dtype(activation_dtype).onnx_dtype
    return _gemm((x,), (b, b_scales), bias, (x.dtype.name, b_format, dtype), rounding)


def _gemm(
    a: tuple[Any, ...], b: tuple[Any, Any], bias: Any | None, kinds: tuple[str, str, str], activation_dtype: int = 0
) -> Any:
    a_kind, b_format, dtype = kinds
    formats.element_format(b_format)
    shape = product_shape("gemm", a[0].shape, b[0].shape, None if bias is None else bias.shape)
    for operand in (a, b):
        if len(operand) == 2:
            checks.check_codes("gemm", *operand, -1)
    y_dtype = numerics.value_dtype(dtype)
    cupy, queue = device.cupy_module(), _queue()
    result = cupy.empty(shape, y_dtype)
    y = result[..., None, :] if a[0].ndim == 1 else result
    a = tuple(cupy.ascontiguousarray(t[None] if t.ndim == 1 else t) for t in a)
    b = cupy.ascontiguousarray(b[0]), cupy.ascontiguousarray(b[1])
    bias = None if bias is None else cupy.ascontiguousarray(bias, np.float32)
    n, k = b[0].shape[-2:]
    codes = CODES[a_kind], CODES[b_format], CODES[dtype]
    place = dispatch.place(queue.device)
    bias_at = 0 if bias is None else bias.data.ptr

    # With one weight for all rows, the leading dimensions of a are more rows of one product: b is decoded once.
    flat = b[0].ndim == 2
    leading, m = ((), math.prod(y.shape[:-1])) if flat else (y.shape[:-2], y.shape[-2])
    if not flat:
        a, b = (tuple(cupy.broadcast_to(t, leading + t.shape[-2:]) for t in operand) for operand in (a, b))
    for i in np.ndindex(leading if y.size else (0,)):
        operands = a[0][i].data.ptr, a[1][i].data.ptr if len(a) == 2 else 0, b[0][i].data.ptr, b[1][i].data.ptr
        product = Gemm(*codes, *operands, bias_at, y[i].data.ptr, m, n, k, activation_dtype=activation_dtype)
        execution.run(planner.gemm(place, product, queue.packed), queue)
    return result


def _run(request: tuple[int, ...]) -> None:
    queue = _queue()
    execution.run(planner.plan(request, queue.packed), queue)


def _queue() -> Queue:
    loader.connect()
    cupy = device.cupy_module()
    return Queue(device.device(cupy.cuda.runtime.getDevice()), cupy.cuda.get_current_stream().ptr, _allocate)


def _allocate(size: int) -> tuple[Any, int]:
    memory = device.cupy_module().empty(size, np.uint8)
    return memory, memory.data.ptr
