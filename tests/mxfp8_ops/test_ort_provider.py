"""Device "cuda" in onnxruntime-gpu, without a GPU: its real provider on an emulated CUDA runtime, cuBLASLt and driver.

One slow test installs onnxruntime-gpu, builds the emulation, and runs the other tests of this file with both. Only our
nodes compute there: kernels of ONNX Runtime do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from compare import assert_same, assert_within, heavy_tailed
from cublaslt_emulation import CublasLt
from cuda_driver_emulation import ANY_STREAM, Driver, machine
from ort_models import model, node

from mxfp8_ops import contract, numpy_nodes, ort
from mxfp8_ops.cuda import loader, system

RELEASES = ("1.23.2", "1.31.1")
"""One for CUDA 12, one for CUDA 13."""
EMULATED = "MXFP8_TEST_EMULATED_CUDA"
"""Environment variable that is set where the tests below run."""

HERE = Path(__file__).parent


def build(provider: Path, folder: Path) -> None:
    """Builds what the provider is linked with: what the emulations have, and stubs for all the rest."""
    symbols = subprocess.run(["nm", "-D", "--undefined-only", provider], check=True, capture_output=True, text=True)
    wanted = [line.split()[-1].partition("@") for line in symbols.stdout.splitlines()]
    linked = subprocess.run(["readelf", "-d", provider], check=True, capture_output=True, text=True).stdout
    for library in re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv).*)\]", linked):
        names = {name for name, _, of in wanted if of.strip("@") == library}
        if library == "libcuda.so.1":  # whose symbols have no versions
            names = {"cuInit", *(name for name, _, of in wanted if not of and name.startswith("cu"))}
        cublaslt = library.startswith("libcublasLt")
        source = (HERE / ("cublaslt_emulation.cpp" if cublaslt else "cuda_runtime_emulation.c")).read_text()
        stubs = [f"int {name}(void) {{ return 0; }}" for name in sorted(names) if f" {name}(" not in source]
        linkage = ('extern "C" {', "}") if cublaslt else ("", "")
        (folder / "library").write_text("\n".join([source, linkage[0], *stubs, linkage[1]]))
        (folder / "versions").write_text(f"{library} {{ global: *; }};")
        options = ["-shared", "-fPIC", "-O2", f"-D{library.partition('.')[0].upper()}", f"-Wl,-soname,{library}"]
        if library != "libcuda.so.1":
            options.append(f"-Wl,--version-script={folder / 'versions'}")
        compiler = ("g++", "-std=c++17", "-xc++") if cublaslt else ("gcc", "-xc")
        subprocess.run([*compiler, *options, "-o", folder / library, folder / "library"], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_the_provider_on_an_emulated_gpu(release: str, tmp_path: Path) -> None:
    packages, libraries = tmp_path / "packages", tmp_path / "libraries"
    libraries.mkdir()
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages]
    subprocess.run([*install, f"onnxruntime-gpu=={release}"], check=True)
    build(packages / "onnxruntime/capi/libonnxruntime_providers_cuda.so", libraries)
    path = os.pathsep.join([str(packages), *filter(None, sys.path)])
    environment = {**os.environ, EMULATED: "1", "PYTHONPATH": path, "LD_LIBRARY_PATH": str(libraries)}
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


# --- what runs there -------------------------------------------------------------------------------------------------

emulated = pytest.mark.skipif(EMULATED not in os.environ, reason="runs inside test_the_provider_on_an_emulated_gpu")
WEIGHT = numpy_nodes.quantize(heavy_tailed((64, 64), 2))
CUBLASLT = loader.cublaslt
"""It finds the library that the provider has loaded."""


@functools.cache
def cublaslt() -> CublasLt:
    return CublasLt(next(Path(os.environ["LD_LIBRARY_PATH"]).glob("libcublasLt.so.*")))


class Runtime:
    """The counters of the emulation."""

    def __init__(self) -> None:
        folder = Path(os.environ["LD_LIBRARY_PATH"])
        self.cudart, self.cublas = (
            ctypes.CDLL(next(path.name for path in folder.glob(f"{name}.so.*"))) for name in ("libcudart", "libcublas")
        )

    def __getattr__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.cudart, name).value

    @property
    def products(self) -> int:
        return len(cublaslt().calls)

    @property
    def stream_of_handle(self) -> int:
        return ctypes.c_void_p.in_dll(self.cublas, "stream_of_handle").value or 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with machine(monkeypatch, ANY_STREAM) as gpu:
        monkeypatch.setattr(loader, "cublaslt", CUBLASLT)
        monkeypatch.setattr(system, "driver_version", lambda: (13, 0))
        cublaslt()
        runtime = Runtime()
        for name in ("adopt", "disown"):
            function = ctypes.cast(getattr(gpu.library, name), ctypes.c_void_p)
            ctypes.c_void_p.in_dll(runtime.cudart, name).value = function.value
        yield gpu


@pytest.fixture
def runtime(gpu: Driver) -> Runtime:
    return Runtime()


def square() -> bytes:
    """Returns a model y = x w^T whose y can be its next x."""
    nodes = [node("MXFP8Quantize", "x", "xe xs"), node("MXFP8Gemm", "xe xs be bs", "y")]
    weights: dict[str, Any] = {"be": WEIGHT[0].view(ml_dtypes.float8_e4m3fn), "bs": WEIGHT[1]}
    return model(nodes, {"x": (contract.FLOAT, [None, 64])}, {"y": (contract.FLOAT, None)}, **weights)


def check(x: np.ndarray, y: np.ndarray) -> None:
    a = numpy_nodes.quantize(x)
    bound = numpy_nodes.gemm_error_bound(numpy_nodes.dequantize(*a), numpy_nodes.dequantize(*WEIGHT))
    assert_within(y, numpy_nodes.gemm(*a, *WEIGHT), bound)


@emulated
def test_nodes_run_on_the_provider_with_its_stream(gpu: Driver, runtime: Runtime) -> None:
    session = ort.session(square(), device="cuda")
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    x, loaded = heavy_tailed((3, 64)), len(gpu.loaded)
    check(x, session.run(None, {"x": x})[0])
    assert [launch.kernel.partition("<")[0] for launch in gpu.launches] == ["quantize_rows", "gemm_skinny"]
    x, products = heavy_tailed((70, 64)), runtime.products
    check(x, session.run(None, {"x": x})[0])
    assert runtime.products == products + 1
    assert {launch.stream for launch in gpu.launches} == {runtime.stream_of_handle}
    assert runtime.stream_of_handle != 0
    assert (runtime.launches_of_others, len(gpu.loaded)) == (0, loaded)


def bound(session: onnxruntime.InferenceSession, x: np.ndarray) -> tuple[Any, onnxruntime.OrtValue]:
    """Returns a binding of x and y in the memory of the GPU, and y."""
    value, binding = onnxruntime.OrtValue, session.io_binding()
    y = value.ortvalue_from_shape_and_type(x.shape, np.float32, "cuda", 0)
    binding.bind_ortvalue_input("x", value.ortvalue_from_numpy(x, "cuda", 0))
    binding.bind_ortvalue_output("y", y)
    return binding, y


@emulated
def test_nothing_is_allocated_or_copied_once_a_shape_has_run(gpu: Driver, runtime: Runtime) -> None:
    session, x = ort.session(square(), device="cuda"), heavy_tailed((70, 64))
    binding, y = bound(session, x)
    session.run_with_iobinding(binding)
    before = runtime.allocations, runtime.copies
    for _ in range(3):
        session.run_with_iobinding(binding)
    assert (runtime.allocations, runtime.copies) == before
    check(x, y.numpy())


@emulated
def test_nodes_are_captured_into_a_cuda_graph(gpu: Driver, runtime: Runtime) -> None:
    providers = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"}), "CPUExecutionProvider"]
    session, x = ort.session(square(), device="cuda", providers=providers), heavy_tailed((70, 64))
    binding, y = bound(session, x)
    before = runtime.graphs
    for _ in range(4):
        session.run_with_iobinding(binding)
    assert runtime.graphs == before + 1
    assert runtime.forbidden == 0, "something was allocated or waited for during the capture"
    check(x, y.numpy())


@emulated
def test_fp8_tensor_cores_multiply_in_a_cuda_graph(
    gpu: Driver, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scales of the weight are in cuBLASLt's layout before the first run."""
    monkeypatch.setattr(gpu, "capability", (10, 0))
    providers = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"}), "CPUExecutionProvider"]
    session, x = ort.session(square(), device="cuda", providers=providers), heavy_tailed((70, 64))
    assert [launch.kernel for launch in gpu.launches] == ["swizzle_scales"]
    products, graphs = runtime.products, runtime.graphs
    binding, y = bound(session, x)
    for _ in range(4):
        session.run_with_iobinding(binding)
    check(x, y.numpy())
    assert runtime.products > products
    assert (runtime.graphs, runtime.forbidden) == (graphs + 1, 0)
    assert {launch.kernel.partition("<")[0] for launch in gpu.launches} == {"swizzle_scales", "quantize_rows"}


@emulated
def test_kept_weights_are_decoded_once(gpu: Driver, runtime: Runtime) -> None:
    before, session = runtime.products, ort.session(square(), device="cuda", keep_wide=True)
    assert [launch.kernel.partition("<")[0] for launch in gpu.launches] == ["dequantize"]
    for m in (3, 70):
        gpu.start(ANY_STREAM)
        x = heavy_tailed((m, 64))
        check(x, session.run(None, {"x": x})[0])
        weights = [launch for launch in gpu.launches if launch.parameters[3:6] == (64, 1, 64 * 64)]
        assert not weights
    assert runtime.products == before + 1


@emulated
def test_runs_from_several_threads_do_not_disturb_each_other(gpu: Driver) -> None:
    session = ort.session(square(), device="cuda")
    inputs = [heavy_tailed((m, 64), m) for m in (1, 7, 70, 100, 3, 64, 65, 128)]
    with ThreadPoolExecutor(4) as pool:
        for x, y in zip(inputs, pool.map(lambda x: session.run(None, {"x": x})[0], inputs), strict=True):
            check(x, y)


@emulated
@pytest.mark.parametrize("axis", [0, 1])
def test_nodes_give_the_bytes_of_the_reference(gpu: Driver, axis: int) -> None:
    x = heavy_tailed((40, 70))
    nodes = [node("MXFP8Quantize", "x", "e s", axis=axis), node("MXFP8Dequantize", "e s", "y", axis=axis)]
    graph = model(nodes, {"x": (contract.FLOAT, [40, 70])}, {"s": (contract.UINT8, None), "y": (contract.FLOAT, None)})
    scales, y = ort.session(graph, device="cuda").run(None, {"x": x})
    elements, expected = numpy_nodes.quantize(x, axis=axis)
    assert_same(scales, expected)
    assert_same(y, numpy_nodes.dequantize(elements, expected, axis=axis))
