"""Where `ort` lets the nodes run: devices, what is said when one cannot be used, what the native library is given."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from compare import assert_within, heavy_tailed
from cuda_driver_emulation import Driver, machine
from test_ort import model as onnx_model
from test_ort import node, weight_only

from mxfp8_ops import contract, cpu, numerics, ort
from mxfp8_ops.cuda import build
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.errors import BackendError
from mxfp8_ops.ort import cuda_loader


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Driver]:
    with machine(monkeypatch) as gpu:
        yield gpu


def fail(message: str) -> None:
    raise BackendError(message)


def no_gpu() -> None:
    fail("cuda: no GPU; expected a CUDA device; use the CPU kernels")


@pytest.fixture
def with_provider(monkeypatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])


def model() -> bytes:
    return weight_only(["m", 64], b=heavy_tailed((7, 64)))


def test_a_device_that_does_not_exist():
    with pytest.raises(BackendError, match="device 'gpu'; expected one of cpu, cuda, cuda-copies; correct the name"):
        ort.session(model(), device="gpu")


def test_cuda_in_an_onnxruntime_without_it(gpu):
    with pytest.raises(
        BackendError, match=r"has no CUDAExecutionProvider; .* pip install onnxruntime-gpu, or use device"
    ):
        ort.session(model(), device="cuda")


@pytest.mark.parametrize("device", ["cuda", "cuda-copies"])
def test_without_a_gpu_the_device_says_why(with_provider, monkeypatch, device):
    cuda_loader.connect.cache_clear()
    monkeypatch.setattr(cuda_device, "cupy_module", no_gpu)
    with pytest.raises(BackendError, match="cuda: no GPU; expected a CUDA device; use the CPU kernels"):
        ort.session(model(), device=device)


def test_without_a_driver_the_device_says_why(gpu, monkeypatch):
    monkeypatch.setattr(cuda_loader, "DRIVER", "libnothing.so.1")
    with pytest.raises(
        BackendError, match=r"cuda: no driver \(libnothing\.so\.1: cannot open .*\); .*install the driver"
    ):
        ort.session(model(), device="cuda-copies")
    monkeypatch.setattr(cuda_loader, "DRIVER", str(cpu.library_path()))
    with pytest.raises(BackendError, match=r"cuda: no driver \(.* has no cuCtxPushCurrent_v2\); expected NVIDIA's"):
        ort.session(model(), device="cuda-copies")


def test_without_nvrtc_the_device_says_what_to_install(gpu, monkeypatch):
    monkeypatch.setattr(build, "nvrtc_version", lambda: fail("cuda: no NVRTC; pip install it"))
    with pytest.raises(BackendError, match="cuda: no NVRTC; pip install it"):
        ort.session(model(), device="cuda-copies")


@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider' is not in available:UserWarning")
def test_a_cuda_provider_without_a_gpu_warns_and_runs_on_the_processor(with_provider, monkeypatch):
    cuda_loader.connect.cache_clear()
    monkeypatch.setattr(cuda_device, "cupy_module", no_gpu)
    with pytest.warns(UserWarning, match="the MXFP8 nodes run on the CPU: cuda: no GPU; expected a CUDA device"):
        session = ort.session(model(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert session.run(None, {"x": heavy_tailed((3, 64))})[0].shape == (3, 7)


def test_nodes_that_the_cuda_provider_does_not_take_run_on_the_processor(with_provider, gpu):
    options = onnxruntime.SessionOptions()
    ort.register(options, device="cuda")
    x = heavy_tailed((3, 64))
    (y,) = onnxruntime.InferenceSession(model(), options, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_array_equal(y, ort.session(model()).run(None, {"x": x})[0])
    assert gpu.launches == []


def test_weights_are_kept_only_on_the_cuda_provider(gpu):
    for device in ("cpu", "cuda-copies"):
        with pytest.raises(BackendError, match=f"keep_wide on device '{device}'; expected device 'cuda'"):
            ort.session(model(), device=device, keep_wide=True)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("mxfp8.keep_wide", "1")
    with pytest.raises(BackendError, match=r"mxfp8\.keep_wide: '1' with mxfp8\.device ''; expected 1 with cuda"):
        ort.register(options)


def test_copies_of_a_product_whose_k_is_split(gpu):
    codes = numerics.quantize(heavy_tailed((13, 8192)))
    nodes = [node("MXFP8Quantize", "x", "a as"), node("MXFP8Gemm", "a as b bs", "y")]
    weights = {"b": codes[0].view(ml_dtypes.float8_e4m3fn), "bs": codes[1]}
    packed = onnx_model(nodes, {"x": (contract.FLOAT, [None, 8192])}, {"y": (contract.FLOAT, None)}, **weights)
    x = heavy_tailed((2, 8192))
    (y,) = ort.session(packed, device="cuda-copies").run(None, {"x": x})
    assert [launch.kernel.partition("<")[0] for launch in gpu.launches] == ["quantize_rows", "gemm_skinny", "finish"]
    a = numerics.quantize(x)
    bound = numerics.gemm_error_bound(numerics.dequantize(*a), numerics.dequantize(*codes))
    assert_within(y, numerics.gemm(*a, *codes), bound)


def test_a_session_without_the_provider_that_was_asked_for(with_provider, gpu):
    with pytest.raises(BackendError, match="the session has the providers CPUExecutionProvider; expected CUDAExec"):
        ort.session(model(), device="cuda", providers=["CPUExecutionProvider"])


def test_an_unknown_device_in_the_options_is_refused():
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("mxfp8.device", "tpu")
    with pytest.raises(BackendError, match=r"session option mxfp8\.device: 'tpu'; expected cuda or cuda-copies"):
        ort.register(options)


# --- what the library is given ---------------------------------------------------------------------------------------


def test_the_loader_asks_cupy_on_the_gpu_in_question(monkeypatch):
    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *error: object) -> None:
            entered.append(-1)

    class Module:
        def load(self, code: bytes) -> None:
            self.code = code

        def get_function(self, name: str) -> Any:
            return types.SimpleNamespace(ptr=0xF00)

    properties = {"major": 9, "minor": 0, "multiProcessorCount": 132, "name": b"stand-in"}
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            Device=Device,
            driver=types.SimpleNamespace(ctxGetCurrent=lambda: 0xC0),
            function=types.SimpleNamespace(Module=Module),
            runtime=types.SimpleNamespace(
                getDeviceProperties=lambda i: properties, CUDARuntimeError=RuntimeError, free=lambda address: None
            ),
        )
    )
    monkeypatch.setattr(cuda_device, "cupy_module", lambda: cupy)
    monkeypatch.setattr(cuda_device, "device", cuda_device.CudaDevice)
    monkeypatch.setattr(build, "cubin", lambda source, kernel, arch: f"{source} {kernel} {arch}".encode())
    monkeypatch.setattr(build, "entry", lambda code: "entry")
    monkeypatch.setattr(cuda_loader, "_cublas", lambda: {"cublasGemmEx": 0xCB})
    gpu, function, message = cuda_loader._Gpu(), ctypes.c_void_p(), ctypes.create_string_buffer(100)
    loader = cuda_loader._LOADER
    assert loader.gpu(2, ctypes.byref(gpu), ctypes.addressof(message), 100) == 0
    assert (gpu.context, gpu.processors, gpu.cublasGemmEx, gpu.cublasSetMathMode) == (0xC0, 132, 0xCB, None)
    assert gpu.capability == 90
    assert loader.kernel(2, b"finish<true>", ctypes.byref(function), ctypes.addressof(message), 100) == 0
    assert function.value == 0xF00
    assert entered == [2, -1, 2, -1]
    monkeypatch.setattr(build, "cubin", lambda *names: fail("cuda: no NVRTC; " + "x" * 200))
    assert loader.kernel(2, b"finish<true>", ctypes.byref(function), ctypes.addressof(message), 100) == 1
    assert message.value.startswith(b"cuda: no NVRTC; xxx")
    assert len(message.value) == 99
