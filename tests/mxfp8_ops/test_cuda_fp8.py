"""Products on FP8 tensor cores without a GPU: what torch's scaled_mm and cuBLASLt are asked for, and the way there.

Both libraries are stand-ins that check their arguments and compute in float64. torch's own checks run too, on fake
tensors that claim to be on a CUDA device.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import FORMATS, assert_same, assert_within, heavy_tailed
from cuda_emulation import EmulatedDevice, device, matrix, queue, swizzle
from grids import looped, pairwise
from test_cuda_frontends import array, cupy, sources

from mxfp8_ops import checks, cuda, numerics, numpy_nodes
from mxfp8_ops.cuda import cublaslt as cuda_lt
from mxfp8_ops.cuda.execution import Queue
from mxfp8_ops.errors import BackendError

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

torch_cuda = pytest.importorskip("mxfp8_ops.torch_ops.cuda")
import tensors  # noqa: E402

__all__ = ["cupy"]
pytestmark = pytest.mark.cuda

DTYPES = tuple(numerics.VALUE_DTYPES)
M, N, K = 70, 48, 160


def on_a(monkeypatch, capability: tuple[int, int]) -> EmulatedDevice:
    on = device()
    monkeypatch.setattr(on, "capability", capability)
    on.launched.clear()
    return on


def operands(x_format: str = "e4m3") -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the codes of x [M, K] and w [N, K], and a bias [N]; some blocks are NaN, zero or much smaller."""
    x, w = heavy_tailed((M, K)), heavy_tailed((N, K), 1)
    x[3, 32:64], w[5, :32], x[4] = x[3, 32:64] * 2.0**-12, 0, 0
    codes = [*numpy_nodes.quantize(x, element_format=x_format), *numpy_nodes.quantize(w)]
    codes[1][7, 2] = 255
    return codes, heavy_tailed((N,), 2)


def check(got: np.ndarray, codes: list[np.ndarray], bias: np.ndarray | None, dtype: str, x_format: str) -> None:
    x, w = numpy_nodes.dequantize(*codes[:2], element_format=x_format), numpy_nodes.dequantize(*codes[2:])
    y = x.astype(np.float64) @ w.astype(np.float64).T + (0 if bias is None else bias)
    assert_within(got, y, numpy_nodes.gemm_error_bound(x, w, dtype, bias), "product")


def wide_scales(layout: np.ndarray, rows: int, k: int) -> np.ndarray:
    """Returns the values of scales in the layout of Blackwell, one for each of [rows, k] elements."""
    blocks = checks.scale_count(k)
    every = layout.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
    scales = np.ascontiguousarray(every.reshape(-(-rows // 128) * 128, -1)[:rows, :blocks])
    assert_same(layout, swizzle(scales), "layout")
    return np.repeat(numerics.decode_scale(scales), 32, 1)[:, :k]


# --- torch -----------------------------------------------------------------------------------------------------------

OLDER, SCALED_MM = torch._scaled_mm, torch.nn.functional.scaled_mm


def scaled_mm(  # noqa: PLR0917 - as torch has it
    mat_a: Any, mat_b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any, *swizzles: Any, **options: Any
) -> Any:
    """torch.nn.functional.scaled_mm in float64, after torch's own checks of a CUDA call with these arguments."""
    if {mat_a.dtype, mat_b.dtype} != {torch.float8_e4m3fn}:
        raise ValueError("Invalid scaling configuration")  # as check_mxfp8_recipe, which fake tensors do not reach
    assert swizzles
    assert not options["use_fast_accum"]
    with FakeTensorMode():
        a, b, scales, b_scales = on_cuda(mat_a, mat_b, scale_a, scale_b)
        y = SCALED_MM(a, b, scales, recipe_a, b_scales, recipe_b, *swizzles, **options)
        assert y.shape == (mat_a.shape[0], mat_b.shape[1])
    return block_scaled(mat_a, mat_b, scale_a, scale_b).to(options["output_dtype"])


def older_scaled_mm(mat_a: Any, mat_b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any) -> Any:
    """torch._scaled_mm of blocks in float64, after torch's own checks of a CUDA call with these arguments."""
    if mat_a.dtype == mat_b.dtype == torch.float8_e5m2:
        raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
    with FakeTensorMode():
        a, b, scales, b_scales = on_cuda(mat_a, mat_b, scale_a, scale_b)
        y = OLDER(a, b, scale_a=scales, scale_b=b_scales, out_dtype=out_dtype)
        assert (y.shape, y.dtype) == ((mat_a.shape[0], mat_b.shape[1]), out_dtype)
    return block_scaled(mat_a, mat_b, scale_a, scale_b).to(out_dtype)


def on_cuda(*arrays: Any) -> list[Any]:
    """Returns fake tensors like these on a CUDA device."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0") for t in arrays]


def block_scaled(mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any) -> Any:
    """Returns the float32 product of elements with swizzled scales."""
    x, w = mat_a.double(), mat_b.t().double()
    for t, scale in ((x, scale_a), (w, scale_b)):
        t.mul_(torch.from_numpy(wide_scales(scale.view(torch.uint8).numpy(), *t.shape)))
    return (x @ w.t()).float()


@pytest.fixture
def emulated(monkeypatch) -> None:
    def allocate(size: int) -> tuple[Any, int]:
        memory = torch.empty(size, dtype=torch.uint8)
        return memory, memory.data_ptr()

    monkeypatch.setattr(torch_cuda, "_queue", lambda x: Queue(queue().device, 0, allocate))
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", older_scaled_mm)


@looped("dtype, with_bias, x_format", pairwise(dtype=DTYPES, bias=[False, True], x=FORMATS))
def test_torch_block_scaled_products_on_blackwell(monkeypatch, emulated, dtype, with_bias, x_format):
    on = on_a(monkeypatch, (10, 0))
    codes, bias = operands(x_format)
    bias = bias if with_bias else None
    a, a_scales, *rest = (torch.from_numpy(each.copy()) for each in (*codes, *([] if bias is None else [bias])))
    options = {"a_format": x_format, "dtype": getattr(torch, dtype)}
    y = torch_cuda.gemm(a.view(2, 35, -1), a_scales.view(2, 35, -1), *rest, **options)
    direct = bias is None and dtype != "float16"
    assert sources(on) == ["swizzle_scales", "swizzle_scales", *([] if direct else ["finish"])]
    assert (y.shape, y.dtype) == ((2, 35, N), options["dtype"])
    check(tensors.array(y.view(M, N)), codes, bias, dtype, x_format)


def test_torch_batched_and_weight_only_products_are_exact_everywhere(monkeypatch, emulated):
    on = on_a(monkeypatch, (10, 0))
    *a, b, b_scales = (torch.from_numpy(each) for each in operands()[0])
    torch_cuda.weight_gemm(torch.ones(M, K, dtype=torch.bfloat16), b, b_scales)
    torch_cuda.gemm(*a, b[None], b_scales[None])
    assert "swizzle_scales" not in sources(on)


# --- CuPy ------------------------------------------------------------------------------------------------------------


class Names(dict):
    MAX_WORKSPACE_BYTES = 1


class CublasLt(types.ModuleType):
    """nvmath.bindings.cublasLt on host memory: descriptors as dictionaries, matmul in float64, column-major."""

    cuBLASLtError = RuntimeError  # noqa: N815 - nvmath's name
    MatmulDescAttribute = types.SimpleNamespace(
        TRANSA=3, A_SCALE_POINTER=17, B_SCALE_POINTER=18, A_SCALE_MODE=31, B_SCALE_MODE=32
    )
    MatmulMatrixScale = types.SimpleNamespace(VEC32_UE8M0=2)
    MatmulPreferenceAttribute = Names({f"MIN_ALIGNMENT_{c}_BYTES": 5 + i for i, c in enumerate("ABCD")})
    BYTES = types.MappingProxyType({3: 4, 17: 8, 18: 8, 31: 4, 32: 4})
    algorithms = 1

    def __init__(self) -> None:
        super().__init__("nvmath.bindings.cublasLt")
        self.forget()

    def forget(self) -> None:
        """Forgets every object and call, here and in the caches of the product."""
        self.objects: list[Any] = [None]
        self.preferences: dict[int, int] = {}
        self.calls: list[dict[str, Any]] = []
        cuda_lt._plan.cache_clear()
        cuda_lt._handle.cache_clear()

    def make(self, thing: Any) -> int:
        self.objects.append(thing)
        return len(self.objects) - 1

    def get_version(self) -> int:
        return 130100

    def create(self) -> int:
        return self.make("handle")

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self.make({})

    def matmul_desc_set_attribute(self, of: int, name: int, buffer: int, size: int) -> None:
        assert size == self.BYTES[name]
        self.objects[of][name] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def matrix_layout_create(self, kind: int, rows: int, columns: int, ld: int) -> int:
        assert ld == rows
        return self.make((kind, rows, columns))

    def matmul_preference_create(self) -> int:
        return self.make("preference")

    def matmul_preference_destroy(self, preference: int) -> None:
        assert self.objects[preference] == "preference"
        self.objects[preference] = None

    def matmul_preference_set_attribute(self, of: int, name: int, buffer: int, size: int) -> None:
        assert size == (8 if name == 1 else 4)
        self.preferences[name] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    class MatmulHeuristicResult:
        def __init__(self, count: int) -> None:
            self.algo, self.workspace_size, self.ptr = np.zeros(64, np.uint8), np.array([1024]), 99

    def matmul_algo_get_heuristic(self, handle, of, a, b, c, d, preference, count, results, returned):  # noqa: PLR0917
        assert (self.objects[handle], self.objects[preference], c, results) == ("handle", "preference", d, 99)
        ctypes.c_int32.from_address(returned).value = self.algorithms

    def matmul(self, handle, of, alpha, a, al, b, bl, beta, c, cl, d, dl, algo, workspace, size, stream):  # noqa: PLR0917
        assert (self.objects[handle], c, cl, size) == ("handle", d, dl, 1024)
        assert workspace
        assert (matrix(alpha, np.float32, 1)[0], matrix(beta, np.float32, 1)[0]) == (1, 0)
        description = self.objects[of]
        self.calls.append(description)
        assert description[3] == 1  # a is transposed, b is not
        (a_type, k, n), (b_type, bk, m), (d_type, dn, dm) = (self.objects[layout] for layout in (al, bl, dl))
        assert (k, n, m) == (bk, dn, dm)
        factors = []
        for address, kind, columns, mode, at in ((a, a_type, n, 31, 17), (b, b_type, m, 32, 18)):
            assert description[mode] == 2
            dtype = {28: ml_dtypes.float8_e4m3fn, 29: ml_dtypes.float8_e5m2}[kind]
            scales = matrix(description[at], np.uint8, -(-columns // 128) * 128 * (-(-k // 128) * 4))
            factors.append(matrix(address, dtype, columns, k).astype(np.float64) * wide_scales(scales, columns, k))
        y = (factors[1] @ factors[0].T).astype(np.float32)
        y = y.astype({0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}[d_type])
        ctypes.memmove(d, y.ctypes.data, y.nbytes)


@pytest.fixture
def cublaslt(monkeypatch, cupy) -> Iterator[CublasLt]:
    lt = CublasLt()
    monkeypatch.setattr(cuda_lt, "_cublaslt", lambda: lt)
    monkeypatch.setattr(cuda_lt, "available", lambda: True)
    yield lt
    lt.forget()


@looped("dtype, with_bias, x_format", pairwise(dtype=DTYPES, bias=[False, True], x=FORMATS))
def test_cupy_block_scaled_products_on_blackwell(monkeypatch, cublaslt, dtype, with_bias, x_format):
    on = on_a(monkeypatch, (12, 0))
    cublaslt.forget()
    codes, bias = operands(x_format)
    bias = bias if with_bias else None
    for _ in range(2):
        on.launched.clear()
        y = cuda.gemm(*map(array, codes), None if bias is None else array(bias), a_format=x_format, dtype=dtype)
        assert sources(on) == ["swizzle_scales", "swizzle_scales", *([] if bias is None else ["finish"])]
        check(np.asarray(y), codes, bias, dtype, x_format)
    assert len(cublaslt.calls) == 2
    assert sum(isinstance(thing, dict) for thing in cublaslt.objects) == 1  # planned once
    assert cublaslt.preferences == {1: 32 << 20, 5: 16, 6: 16, 7: 16, 8: 16}


def test_nvmath_that_cannot_be_imported_or_refuses_is_an_error(monkeypatch, cublaslt):
    on_a(monkeypatch, (12, 0))
    cublaslt.algorithms = 0
    with pytest.raises(BackendError, match=r"cuBLASLt 130100 refuses e4m3 times e4m3 -> float32, M = 70, N = 48"):
        cuda.gemm(*map(array, operands()[0]))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    with pytest.raises(BackendError, match="nvmath-python cannot be imported"):
        cuda_lt._cublaslt.__wrapped__()
