"""Launches kernels of every source on small CuPy arrays: what compute-sanitizer watches. No torch, no other library."""

from __future__ import annotations

import itertools

import cupy
import numpy as np
from grouped_request import Grouped

from mxfp8_ops import cuda
from mxfp8_ops.cuda import dispatch, execution, planner
from mxfp8_ops.cuda.cupy_arrays import _queue


def values(*shape: int) -> cupy.ndarray:
    return cupy.asarray(np.random.default_rng(sum(shape)).standard_t(2, shape).astype(np.float32))


def grouped(b: tuple[cupy.ndarray, cupy.ndarray], experts: cupy.ndarray) -> None:
    """One row of each, with an expert each; one has none, and one a wrong index."""
    (count, n, k), rows = b[0].shape, experts.size
    x, y = values(rows, k), cupy.empty((rows, n), np.float32)
    strides = {"outer": 1, "middle": 1, "inner": rows, "x_inner": 1, "e_inner": 1}
    at = {"x": x.data.ptr, "b": b[0].data.ptr, "b_scales": b[1].data.ptr, "experts": experts.data.ptr, "y": y.data.ptr}
    sizes = {"x_rows": rows, "indices": rows, "count": count, "n": n, "k": k}
    plan = planner.plan(Grouped(1, 17, 1, 1, **at, **sizes, **strides))
    execution.run(plan, _queue())


def main() -> None:
    # Each array in memory of its own and of its own size: in CuPy's pool, memcheck takes an overrun for a neighbour.
    cupy.cuda.set_allocator(None)
    for shape in ((65, 544), (37, 50)):
        x = values(*shape)
        for dtype, axis in itertools.product((np.float32, np.float16), (0, 1)):
            cuda.dequantize(*cuda.quantize(x.astype(dtype), axis=axis), axis=axis)
        for index_dtype in (np.int32, np.int64):
            cuda.embedding(cupy.asarray(np.array([0, -1, shape[0]], index_dtype)), *cuda.quantize(x), dtype="float16")
        rows, row_scales, columns, column_scales = (cupy.empty(x.size, np.uint8) for _ in range(4))
        at = (t.data.ptr for t in (columns, column_scales, rows, row_scales))
        request = planner.Quantize(1, 17, 0x1FFFFF, planner.TRANSPOSED, x.data.ptr, 1, *shape, *at)
        execution.run(planner.plan(request), _queue())
    for n, k in ((150, 544), (40, 8224)):  # the second: with K split
        b = cuda.quantize(values(n, k))
        layout = cupy.empty(planner.swizzled_bytes(n, k), np.uint8)
        arguments = (b[1].data.ptr, layout.data.ptr, *b[1].shape)
        _queue().device.functions(["swizzle_scales"])[0]((-(-layout.size // 4096),), (256,), arguments)
        for m in (3, 16, 25, 64):
            cuda.gemm(*cuda.quantize(values(m, k)), *b)
        with dispatch.forced_route("large"):
            cuda.gemm(*cuda.quantize(values(70, k)), *b, values(n), dtype="float16")
        for m in (5, 70):
            cuda.weight_gemm(values(m, k), *b)
            cuda.weight_gemm(values(m, k).astype(np.float16), *b)
            cuda.weight_gemm(values(m, k), *b, activation_dtype="bfloat16")
        for k_of_rows in (k, k - 1):  # the second is no whole number of blocks
            grouped(cuda.quantize(values(3, n, k_of_rows)), cupy.asarray(np.array([2, 0, 3, -1, 9])))
        with dispatch.forced_route("float32"):
            cuda.weight_gemm(values(5, k), *b)
    cupy.cuda.runtime.deviceSynchronize()
    print("launched every kernel")


if __name__ == "__main__":
    main()
