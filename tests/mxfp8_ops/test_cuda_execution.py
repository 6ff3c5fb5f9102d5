"""Plans for CUDA that Python queues: kernels are loaded, work is queued in order, errors name the GPU."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator

import cuda_driver_emulation
import pytest
from cuda_driver_emulation import Driver
from cuda_emulation import aligned
from cupy_stand_in import stand_in

from mxfp8_ops import native
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
        planner.run(planner.gemm(H200, SPLIT), planner.queue(0, STREAM))


def test_what_cannot_be_queued_is_an_error(gpu):
    first = planner.gemm(H200, SPLIT)
    planner.gemm(H200, SPLIT)
    with pytest.raises(ShapeError, match="not the latest plan of this thread; expected that one; plan again"):
        planner.run(first, planner.queue(0, STREAM, 1 << 30))
    with pytest.raises(BackendError, match=r"GPU 0: cannot launch: CUDA error CUDA_ERROR_INVALID_CONTEXT; expected"):
        planner.plan(request(), planner.queue(0, STREAM + 1))
    with pytest.raises(BackendError, match="GPU 3: no such device"):
        planner.plan(request(), planner.queue(3, STREAM))
    assert (gpu.launches, gpu.library.context_depth()) == ([], 0)


# --- the device through CuPy -----------------------------------------------------------------------------------------


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
