"""Products on FP8 tensor cores for CuPy, with cuBLASLt: the row `block_scaled` of the dispatch table.

The calls use nvmath-python's bindings with addresses: nvmath's own matmul needs a float8 dtype, which CuPy lacks.

Not verified on hardware yet: see src/cuda/README.md.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mxfp8_ops.cuda import system
from mxfp8_ops.cuda.execution import Fp8Product, Queue, RefusedError
from mxfp8_ops.formats import DTYPES, FLOAT32

_WORKSPACE: Final = 32 << 20
"""Largest workspace for cuBLASLt in bytes, as NVIDIA recommends for Hopper and later."""

_lock = threading.Lock()
"""Held from the moment a plan gets the addresses of scales until its product is queued: threads share plans."""


def available() -> bool:
    """Returns whether nvmath-python is installed."""
    return importlib.util.find_spec("nvmath") is not None


@dataclass(frozen=True)
class _Plan:
    """The description of a product for cuBLASLt, without the addresses of its data."""

    description: int
    layouts: tuple[int, int, int]
    """The matrix layouts of b, x and y."""
    algorithm: Any
    workspace: int


def product(queue: Queue, index: int, p: Fp8Product) -> int:
    """Queues a product on device number `index`, which is current; returns the address of y.

    Raises:
        RefusedError: nvmath-python cannot be imported, or cuBLASLt cannot do the product.
    """
    lt = _cublaslt()
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    with _lock:
        plan = _plan(index, (p.m, p.n, p.k), (p.x_kind, p.b_kind, p.dtype))
        _point(plan.description, p.b_scales, p.x_scales)
        memory, workspace = queue.allocate(plan.workspace) if plan.workspace else (None, 0)
        b, x, y = plan.layouts
        lt.matmul(
            _handle(index), plan.description, one.ctypes.data, p.b, b, p.x, x, zero.ctypes.data, p.y, y, p.y, y,
            plan.algorithm.ctypes.data, workspace, plan.workspace, queue.stream,
        )  # fmt: skip
    del memory  # alive until the product is queued
    return p.y


@functools.lru_cache(maxsize=4096)  # a bound, because M may vary from call to call; a plan has some hundred bytes
def _plan(index: int, sizes: tuple[int, int, int], types: tuple[str, str, str]) -> _Plan:
    """Returns the plan of a product, with addresses of scales that the caller must replace."""
    lt = _cublaslt()
    m, n, k = sizes
    x_type, b_type, y_type = (DTYPES[name].cuda_data_type for name in types)
    # cuBLAS is column-major: y^T [N, M] = b [N, K] x^T, where our row-major b is its transposed first operand.
    description = _describe()
    layouts = tuple(
        lt.matrix_layout_create(kind, rows, columns, rows)
        for kind, rows, columns in ((b_type, k, n), (x_type, k, m), (y_type, n, m))
    )
    preference, names = lt.matmul_preference_create(), lt.MatmulPreferenceAttribute
    _set(lt.matmul_preference_set_attribute, preference, names.MAX_WORKSPACE_BYTES, _WORKSPACE, np.uint64)
    for letter in "ABCD":  # 16 bytes: a view of a larger array need not have the default alignment of 256
        _set(lt.matmul_preference_set_attribute, preference, names[f"MIN_ALIGNMENT_{letter}_BYTES"], 16, np.uint32)
    _point(description, 1 << 20, 1 << 20)  # the heuristic needs an address; `product` sets the real ones
    result, count = lt.MatmulHeuristicResult(1), np.zeros(1, np.int32)
    try:
        lt.matmul_algo_get_heuristic(
            _handle(index), description, *layouts, layouts[2], preference, 1, result.ptr, count.ctypes.data
        )
    except lt.cuBLASLtError as error:
        raise _refused(sizes, types, str(error)) from error
    finally:
        lt.matmul_preference_destroy(preference)
    if not count[0]:
        raise _refused(sizes, types, "no algorithm")
    size = int(np.asarray(result.workspace_size).reshape(-1)[0])
    return _Plan(description, (layouts[0], layouts[1], layouts[2]), np.array(result.algo), size)


def _describe() -> int:
    lt = _cublaslt()
    names = lt.MatmulDescAttribute
    description: int = lt.matmul_desc_create(68, FLOAT32.cuda_data_type)  # CUBLAS_COMPUTE_32F
    set_ = functools.partial(_set, lt.matmul_desc_set_attribute, description)
    set_(names.TRANSA, 1, np.int32)
    scale = int(lt.MatmulMatrixScale.VEC32_UE8M0)
    set_(names.A_SCALE_MODE, scale, np.int32)
    set_(names.B_SCALE_MODE, scale, np.int32)
    return description


def _point(description: int, b_scales: int, x_scales: int) -> None:
    """Sets the addresses of the scales."""
    lt = _cublaslt()
    names = lt.MatmulDescAttribute
    for name, address in ((names.A_SCALE_POINTER, b_scales), (names.B_SCALE_POINTER, x_scales)):
        _set(lt.matmul_desc_set_attribute, description, name, address, np.int64)


def _set(function: Any, of: int, name: Any, value: int, dtype: Any) -> None:
    buffer = np.array([value], dtype)
    function(of, int(name), buffer.ctypes.data, buffer.nbytes)


def _refused(sizes: tuple[int, int, int], types: tuple[str, str, str], why: str) -> RefusedError:
    return RefusedError.of(f"cuBLASLt {_cublaslt().get_version()}", types, sizes, why, advice="upgrade nvidia-cublas")


@functools.cache
def _handle(index: int) -> int:
    handle: int = _cublaslt().create()  # belongs to the current device, which is `index`
    return handle


@functools.cache
def _cublaslt() -> Any:
    try:
        from nvmath.bindings import cublasLt
    except ImportError as error:
        raise RefusedError(
            "cuda",
            f"nvmath-python cannot be imported ({error})",
            expected="nvmath-python for FP8 tensor cores",
            advice=system.INSTALL,
        ) from error
    return cublasLt
