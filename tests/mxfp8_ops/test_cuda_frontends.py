"""`cuda` (CuPy arrays) and `torch_cuda` (tensors) without a GPU: a stand-in for CuPy, emulated kernels behind both."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same, assert_within, heavy_tailed
from cuda_emulation import FORMATS, EmulatedDevice, allocate, device, matrix, multiply, queue
from grids import looped

from mxfp8_ops import cuda, numerics, numpy_nodes
from mxfp8_ops.checks import dtype_name
from mxfp8_ops.cuda import build, loader
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.cuda.execution import Queue
from mxfp8_ops.errors import BackendError, ShapeError

torch = pytest.importorskip("torch")
torch_training = pytest.importorskip("mxfp8_ops.torch_ops.training")
torch_cuda = pytest.importorskip("mxfp8_ops.torch_ops.cuda")
pytest.importorskip("mxfp8_ops.torch_ops")

DTYPES = tuple(numerics.VALUE_DTYPES)


# --- a CuPy on host memory -------------------------------------------------------------------------------------------


class Array(np.ndarray):
    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)


def array(x: Any) -> Array:
    return np.asarray(x).view(Array)


def stand_in() -> types.SimpleNamespace:
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda index: {"major": 9, "minor": 0, "multiProcessorCount": 3, "name": b"stand-in"},
        runtimeGetVersion=lambda: 13020,
        CUDARuntimeError=OSError,
        CUDA_R_16BF=14,
        CUDA_R_32F=0,
    )
    return types.SimpleNamespace(
        ndarray=Array,
        may_share_memory=np.may_share_memory,
        empty=lambda shape, dtype: array(np.empty(shape, dtype)),
        zeros=lambda shape, dtype: array(np.zeros(shape, dtype)),
        ascontiguousarray=lambda x, dtype=None: array(np.ascontiguousarray(x, dtype)),
        broadcast_to=lambda x, shape: np.broadcast_to(x, shape, subok=True),
        cuda=types.SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda: types.SimpleNamespace(ptr=0),
            device=types.SimpleNamespace(get_cublas_handle=lambda: 77),
            set_allocator=lambda allocator: None,
        ),
    )


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setattr(cuda_device, "cupy_module", stand_in)
    monkeypatch.setattr(cuda_device, "device", lambda index: device())
    monkeypatch.setattr(loader, "connect", device().connect)


def test_cupy_quantize_and_dequantize(cupy):
    for dtype, fmt, rounding in itertools.product(DTYPES, FORMATS, ("ceil", "floor")):
        options = {"element_format": fmt, "scale_rounding": rounding}
        for shape, axis in (((5, 96), -1), ((3, 40, 48), 1), ((37,), 0), ((0, 64), -1), ((4, 0), 1)):
            x = heavy_tailed(shape).astype(numerics.value_dtype(dtype))
            got, expected = cuda.quantize(array(x), axis=axis, **options), numpy_nodes.quantize(x, axis=axis, **options)
            for name, a, b in zip(("elements", "scales"), got, expected, strict=True):
                assert_same(np.asarray(a), b, name)
            values = cuda.dequantize(*got, axis=axis, element_format=fmt, dtype=dtype)
            assert_same(
                np.asarray(values),
                numpy_nodes.dequantize(*expected, axis=axis, element_format=fmt, dtype=dtype),
                "values",
            )


def test_cupy_quantizes_into_the_callers_arrays(cupy):
    x = array(heavy_tailed((130, 160)))
    expected = cuda.quantize(x)
    out = tuple(array(np.full_like(codes, 0xAA)) for codes in expected)
    got = cuda.quantize(x, out=out)
    assert (got[0] is out[0], got[1] is out[1]) == (True, True)
    for name, codes, right in zip(("elements", "scales"), out, expected, strict=True):
        assert_same(np.asarray(codes), np.asarray(right), name)
    with pytest.raises(ShapeError, match="out: scales are uint8 of shape"):
        cuda.quantize(x, axis=0, out=out)
    with pytest.raises(ShapeError, match="share memory"):
        cuda.quantize(x, out=(x.view(np.uint8).ravel()[: x.size].reshape(x.shape), out[1]))


SHAPES = (((3, 96), (5, 96)), ((96,), (5, 96)), ((2, 3, 96), (5, 96)), ((2, 1, 3, 96), (4, 5, 96)), ((96,), (4, 5, 96)))


@looped("shapes, dtype, formats", [*itertools.product(SHAPES, DTYPES, (("e5m2", "e4m3"), ("int8", "int8")))])
def test_cupy_gemms(cupy, shapes, dtype, formats):
    (x_shape, w_shape), (a_format, b_format) = shapes, formats
    x, w, bias = heavy_tailed(x_shape), heavy_tailed(w_shape, 1), heavy_tailed((5,), 2)
    a, b = numpy_nodes.quantize(x, element_format=a_format), numpy_nodes.quantize(w, element_format=b_format)
    weight = numpy_nodes.dequantize(*b, element_format=b_format)
    values = numpy_nodes.dequantize(*a, element_format=a_format)
    got = cuda.gemm(*map(array, (*a, *b, bias)), a_format=a_format, b_format=b_format, dtype=dtype)
    bound = numpy_nodes.gemm_error_bound(values if x.ndim > 1 else values[None], weight, dtype, bias).reshape(got.shape)
    assert_within(np.asarray(got), numpy_nodes.gemm(*a, *b, bias, a_format=a_format, b_format=b_format), bound, "gemm")
    got = cuda.weight_gemm(*map(array, (x, *b)), b_format=b_format, dtype=dtype)
    bound = numpy_nodes.gemm_error_bound(x if x.ndim > 1 else x[None], weight, dtype).reshape(got.shape)
    assert_within(np.asarray(got), numpy_nodes.weight_gemm(x, *b, b_format=b_format), bound, "weight_gemm")


def test_cupy_errors(cupy):
    b = [*map(array, numpy_nodes.quantize(heavy_tailed((5, 64))))]
    with pytest.raises(ShapeError, match="gemm: scales"):
        cuda.weight_gemm(array(heavy_tailed((3, 64))), b[0], b[1][:, :1])
    with pytest.raises(ShapeError, match="same K"):
        cuda.weight_gemm(array(heavy_tailed((3, 32))), *b)
    with pytest.raises(ShapeError, match="dtype float64"):
        cuda.quantize(array(np.ones((2, 32))))


# --- the device through CuPy -----------------------------------------------------------------------------------------


class Cublas(types.ModuleType):
    """CuPy's cuBLAS, and cuBLAS itself: GemmEx on host memory, column-major; bfloat16 operands.

    It has no gemmEx: CuPy's sets the stream itself, and raises NotImplementedError if that is being captured.
    """

    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT, CUBLAS_DEFAULT_MATH = 0, 1, 68, -1, 0

    def __init__(self) -> None:
        super().__init__("cublas")
        self.modes: list[int] = []
        self.stream = 0
        self.workspace: tuple[int, int] = (0, 0)
        self.status = 0

    def check_status(self, status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLAS status {status}")

    def cublasSetStream_v2(self, handle: int, stream: int) -> int:
        assert handle == 77
        self.stream, self.workspace = stream, (0, 0)
        return 0

    def cublasSetWorkspace_v2(self, handle: int, address: int, size: int) -> int:
        assert handle == 77
        self.workspace = address, size
        return 0

    def setMathMode(self, handle: int, mode: int) -> None:
        assert handle == 77
        self.modes.append(mode)

    def cublasGemmEx(self, *arguments: Any) -> int:
        handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _ = arguments
        assert (handle, ta, tb, a_type, b_type, compute) == (77, 1, 0, 14, 14, 68)
        assert (matrix(alpha, np.float32, 1)[0], matrix(beta, np.float32, 1)[0], lda, ldb, ldc) == (1, 0, k, k, m)
        multiply(b, a, c, (n, m, k), "float32" if c_type == 0 else "bfloat16")  # column-major
        return self.status


@pytest.fixture
def cublas(monkeypatch) -> Cublas:
    made = Cublas()
    libraries: Any = types.ModuleType("cupy_backends.cuda.libs")
    libraries.cublas = made
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libraries)
    monkeypatch.setattr(cuda_device, "cupy_module", stand_in)
    monkeypatch.setattr(cuda_device, "device", cuda_device.CudaDevice)  # not cached: other tests have another CuPy
    return made


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


def test_a_kernel_is_loaded_once(monkeypatch):
    loaded: list[bytes] = []
    module = types.SimpleNamespace(load=loaded.append, get_function=lambda name: types.SimpleNamespace(ptr=33))
    cupy = stand_in()
    cupy.cuda.function = types.SimpleNamespace(Module=lambda: module)
    monkeypatch.setattr(cuda_device, "cupy_module", lambda: cupy)
    monkeypatch.setattr(build, "cubin", lambda source, kernel, arch: f"{source}|{kernel}|{arch}".encode())
    monkeypatch.setattr(build, "entry", lambda code: "entry")
    gpu = cuda_device.CudaDevice(0)
    assert [function.ptr for _ in range(2) for function in gpu.functions(["finish<true>", "group_rows"])] == [33] * 4
    assert loaded == [b"finish|finish<true>|sm_90a", b"group_rows|group_rows|sm_90a"]


def test_without_cupy_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match=r"CuPy cannot be imported.*pip install cupy-cuda13x.*CPU kernels"):
        cuda_device.cupy_module.__wrapped__()


# --- torch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch) -> EmulatedDevice:
    monkeypatch.setattr(torch_cuda, "_queue", lambda x: queue())
    torch_cuda.forget_kept()
    yield device()
    torch_cuda.forget_kept()


def back(t: Any) -> np.ndarray:
    return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()


def values(*shape: int, dtype: Any = None, seed: int = 0) -> Any:
    return torch.from_numpy(heavy_tailed(shape, seed)).to(dtype or torch.float32)


@looped("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_quantize_and_dequantize_on_every_layout(emulated, dtype):
    x = values(40, 96, dtype=dtype)
    layouts = (x, x.t(), x[:, 1:70], x[::2], x.reshape(4, 10, 96).permute(1, 0, 2), x[0], x[:0], x[3].expand(5, -1))
    for source, fmt in itertools.product(layouts, FORMATS):
        for axis in range(source.dim()):
            got = torch_cuda.quantize(source, axis, fmt)
            expected = numpy_nodes.quantize(back(source.contiguous()), axis=axis, element_format=fmt)
            for name, a, b in zip(("elements", "scales"), got, expected, strict=True):
                assert_same(a.numpy(), b, name)
            y = torch_cuda.dequantize(*got, axis, fmt, dtype)
            name = dtype_name(dtype)
            assert_same(back(y), numpy_nodes.dequantize(*expected, axis=axis, element_format=fmt, dtype=name), "y")


@looped("shape", [(64, 96), (37, 50), (0, 64), (5, 0)])
def test_torch_quantizes_both_ways_for_training(emulated, shape):
    x = values(*shape, dtype=torch.bfloat16)
    got = torch_cuda.quantize_both(x, "e5m2")
    expected = *torch_cuda.quantize(x, -1, "e5m2"), *torch_cuda.quantize(x.t(), -1, "e5m2")
    for name, a, b in zip(("rows", "scales", "columns", "scales"), got, expected, strict=True):
        assert_same(a.numpy(), b.numpy(), name)
        assert a.is_contiguous()


def test_torch_quantizes_a_transposed_matrix_without_a_transposition(emulated, monkeypatch):
    x = values(64, 96, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    emulated.launched.clear()
    elements, scales = torch_cuda.quantize(x.t(), -1)
    assert emulated.launched == ["quantize_columns<BF16, E4M3, TRANSPOSED, false>"]
    assert elements.shape == (96, 64)
    assert scales.shape == (96, 2)


def test_a_training_step_reads_each_gradient_once(emulated, monkeypatch):
    """linear_train on the kernels that CUDA tensors have: which run, and that they give what the CPU's do."""
    x, w, dy = (values(*shape, seed=seed) for seed, shape in enumerate(((64, 96), (32, 96), (64, 32))))

    def step(ops: Any) -> list[Any]:
        monkeypatch.setattr(torch.ops, "mxfp8", ops)
        context = types.SimpleNamespace(needs_input_grad=(True, True, False))
        context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
        y = torch_training.linear_train(x, w)
        torch_training.setup_context(context, (x, w, None, "HYBRID", "ceil"), y)
        return [y, *torch_training.backward(context, dy)[:2]]

    on_the_cpu = torch.ops.mxfp8
    on_cuda = types.SimpleNamespace()
    for name in ("quantize", "quantize_both", "gemm"):
        setattr(on_cuda, name, types.SimpleNamespace(default=getattr(torch_cuda, name)))

    with torch.no_grad():
        emulated.launched.clear()
        got = step(on_cuda)
        launched = [name for name in emulated.launched if name.startswith("quantize")]
        wanted = step(on_the_cpu)
    rows = "quantize_rows<F32, E4M3, false>"
    columns = "quantize_columns<F32, E4M3, TRANSPOSED, false>"
    assert launched == [rows, rows, columns, "quantize_columns<F32, E5M2, BOTH, false>", columns]
    for name, a, b in zip(("y", "dx", "dw"), got, wanted, strict=True):
        np.testing.assert_allclose(back(a), back(b), rtol=1e-4, atol=1e-3, err_msg=name)


@looped("x_shape, w_shape", SHAPES)
def test_torch_gemms(emulated, x_shape, w_shape):
    x, bias = values(*x_shape, dtype=torch.bfloat16), values(5, seed=2)
    a, b = torch_cuda.quantize(x), torch_cuda.quantize(values(*w_shape, seed=1))
    arrays = [t.numpy() for t in (*a, *b)]
    weight = numpy_nodes.dequantize(*arrays[2:])
    got = torch_cuda.gemm(*a, *b, bias, dtype=torch.bfloat16)
    left = np.atleast_2d(numpy_nodes.dequantize(*arrays[:2]))
    bound = numpy_nodes.gemm_error_bound(left, weight, "bfloat16", bias.numpy()).reshape(got.shape)
    assert_within(back(got), numpy_nodes.gemm(*arrays, bias.numpy()), bound, "gemm")
    got = torch_cuda.weight_gemm(x, *b)
    assert got.dtype == torch.bfloat16
    bound = numpy_nodes.gemm_error_bound(np.atleast_2d(back(x)), weight, "bfloat16").reshape(got.shape)
    assert_within(back(got), numpy_nodes.weight_gemm(back(x), *arrays[2:]), bound, "weight_gemm")


def test_torch_uses_a_kept_weight_until_it_changes(emulated):
    x, b = values(70, 64, dtype=torch.bfloat16), torch_cuda.quantize(values(6, 64, seed=1))

    def kernels() -> list[str]:
        emulated.launched.clear()
        torch_cuda.weight_gemm(x, *b)
        return [name.partition("<")[0] for name in emulated.launched]

    assert kernels()[0] == "dequantize"
    torch_cuda.keep_wide(*b)
    assert kernels() == ["matmul_bf16 bfloat16", "gemm_float32"]
    emulated.launched.clear()
    torch_cuda.weight_gemm(x.float(), *b)
    assert "dequantize" not in [name.partition("<")[0] for name in emulated.launched]
    b[0].add_(1)
    assert kernels()[0] == "dequantize"
    torch_cuda.keep_wide(*b)
    torch_cuda.forget_kept()
    assert kernels()[0] == "dequantize"
    with torch.inference_mode():
        b = torch_cuda.quantize(values(6, 64, seed=1))
        torch_cuda.keep_wide(*b)
        assert kernels()[0] == "matmul_bf16 bfloat16"


def test_torch_empty_operands(emulated):
    b = torch_cuda.quantize(values(6, 64))
    assert torch_cuda.weight_gemm(values(0, 64), *b).shape == (0, 6)
    bias = values(6)
    none = torch_cuda.quantize(values(6, 0))
    assert torch.equal(torch_cuda.weight_gemm(values(3, 0), *none, bias), bias.expand(3, 6))


def test_torch_refuses_two_devices(emulated):
    b = torch_cuda.quantize(values(6, 64))
    with pytest.raises(ShapeError, match="tensors on cpu, meta; expected one device"):
        torch_cuda.weight_gemm(values(2, 64).to("meta"), *b)


def test_allocations_are_aligned():
    assert allocate(5)[1] % 16 == 0
