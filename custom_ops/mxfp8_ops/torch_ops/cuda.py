"""The torch ops on CUDA devices: the planner's kernels on tensors' own memory, on torch's current stream.

The ops copy only strided inputs and do not wait for the device, so CUDA graphs can capture them once each shape has run
(kernels compile and load on first use). Memory comes from torch's allocator.

Results, shapes and errors are as in quantize.py and gemm.py, which check the operands. Two more errors: ShapeError if
tensors are on several devices, and BackendError if there is no CuPy or the GPU is too old.

Not verified on hardware yet: see src/cuda/README.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxfp8_ops import formats
from mxfp8_ops.checks import scale_shape, split_at
from mxfp8_ops.cuda import device, dispatch, execution, loader, planner
from mxfp8_ops.cuda.execution import Queue, WideWeight
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.torch_ops.conv import composed
from mxfp8_ops.torch_ops.embedding import check_embedding, picked
from mxfp8_ops.torch_ops.gemm import gemm_options, gemm_shape, weight_gemm_options
from mxfp8_ops.torch_ops.operands import (
    DTYPE_CODES,
    FORMAT_CODES,
    Pair,
    check_codes,
    check_devices,
    check_memory,
    readable,
)
from mxfp8_ops.torch_ops.products import products
from mxfp8_ops.torch_ops.quantize import check_both, check_dequantize, check_quantize


class _Kept(NamedTuple):
    """A weight that `keep_wide` keeps. As `b` stays alive, no other tensor gets its addresses."""

    b: Pair
    versions: tuple[int, int]
    wide: WideWeight


_kept: dict[tuple[int, int, torch.Size, int], _Kept] = {}
"""Weights kept in bfloat16 too, by address, shape and the code of the format."""

_INCREMENTS = {
    (row.onnx_dtype, i): formats.scale_increment(row, rounding)
    for row in formats.ELEMENT_FORMATS.values()
    for i, rounding in enumerate(formats.SCALE_ROUNDINGS)
}


def quantize(x: Tensor, *args: Any) -> Pair:
    """Returns (elements, scales) of `x` [..., K, ...], as `numpy_nodes.quantize` does, bit for bit."""
    _, axis, *codes = check_quantize(x, *args)
    check_memory("quantize", "x", x)
    # The kernel reads x.t() of a contiguous matrix in place, and writes the codes in the order of x.
    transposed = x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous()
    if transposed and axis == 0:
        # Blocks are contiguous in memory: quantize the transpose, then transpose bytes instead of values.
        elements, scales = quantize(x.t(), 1, *args[1:])
        return elements.t().contiguous(), scales.t().contiguous()
    results = _empty(x, axis)
    x = x.t() if transposed else x.contiguous()
    layout = planner.TRANSPOSED if transposed else planner.PLAIN
    _quantize(x, codes, layout, split_at(x.shape, 0 if transposed else axis), *results)
    return results


def quantize_both(x: Tensor, *args: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the elements and scales of quantize(x) and of quantize(x.t()), for a matrix, which is read once."""
    check_both(x, *args)
    (x,) = _readable("quantize_both", "x", x)
    rows, columns = _empty(x, 1), _empty(x.t(), 1)
    _, _, *codes = check_quantize(x, -1, *args)
    _quantize(x, codes, planner.TRANSPOSED, (1, *x.shape), *columns, *rows)
    return *rows, *columns


def dequantize(elements: Tensor, scales: Tensor, *args: Any) -> Tensor:
    """Returns the values of (elements, scales), in float32 by default."""
    check_devices("dequantize", elements, scales)
    shape, axis, dtype, element_code = check_dequantize(elements, scales, *args)
    elements, scales = _readable("dequantize", "elements scales", elements, scales)
    y = torch.empty(shape, dtype=dtype, device=elements.device)
    request = planner.Dequantize(
        element_code, DTYPE_CODES[dtype], elements.data_ptr(), scales.data_ptr(), *split_at(shape, axis),
        y.data_ptr(),
    )  # fmt: skip
    queue = _queue(elements)
    execution.run(planner.plan(request, queue.packed), queue)
    return y


def gemm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    """Returns dequantize(a) @ dequantize(b).T + bias, in float32 by default."""
    options = (*gemm_options(*rest, **named), 0)
    return _gemm((a, a_scales), (b, b_scales), bias, gemm_shape("gemm", a, a_scales, b, b_scales, bias), options)


def weight_gemm(x: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
    """Returns x @ dequantize(b).T + bias, in the dtype of `x` by default."""
    options = weight_gemm_options(x.dtype, *rest, **named)
    return _gemm((x,), (b, b_scales), bias, gemm_shape("weight_gemm", x, None, b, b_scales, bias), options)


def embedding(indices: Tensor, b: Tensor, b_scales: Tensor, b_format: str = "e4m3", *args: Any) -> Tensor:
    """Returns the rows of b [V, D] at `indices`. The device reports an index outside of the table later."""
    check_devices("embedding", indices, b, b_scales)
    _, dtype, _ = check_embedding(indices, b, b_scales, b_format, *args)
    for name, tensor in (("indices", indices), ("b", b), ("b_scales", b_scales)):
        check_memory("embedding", name, tensor)
    return picked(indices, b, b_scales, b_format, dtype)


def conv(x: Tensor, b: Tensor, b_scales: Tensor, *args: Any) -> Tensor:
    """Returns the convolution by torch's own, in float32: there is no kernel for codes."""
    return composed(x, b, b_scales, *args)


def keep_wide(b: Tensor, b_scales: Tensor, b_format: str = "e4m3") -> None:
    """Keeps the weight [N, K] in bfloat16 too, so that products with many rows need not dequantize it each time.

    The copy takes twice the memory of float8, until `forget_kept`. If a weight changes in place, each product
    dequantizes it again; torch does not track changes of tensors from inference mode, so do not change them. The work
    is queued on torch's current stream: as for any tensor, another stream has to wait for it before it uses the weight.

    Raises:
        ShapeError: not a contiguous matrix, or the scales do not fit.
    """
    check_codes("keep_wide", b, b_scales, -1)
    if b.dim() != 2 or not (b.is_contiguous() and b_scales.is_contiguous()):
        raise ShapeError(
            "keep_wide", f"weight {tuple(b.shape)}", expected="a contiguous matrix", advice="pass .contiguous()"
        )
    at = b.data_ptr(), b_scales.data_ptr()
    wide = execution.wide_weight(_queue(b), b_format, at, (*b.shape,))
    _kept[(*at, b.shape, FORMAT_CODES[b_format])] = _Kept((b, b_scales), _versions((b, b_scales)), wide)


def forget_kept() -> None:
    """Frees the weights of `keep_wide`. At the call, only the streams that made them may still read them."""
    _kept.clear()


def _find(b: Pair, b_code: int) -> _Kept | None:
    entry = _kept.get((b[0].data_ptr(), b[1].data_ptr(), b[0].shape, b_code))
    return entry if entry is not None and entry.versions == _versions(b) else None


def _gemm(
    a: Sequence[Tensor], b: Pair, bias: Tensor | None, shape: Sequence[int], options: tuple[torch.dtype, int, int, int]
) -> Tensor:
    """Returns y of `shape`, [..., M, N] (or [N]); `options` are the result of `weight_gemm_options`."""
    dtype, a_code, b_code, activation_code = options
    check_devices("gemm", *a, *b, bias)
    quantized, matrix = len(a) == 2, b[0].dim() == 2
    *a, elements, scales = _readable("gemm", "a a_scales b b_scales" if quantized else "x b b_scales", *a, *b)
    b, n, k = (elements, scales), shape[-1], a[0].shape[-1]
    codes, bias_at = (a_code, b_code, DTYPE_CODES[dtype]), 0
    if bias is not None:
        (bias,) = _readable("gemm", "bias", bias)
        bias_at = bias.data_ptr()
    y = torch.empty(shape, dtype=dtype, device=elements.device)
    # keep_wide keeps matrices; a stack of weights is never among them.
    kept = _find(b, b_code) if _kept and matrix else None
    wide = kept.wide[:2] if kept else (0, 0)
    queue = _queue(elements)
    place = dispatch.place(queue.device)
    # Without scales of a, any address takes their place.
    for m, x, x_scales, w, w_scales, to in products(y, a[0], a[-1], *b):
        operands = x, x_scales if quantized else 0, w, w_scales, bias_at, to
        # The fields of a Gemm: to make one takes longer than to plan.
        execution.run(planner.gemm(place, (*codes, *operands, m, n, k, *wide, activation_code, 0), queue.packed), queue)
    return y


def _readable(where: str, operands: str, *tensors: Tensor) -> Sequence[Tensor]:
    """Returns the result of `operands.readable`: the usual case first, in as few steps as Python allows."""
    for t in tensors:
        if not t.is_contiguous() or t.storage_offset() or t.untyped_storage().nbytes() < t.nbytes:
            return readable(where, operands, *tensors)
    return tensors


def _empty(x: Tensor, axis: int) -> Pair:
    """Returns empty (elements, scales) for `x`."""
    elements = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return elements, elements.new_empty(scale_shape(x.shape, axis))


def _quantize(x: Tensor, codes: list[int], layout: int, sizes: tuple[int, int, int], *results: Tensor) -> None:
    """Queues the quantization of `x`, which is [outer, K, inner] in memory, into `results`."""
    dtype, element_code, rounding = codes
    increment, at = _INCREMENTS[element_code, rounding], [t.data_ptr() for t in results]
    request = planner.Quantize(dtype, element_code, increment, layout, x.data_ptr(), *sizes, *at)
    queue = _queue(x)
    execution.run(planner.plan(request, queue.packed), queue)


def _versions(b: Pair) -> tuple[int, int]:
    """Returns numbers that change with the tensors' contents."""
    # Tensors from inference mode have no version: a read of it raises an error.
    first, second = (-1 if t.is_inference() else t._version for t in b)
    return first, second


def _queue(x: Tensor) -> Queue:
    """Returns torch's current stream on the device of `x`."""
    index = x.get_device()
    return _queue_on(index, _stream(index))


# torch reuses its streams: there are 65 a device at most.
@functools.lru_cache(maxsize=512)
def _queue_on(index: int, stream: int) -> Queue:
    loader.connect()
    return Queue(device.device(index), stream, lambda size: _allocate(size, index))


# The address alone: torch.cuda.current_stream makes an object, which takes 2 us. Inductor's code calls this one too.
_stream: Any = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def _allocate(size: int, index: int) -> tuple[Any, int]:
    # torch's caching allocator: it knows the stream, and memory of a captured graph stays with the graph.
    memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
    return memory, memory.data_ptr()
