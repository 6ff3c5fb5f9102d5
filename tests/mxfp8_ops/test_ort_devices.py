"""Where `ort` lets the nodes run: devices, the error where one cannot be used, what the native library gets."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
import test_ort
from compare import assert_within, heavy_tailed
from cuda_driver_emulation import Driver, machine
from ort_models import model as onnx_model
from ort_models import node, weight_only

from mxfp8_ops import contract, cpu, numpy_nodes, ort
from mxfp8_ops.cuda import build
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.cuda import loader as cuda_loader
from mxfp8_ops.cuda.planner import CODES
from mxfp8_ops.errors import BackendError

pytestmark = pytest.mark.cuda


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Driver]:
    with machine(monkeypatch) as gpu:
        yield gpu


def fail(*_: Any) -> None:
    raise BackendError("cuda: what is missing " + "x" * 200)


@pytest.fixture
def with_provider(monkeypatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])


def model() -> bytes:
    return weight_only(["m", 64], b=heavy_tailed((7, 64)))


CPU_LIBRARY = str(cpu.library_path())
UNUSABLE = {
    "no such device": ("gpu", (), "device 'gpu'; expected one of cpu, cuda, cuda-copies; correct the name"),
    "an onnxruntime without CUDA": (
        "cuda",
        (),
        r"has no CUDAExecutionProvider; .* pip install 'mxfp8-graph\[cud",
    ),
    "no GPU": ("cuda-copies", (cuda_device, "available", fail), "cuda: what is missing"),
    "no NVRTC": ("cuda-copies", (build, "nvrtc_version", fail), "cuda: what is missing"),
    "no driver": (
        "cuda-copies",
        (cuda_loader, "DRIVER", "libnothing.so.1"),
        r"cuda: no driver \(libnothing\.so\.1: cannot open .*\); .*install the driver",
    ),
    "a library that is no driver": (
        "cuda-copies",
        (cuda_loader, "DRIVER", CPU_LIBRARY),
        r"cuda: no driver \(.* has no cuCtxPushCurrent_v2\); expected NVIDIA's",
    ),
}


@pytest.mark.parametrize(("device", "missing", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_device_that_cannot_be_used_says_why(gpu, monkeypatch, device, missing, message):
    if missing:
        monkeypatch.setattr(*missing)
    with pytest.raises(BackendError, match=message):
        ort.session(model(), device=device)


@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider' is not in available:UserWarning")
def test_a_cuda_provider_without_a_gpu_warns_and_runs_on_the_processor(with_provider, gpu, monkeypatch):
    monkeypatch.setattr(cuda_device, "available", fail)
    with pytest.warns(UserWarning, match="the MXFP8 nodes run on the CPU: cuda: what is missing"):
        session = ort.session(model(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert session.run(None, {"x": heavy_tailed((3, 64))})[0].shape == (3, 7)


@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider' is not in available:UserWarning")
def test_a_cuda_provider_that_does_not_start_says_what_it_looked_for(with_provider, gpu):
    """This onnxruntime has no such provider, so the session opens without it."""
    what = (
        r"the providers CPUExecutionProvider\. CUDAExecutionProvider needs libcuda\.so\.1.* looked for in /.*; not load"
    )
    with pytest.raises(BackendError, match=what):
        ort.session(model(), device="cuda")
    with pytest.warns(UserWarning, match=f"the MXFP8 nodes run on the CPU.*{what}"):
        ort.session(model(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


def test_nodes_that_the_cuda_provider_does_not_take_run_on_the_processor(with_provider, gpu):
    options = onnxruntime.SessionOptions()
    ort.register(options, device="cuda")
    x = heavy_tailed((3, 64))
    (y,) = onnxruntime.InferenceSession(model(), options, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_array_equal(y, ort.session(model()).run(None, {"x": x})[0])
    assert gpu.launches == []
    with pytest.raises(BackendError, match="the session has the providers CPUExecutionProvider; expected CUDAExec"):
        ort.session(model(), device="cuda", providers=["CPUExecutionProvider"])


def test_weights_are_kept_only_on_the_cuda_provider(gpu):
    for device in ("cpu", "cuda-copies"):
        with pytest.raises(BackendError, match=f"keep_wide on device '{device}'; expected device 'cuda'"):
            ort.session(model(), device=device, keep_wide=True)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("mxfp8.keep_wide", "1", r"mxfp8\.keep_wide: '1' with mxfp8\.device ''; expected 1 with cuda"),
        ("mxfp8.device", "tpu", r"session option mxfp8\.device: 'tpu'; expected cuda or cuda-copies"),
    ],
)
def test_session_options_that_make_no_sense_are_refused(entry, value, message):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(entry, value)
    with pytest.raises(BackendError, match=message):
        ort.register(options)


def test_the_loader_asks_cupy_on_the_gpu_in_question(monkeypatch):
    entered: list[int] = []

    class Device(contextlib.AbstractContextManager):
        def __init__(self, index: int) -> None:
            entered.append(index)

        def __exit__(self, *error: object) -> None:
            entered.append(-1)

    module = types.SimpleNamespace(load=lambda code: None, get_function=lambda name: types.SimpleNamespace(ptr=0xF00))
    properties = {"major": 9, "minor": 0, "multiProcessorCount": 132, "name": b"stand-in"}
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceProperties=lambda i: properties,
        CUDARuntimeError=RuntimeError,
        free=lambda address: None,
    )
    parts = {
        "Device": Device,
        "driver": types.SimpleNamespace(ctxGetCurrent=lambda: 0xC0),
        "function": types.SimpleNamespace(Module=lambda: module),
        "runtime": runtime,
    }
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(**parts))
    monkeypatch.setattr(cuda_device, "cupy_module", lambda: cupy)
    monkeypatch.setattr(cuda_device, "device", cuda_device.CudaDevice)
    monkeypatch.setattr(build, "cubin", lambda source, kernel, arch: f"{source} {kernel} {arch}".encode())
    monkeypatch.setattr(build, "entry", lambda code: "entry")
    monkeypatch.setattr(cuda_loader, "cublaslt", lambda: b"libcublasLt.so.13")
    gpu, function, message = cuda_loader._Gpu(), ctypes.c_void_p(), ctypes.create_string_buffer(100)
    loader, names, buffer = cuda_loader._LOADER, (ctypes.c_char_p * 1)(b"finish<true>"), ctypes.addressof(message)
    assert loader.gpu(2, ctypes.byref(gpu), buffer, 100) == 0
    assert (gpu.context, gpu.processors, gpu.cublaslt) == (0xC0, 132, b"libcublasLt.so.13")
    assert gpu.capability == 90
    assert loader.kernels(2, 1, names, ctypes.byref(function), buffer, 100) == 0
    assert function.value == 0xF00
    assert entered == [2, -1, 2, -1]
    monkeypatch.setattr(build, "cubin", fail)
    assert loader.kernels(2, 1, names, ctypes.byref(function), buffer, 100) == 1
    assert message.value.startswith(b"cuda: what is missing xxx")
    assert len(message.value) == 99, "the message is cut at the size of the buffer"


# --- device "cuda-copies", over an emulated CUDA driver --------------------------------------------------------------


def weight_gemm(n: int, k: int, **constants: np.ndarray) -> bytes:
    """Returns a model y = x w^T (+ bias) whose packed weight [n, k] is a constant."""
    elements, scales = numpy_nodes.quantize(heavy_tailed((n, k)))
    inputs = " ".join(["x", "be", "bs", *constants])
    constants |= {"be": elements.view(ml_dtypes.float8_e4m3fn), "bs": scales}
    nodes = [node("MXFP8WeightGemm", inputs, "y")]
    return onnx_model(nodes, {"x": (contract.FLOAT, [None, k])}, {"y": (contract.FLOAT, None)}, **constants)


class TestEverythingTheCpuKernelsDo:
    """The tests of test_ort.py, with every session on the GPU."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch) -> Iterator[Driver]:
        with machine(monkeypatch) as gpu:
            monkeypatch.setattr(ort, "session", functools.partial(ort.session, device="cuda-copies"))
            yield gpu


for _name, _test in inspect.getmembers(test_ort, inspect.isfunction):
    if (
        _name.startswith("test_") and _name != "test_gemms_of_int8_with_float8_are_within_the_bound"
    ):  # refused, see below
        setattr(TestEverythingTheCpuKernelsDo, _name, staticmethod(_test))


@pytest.mark.parametrize("formats", [("int8", "e4m3"), ("e5m2", "int8")])
def test_a_product_of_int8_with_float8_is_refused_by_name(gpu, formats):
    """When the session is made: its kernels are compiled then, and there are none."""
    a, b = (CODES[name] for name in formats)
    model = onnx_model(
        [
            node("MXFP8Quantize", "x", "xe xs", output_dtype=a),
            node("MXFP8Quantize", "w", "be bs", output_dtype=b),
            node("MXFP8Gemm", "xe xs be bs", "y"),
        ],
        {"x": (contract.FLOAT, [None, 64])},
        {"y": (contract.FLOAT, None)},
        w=heavy_tailed((7, 64)),
    )
    names = f"{formats[0].upper()} times {formats[1].upper()}"
    with pytest.raises(Exception, match=f"'the_y': {names} on CUDA; expected INT8 with INT8, or with values; quantize"):
        ort.session(model, device="cuda-copies")


def test_a_profile_names_the_row_of_the_dispatch_table(gpu):
    session = ort.session(weight_gemm(40, 64), device="cuda-copies")
    for m, row in ((3, "skinny"), (70, "parts")):
        with cpu.profiled() as profile:
            session.run(None, {"x": heavy_tailed((m, 64))})
            (call,) = profile.calls()
        assert (call.op, call.name, call.isa, call.gemms) == ("MXFP8WeightGemm", "the_y", "cuda", (row,))


def test_weights_are_copied_once_and_freed_with_the_session(gpu):
    x = heavy_tailed((3, 512))
    before = gpu.allocations
    session = ort.session(weight_gemm(300, 512), device="cuda-copies")
    held = 300 * 512 + 300 * 512 // 32
    assert gpu.library.bytes_copied_in() == held
    for runs in (1, 2, 3):
        session.run(None, {"x": x})
        assert gpu.library.bytes_copied_in() == held + runs * x.nbytes
    arena = 1
    assert gpu.allocations <= before + arena + 2
    del session
    assert gpu.allocations <= before + arena


def test_a_gpu_that_is_full_is_an_error(gpu):
    session = ort.session(weight_gemm(7, 64), device="cuda-copies")
    gpu.library.set_most(100_000)
    with pytest.raises(Exception, match=r"MXFP8WeightGemm 'the_y': GPU 0: cannot allocate memory: .*OUT_OF_MEMORY"):
        session.run(None, {"x": np.ones((20_000, 64), np.float32)})
    gpu.library.set_most(1 << 30)
    assert session.run(None, {"x": np.ones((3, 64), np.float32)})[0].shape == (3, 7)


def test_a_node_that_cannot_keep_all_its_constants_keeps_none(gpu):
    before = gpu.allocations
    gpu.library.set_most(100)  # the elements and the scales fit, the 160 bytes of the bias do not
    with pytest.raises(Exception, match=r"'the_y': GPU 0: cannot allocate memory for a weight: .*OUT_OF_MEMORY"):
        ort.session(weight_gemm(40, 1, bias=np.ones(40, np.float32)), device="cuda-copies")
    assert gpu.allocations == before


def test_a_product_whose_k_is_split_has_scratch_memory(gpu):
    x = heavy_tailed((2, 8192))
    (y,) = ort.session(weight_gemm(13, 8192), device="cuda-copies").run(None, {"x": x})
    assert [launch.kernel.partition("<")[0] for launch in gpu.launches][-2:] == ["gemm_skinny", "finish"]
    codes = numpy_nodes.quantize(heavy_tailed((13, 8192)))
    bound = numpy_nodes.gemm_error_bound(x, numpy_nodes.dequantize(*codes))
    assert_within(y, numpy_nodes.weight_gemm(x, *codes), bound)


def test_sessions_on_the_gpu_and_on_the_processor_side_by_side(gpu):
    model, x = weight_gemm(7, 64), heavy_tailed((3, 64))
    sessions = [ort.session(model, device=device) for device in ("cuda-copies", "cpu")]
    results = [session.run(None, {"x": x})[0] for session in sessions]
    assert [launch.kernel.partition("<")[0] for launch in gpu.launches] == ["gemm_skinny"]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-4)
