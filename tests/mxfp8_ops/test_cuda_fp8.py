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

import gpu_start
import ml_dtypes
import numpy as np
import pytest
from compare import FORMATS, assert_within, heavy_tailed
from cuda_emulation import matrix
from cupy_stand_in import array, cupy, sources
from grids import looped, pairwise

from mxfp8_ops import cuda, numerics, numpy_nodes
from mxfp8_ops.cuda import cublaslt as cuda_lt
from mxfp8_ops.cuda import dispatch, execution, planner
from mxfp8_ops.errors import BackendError

torch = pytest.importorskip("torch")

torch_cuda = pytest.importorskip("mxfp8_ops.torch_ops.cuda")
import tensors  # noqa: E402
from scaled_mm_stand_in import emulated, on_a, wide_scales  # noqa: E402

__all__ = ["cupy", "emulated"]
pytestmark = pytest.mark.cuda

DTYPES = tuple(numerics.VALUE_DTYPES)
M, N, K = 70, 48, 160


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


# --- torch -----------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def forgetful(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_refused", set())
    monkeypatch.setattr(dispatch, "_warned", set())


def test_torch_takes_the_next_row_for_a_product_that_it_refuses(monkeypatch, emulated, forgetful):
    on = on_a(monkeypatch, (12, 0))
    codes, bias = operands()
    asked: list[Any] = []

    def refuses(*_args: Any, **_options: Any) -> Any:
        asked.append(1)
        raise RuntimeError("Invalid scaling configuration.\nmat_a ...")

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuses)
    arrays = [torch.from_numpy(each.copy()) for each in (*codes, bias)]
    words = r"refuses e4m3 times e4m3 -> float32, M = 70, N = 48, K = 160 \(Invalid scaling configuration\.\).*next row"
    with pytest.warns(UserWarning, match=words):
        y = torch_cuda.gemm(*arrays)
    check(tensors.array(y), codes, bias, "float32", "e4m3")
    torch_cuda.gemm(arrays[0][:66], arrays[1][:66], *arrays[2:])  # asks no more
    assert len(asked) == 1, "asked once for a weight, whatever M is"
    assert "dequantize" in sources(on)
    with dispatch.forced_route("block_scaled"), pytest.raises(BackendError, match="Invalid scaling configuration"):
        torch_cuda.gemm(*arrays[:2], torch.cat([arrays[2]] * 2), torch.cat([arrays[3]] * 2))


def test_a_lack_of_memory_is_no_refusal(monkeypatch, emulated, forgetful):
    on_a(monkeypatch, (10, 0))

    def full(*_args: Any, **_options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", full)
    with pytest.raises(torch.OutOfMemoryError):
        torch_cuda.gemm(*(torch.from_numpy(each.copy()) for each in operands()[0]))


def test_cupy_takes_the_next_row_for_a_product_that_cublaslt_refuses(monkeypatch, cublaslt, forgetful):
    on_a(monkeypatch, (12, 0))
    cublaslt.algorithms = 0
    codes, bias = operands()
    with pytest.warns(UserWarning, match=r"cuBLASLt 130100 refuses e4m3 times e4m3 -> float32, M = 70, N = 48"):
        y = cuda.gemm(*map(array, codes), array(bias))
    check(np.asarray(y), codes, bias, "float32", "e4m3")
    assert not cublaslt.calls


def test_nvmath_that_cannot_be_imported_is_a_refusal(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    with pytest.raises(execution.RefusedError, match="nvmath-python cannot be imported"):
        cuda_lt._cublaslt.__wrapped__()


def test_the_first_products_on_a_gpu_are_right_by_every_row(monkeypatch, emulated, capsys):
    on_a(monkeypatch, (10, 0))
    gpu_start.products("cpu")
    printed = capsys.readouterr().out
    assert printed.count("relative L2 difference from float64") == len(planner.routes()), printed
