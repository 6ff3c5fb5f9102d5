"""Plans for CUDA that Python queues: kernels are loaded, work is queued in order, errors name the GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import cuda_driver_emulation
import ml_dtypes
import numpy as np
import pytest
from compare import heavy_tailed
from cuda_driver_emulation import Driver
from cuda_emulation import aligned, matrix, multiply
from cupy_stand_in import stand_in
from grids import looped

from mxfp8_ops import native, numerics
from mxfp8_ops.cuda import build, execution, loader, planner
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.cuda.execution import Queue
from mxfp8_ops.cuda.planner import Gemm, Place, Quantize
from mxfp8_ops.errors import BackendError, ShapeError

pytestmark = pytest.mark.cuda

STREAM = 7
SPLIT = Gemm(16, 17, 16, *[1 << 20] * 2, *[1 << 20] * 2, 0, 1 << 20, 1, 16, 65536)
"""A product whose K is split, so that it needs scratch memory."""
H200 = Place(90, 132, 0)

# --- on an emulated driver -------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Driver]:
    with cuda_driver_emulation.machine(monkeypatch, STREAM) as driver:
        loader.give(native.load())
        driver.start(STREAM, run=False, bounded=False)
        yield driver


def request(rows: int = 1) -> Quantize:
    return Quantize(1, 17, 0, planner.PLAIN, 1 << 20, rows, 32, 1, 1 << 20, 1 << 20)


def test_a_kernel_is_loaded_when_it_is_first_used(gpu):
    for rows in (1, 300):
        plan = planner.plan(request(rows), planner.queue(0, STREAM))
        assert (plan.done, plan.count) == (1, 1)
    assert gpu.loaded == ["quantize_rows<F32, E4M3, false>"]
    assert [(work.kernel, work.grid) for work in gpu.launches] == [(gpu.loaded[0], 1), (gpu.loaded[0], 3)]


def test_work_waits_for_scratch_memory_that_lives_until_the_last_step(gpu):
    freed: list[str] = []

    class Memory:
        def __init__(self, size: int) -> None:
            self.data = aligned(size)

        def __del__(self) -> None:
            freed.append(f"after {len(gpu.launches)} launches")

    def allocate(size: int) -> tuple[Memory, int]:
        memory = Memory(size)
        return memory, memory.data.ctypes.data

    plan = planner.gemm(H200, SPLIT, planner.queue(0, STREAM))
    assert (plan.done, plan.count, gpu.launches) == (0, 2, [])
    execution.run(plan, Queue(gpu, STREAM, allocate))
    assert [work.kernel.partition("<")[0] for work in gpu.launches] == ["gemm_skinny", "finish"]
    assert gpu.launches[0].parameters[5] == gpu.launches[1].parameters[0]
    assert freed == ["after 2 launches"]
    with pytest.raises(ShapeError, match=r"no scratch memory; expected \d+ bytes"):
        planner.proceed(planner.gemm(H200, SPLIT), planner.queue(0, STREAM))


def test_what_cannot_be_queued_is_an_error(gpu):
    first = planner.gemm(H200, SPLIT)
    planner.gemm(H200, SPLIT)
    with pytest.raises(ShapeError, match="not the latest plan of this thread; expected that one; plan again"):
        planner.proceed(first, planner.queue(0, STREAM, 1 << 30))
    with pytest.raises(BackendError, match=r"GPU 0: cannot launch: CUDA error CUDA_ERROR_INVALID_CONTEXT; expected"):
        planner.plan(request(), planner.queue(0, STREAM + 1))
    with pytest.raises(BackendError, match="GPU 3: no such device"):
        planner.plan(request(), planner.queue(3, STREAM))
    assert (gpu.launches, gpu.library.context_depth()) == ([], 0)


def test_without_onnx_runtime_there_is_no_cublas_of_its_provider(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # importing it would raise
    assert loader._cublas() == {}


# --- the device through CuPy -----------------------------------------------------------------------------------------


class Cublas(types.ModuleType):
    """CuPy's cuBLAS, and cuBLAS itself: GemmEx on host memory, column-major; bfloat16 operands.

    It has no gemmEx: CuPy's sets the stream itself, and raises NotImplementedError if that is being captured.
    """

    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT, CUBLAS_DEFAULT_MATH = 0, 1, 68, -1, 0

    def __init__(self) -> None:
        super().__init__("cublas")
        self.modes: list[int] = []
        self.stream, self.workspace, self.status = 0, (0, 0), 0

    def check_status(self, status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLAS status {status}")

    def cublasSetStream_v2(self, handle: int, stream: int) -> int:
        self.stream, self.workspace = stream, (0, 0)
        return 0

    def cublasSetWorkspace_v2(self, handle: int, address: int, size: int) -> int:
        self.workspace = address, size
        return 0

    def setMathMode(self, handle: int, mode: int) -> None:
        self.modes.append(mode)

    def cublasGemmEx(self, *arguments: Any) -> int:
        handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _ = arguments
        assert (handle, ta, tb, a_type, b_type, compute) == (77, 1, 0, 14, 14, 68)
        assert (matrix(alpha, np.float32, 1)[0], matrix(beta, np.float32, 1)[0], lda, ldb, ldc) == (1, 0, k, k, m)
        multiply(b, a, c, (n, m, k), "float32" if c_type == 0 else "bfloat16")  # column-major
        return self.status


@pytest.fixture
def cublas(monkeypatch) -> Cublas:
    cublas = Cublas()
    libraries: Any = types.ModuleType("cupy_backends.cuda.libs")
    libraries.cublas = cublas
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libraries)
    monkeypatch.setattr(cuda_device, "cupy_module", stand_in)
    return cublas


@looped("dtype", ["bfloat16", "float32"])
def test_cublas_is_called_for_x_times_w_transposed(monkeypatch, cublas, dtype):
    monkeypatch.setattr(cuda_device, "_cublas", lambda: cublas)
    x, w = (heavy_tailed(shape).astype(ml_dtypes.bfloat16) for shape in ((3, 40), (7, 40)))
    y, cublas.status = np.zeros((3, 7), numerics.value_dtype(dtype)), 0
    cublas.modes.clear()
    arguments, gpu = (x.ctypes.data, w.ctypes.data, y.ctypes.data, (3, 7, 40)), cuda_device.CudaDevice(0)
    work = Queue(gpu, 5, lambda size: (None, 4096))
    gpu.matmul_bf16(*arguments, dtype=dtype, queue=work)
    expected = (x.astype(np.float32) @ w.astype(np.float32).T).astype(y.dtype)
    np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), rtol=2**-7, atol=1e-4)
    assert (cublas.stream, cublas.workspace, cublas.modes) == (5, (4096, 32 << 20), [16, 0])
    cublas.status = 7
    with pytest.raises(RuntimeError, match="status 7"):
        gpu.matmul_bf16(*arguments, dtype=dtype, queue=work)
    assert cublas.modes == [16, 0, 16, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a loader that looks in what a library is linked with")
def test_cublas_is_the_one_that_cupy_is_linked_with(tmp_path, cublas):
    """Its functions get addresses and numbers whole."""
    sources = {
        "libcublas.so.13": """
            int cublasSetStream_v2(void* handle, void* stream) { return stream == (void*)0x123456789abc ? 3 : 4; }
            int cublasSetWorkspace_v2(void* handle, void* at, unsigned long size) { return size == 1ul << 33 ? 7 : 8; }
            int cublasGemmEx(void* handle, int a, int b, int m, int n, int k, void* one, void* x, int x_type, int ldx,
                             void* w, int w_type, int ldw, void* zero, void* y, int y_type, int ldy, int compute,
                             int algorithm) {
              return zero == (void*)0x123456789abc && algorithm == -1 ? 5 : 6;
            }""",
        "cublas.so": "",
    }
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    for name, source in sources.items():
        (tmp_path / "source.c").write_text(source)
        linked = [] if source else ["-Wl,--no-as-needed", str(tmp_path / "libcublas.so.13")]
        command = [compiler, "-shared", "-fPIC", str(tmp_path / "source.c"), *linked, "-o", str(tmp_path / name)]
        subprocess.run(command, check=True)
    cublas.__file__ = str(tmp_path / "cublas.so")
    library, far = cuda_device._cublas.__wrapped__(), 0x123456789ABC
    assert library.cublasSetStream_v2(far, far) == 3
    assert library.cublasSetWorkspace_v2(far, far, 1 << 33) == 7
    assert library.cublasGemmEx(far, 1, 0, 2, 2, 2, far, far, 14, 2, far, 14, 2, far, far, 0, 2, 68, -1) == 5


def test_a_kernel_is_loaded_once_and_kernels_of_a_node_compile_at_the_same_time(monkeypatch):
    both, loaded = threading.Barrier(2, timeout=30), []

    def cubin(source: str, kernel: str, arch: str) -> bytes:
        both.wait()  # raises unless the other kernel is being compiled too
        return f"{source}|{kernel}|{arch}".encode()

    module = types.SimpleNamespace(load=loaded.append, get_function=lambda name: types.SimpleNamespace(ptr=33))
    cupy = stand_in()
    cupy.cuda.function = types.SimpleNamespace(Module=lambda: module)
    monkeypatch.setattr(cuda_device, "cupy_module", lambda: cupy)
    monkeypatch.setattr(build, "cubin", cubin)
    monkeypatch.setattr(build, "entry", lambda code: "entry")
    gpu = cuda_device.CudaDevice(0)
    for _ in range(2):
        functions = gpu.functions(["finish<true>", "group_rows", "finish<true>"])
        assert [function.ptr for function in functions] == [33] * 3
    assert sorted(loaded) == [b"finish|finish<true>|sm_90a", b"group_rows|group_rows|sm_90a"]


def test_without_cupy_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match=r"CuPy cannot be imported.*mxfp8-graph\[cuda13\]'.*CPU kernels"):
        cuda_device.cupy_module.__wrapped__()
