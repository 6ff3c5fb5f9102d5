"""The nodes on a GPU inside ONNX Runtime: make gpu-test. Needs CuPy, onnxruntime and the native library.

Device "cuda-copies" in any ONNX Runtime; device "cuda" in onnxruntime-gpu and, with or without that, in the emulation
of its provider on the real driver, real streams and the real cuBLASLt.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mxfp8_ops import contract, native, numpy_nodes, ort
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.cuda import loader as cuda_loader
from mxfp8_ops.errors import BackendError

onnxruntime = pytest.importorskip("onnxruntime")
import test_ort  # noqa: E402
import test_ort_cuda  # noqa: E402
from compare import heavy_tailed  # noqa: E402
from ort_emulation import CudaProvider, own_library  # noqa: E402


def library_is_here() -> bool:
    try:
        return native.library_path().is_file()
    except BackendError:
        return False


CUDA_PROVIDER = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_device.available(), reason="needs a CUDA device and CuPy"),
    pytest.mark.skipif(not library_is_here(), reason="needs the native library"),
]
needs_provider = pytest.mark.skipif(
    CUDA_PROVIDER not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu"
)


# --- whole sessions --------------------------------------------------------------------------------------------------


class TestWithCopies:
    """The tests of test_ort.py, with every session on the GPU."""

    device = "cuda-copies"

    @pytest.fixture(autouse=True)
    def sessions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ort, "session", functools.partial(ort.session, device=self.device))


@needs_provider
class TestOnTheProvider(TestWithCopies):
    device = "cuda"


for _name, _test in inspect.getmembers(test_ort, inspect.isfunction):
    if _name.startswith("test_") and _name != "test_gemms_of_int8_with_float8_are_within_the_bound":  # no GPU has it
        setattr(TestWithCopies, _name, staticmethod(_test))


def matmul(weight: np.ndarray) -> bytes:
    """Returns a model y = x w^T, x and w quantized."""
    nodes = [
        test_ort.node("MXFP8Quantize", "x", "xe xs"),
        test_ort.node("MXFP8Quantize", "b", "be bs"),
        test_ort.node("MXFP8Gemm", "xe xs be bs", "y"),
    ]
    k = weight.shape[1]
    return test_ort.model(nodes, {"x": (contract.FLOAT, ["m", k])}, {"y": (contract.FLOAT, None)}, b=weight)


@pytest.mark.parametrize("device", ["cuda-copies", pytest.param("cuda", marks=needs_provider)])
@pytest.mark.parametrize("m", [1, 64, 300])
def test_every_number_of_rows(device: str, m: int) -> None:
    x, weight = heavy_tailed((m, 2080), 1), heavy_tailed((272, 2080), 2)
    (y,) = ort.session(matmul(weight), device=device).run(None, {"x": x})
    a, b = numpy_nodes.quantize(x), numpy_nodes.quantize(weight)
    bound = numpy_nodes.gemm_error_bound(numpy_nodes.dequantize(*a), numpy_nodes.dequantize(*b))
    test_ort.assert_within(y, numpy_nodes.gemm(*a, *b), bound)


@needs_provider
@pytest.mark.parametrize("options", [{}, {"enable_cuda_graph": "1"}], ids=["stream", "graph"])
@pytest.mark.parametrize("m", [5, 300])
def test_inputs_and_outputs_on_the_gpu(options: dict[str, str], m: int) -> None:
    weight = heavy_tailed((272, 256), 2)
    providers = [(CUDA_PROVIDER, options), "CPUExecutionProvider"]
    session = ort.session(matmul(weight), providers=providers, device="cuda")
    plain = ort.session(matmul(weight), device="cuda")
    value = onnxruntime.OrtValue
    x = value.ortvalue_from_numpy(np.zeros((m, 256), np.float32), "cuda", 0)
    y = value.ortvalue_from_shape_and_type((m, 272), np.float32, "cuda", 0)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    for seed in range(4):  # the first run warms up and captures, the others replay
        fresh = heavy_tailed((m, 256), seed)
        x.update_inplace(fresh)
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(y.numpy(), plain.run(None, {"x": fresh})[0])


@needs_provider
def test_the_second_gpu() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    weight, x = heavy_tailed((272, 256), 2), heavy_tailed((300, 256))
    results = [
        ort.session(matmul(weight), providers=[(CUDA_PROVIDER, {"device_id": index})], device="cuda").run(
            None, {"x": x}
        )
        for index in ("0", "1")
    ]
    np.testing.assert_array_equal(results[0][0], results[1][0])


# --- the emulated provider on the real driver ------------------------------------------------------------------------


class CupyMemory:
    """Memory of the current GPU; what is read has been waited for."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.loaded: list[str] = []

    def allocate(self, size: int) -> int:
        import cupy

        memory = cupy.full(size, 0xAA, np.uint8)
        cupy.cuda.Device().synchronize()
        self.held[memory.data.ptr] = memory
        return int(memory.data.ptr)

    def free(self, address: int) -> None:
        import cupy

        cupy.cuda.Device().synchronize()  # CuPy's pool knows nothing of other streams
        del self.held[address]

    def write(self, address: int, data: bytes) -> None:
        if data:
            self.held[address].set(np.frombuffer(data, np.uint8))

    def read(self, address: int, size: int) -> bytes:
        import cupy

        cupy.cuda.Device().synchronize()
        return bytes(self.held[address].get()) if size else b""


@pytest.fixture(params=["cublaslt", "no cublaslt"])
def provider(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaProvider]:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    if request.param == "no cublaslt":
        monkeypatch.setattr(cuda_loader, "cublaslt", lambda: None)
    memory = CupyMemory()
    provider = CudaProvider(own_library(), memory, stream=stream.ptr)
    cuda_loader.give(provider.library)
    yield provider
    assert not memory.held


test_quantize_and_dequantize = test_ort_cuda.test_quantize_and_dequantize
test_an_output_that_is_absent_is_not_returned = test_ort_cuda.test_an_output_that_is_absent_is_not_returned
test_gemms = test_ort_cuda.test_gemms


@pytest.mark.parametrize("dtype", [*contract.VALUE_NAMES.values()])
@pytest.mark.parametrize("kind", ["bfloat16", "e4m3", "e5m2"])
def test_many_rows(provider: CudaProvider, kind: str, dtype: str) -> None:
    def edge(a: Any, b: Any) -> None:
        b[1][3, :2] = [0, 1]
        if len(a) == 2:
            a[1][1, :2] = [0, 1]

    for change in (None, edge):
        shapes = ((300, 2048), (272, 2048))
        test_ort_cuda.check_gemm(provider, shapes, (kind, "e4m3"), dtype, bias=dtype != "float32", change=change)
