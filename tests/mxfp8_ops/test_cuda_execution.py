"""Plans that are queued by the native library for Python, on an emulated driver: loading, order, errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import cuda_driver_emulation
import numpy as np
import pytest
from cuda_driver_emulation import Driver
from cuda_emulation import aligned
from test_cuda_frontends import stand_in

from mxfp8_ops import native
from mxfp8_ops.cuda import build, execution, loader, planner
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.cuda.execution import Queue
from mxfp8_ops.cuda.planner import Gemm, Place, Quantize
from mxfp8_ops.errors import BackendError, ShapeError

STREAM = 7
SPLIT = Gemm(16, 17, 16, *[1 << 20] * 2, *[1 << 20] * 2, 0, 1 << 20, 1, 16, 65536)
"""A product whose K is split, so that it needs scratch memory."""
H200 = Place(90, 132, 0)


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


def test_what_needs_scratch_memory_waits_for_it(gpu):
    plan = planner.gemm(H200, SPLIT, planner.queue(0, STREAM))
    assert (plan.done, plan.count, gpu.launches) == (0, 2, [])
    execution.run(plan, Queue(gpu, STREAM, lambda size: (None, 1 << 30)))
    assert [work.kernel.partition("<")[0] for work in gpu.launches] == ["gemm_skinny", "finish"]
    assert (gpu.launches[0].parameters[5], gpu.launches[1].parameters[0]) == (1 << 30, 1 << 30)
    with pytest.raises(ShapeError, match=r"no scratch memory; expected \d+ bytes"):
        planner.proceed(planner.gemm(H200, SPLIT), planner.queue(0, STREAM))


def test_a_plan_ends_with_the_next_one(gpu):
    first = planner.gemm(H200, SPLIT)
    planner.gemm(H200, SPLIT)
    with pytest.raises(ShapeError, match="not the latest plan of this thread; expected that one; plan again"):
        planner.proceed(first, planner.queue(0, STREAM, 1 << 30))
    assert gpu.launches == []


def test_a_launch_that_fails_names_the_gpu_and_the_error(gpu):
    with pytest.raises(BackendError, match=r"GPU 0: cannot launch: CUDA error CUDA_ERROR_INVALID_CONTEXT; expected"):
        planner.plan(request(), planner.queue(0, STREAM + 1))
    assert gpu.library.context_depth() == 0


def test_a_gpu_that_is_not_there(gpu):
    with pytest.raises(BackendError, match="GPU 3: no such device"):
        planner.plan(request(), planner.queue(3, STREAM))


def test_kernels_of_a_node_compile_at_the_same_time(monkeypatch):
    both = threading.Barrier(2, timeout=30)

    def compiled(source: str, kernel: str, arch: str) -> bytes:
        both.wait()  # raises unless the other kernel is being compiled too
        return kernel.encode()

    monkeypatch.setattr(cuda_device, "cupy_module", stand_in)
    monkeypatch.setattr(build, "cubin", compiled)
    monkeypatch.setattr(cuda_device, "_load", lambda kernel, code: (kernel, code))
    assert cuda_device.CudaDevice(0).functions(["finish", "embedding", "finish"]) == [
        ("finish", b"finish"), ("embedding", b"embedding"), ("finish", b"finish"),
    ]  # fmt: skip


def test_without_onnx_runtime_there_is_no_cublas_of_its_provider(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # importing it would raise
    assert loader._cublas() == {}


def test_memory_of_the_queue_is_alive_until_its_last_step(gpu):
    freed: list[str] = []

    class Memory:
        def __init__(self, size: int) -> None:
            self.data = aligned(size)

        def __del__(self) -> None:
            freed.append(f"after {len(gpu.launches)} launches")

    def allocate(size: int) -> tuple[Memory, int]:
        memory = Memory(size)
        return memory, np.asarray(memory.data).ctypes.data

    execution.run(planner.gemm(H200, SPLIT), Queue(gpu, STREAM, allocate))
    assert freed == ["after 2 launches"]
