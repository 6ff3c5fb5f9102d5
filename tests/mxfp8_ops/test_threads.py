"""Threads under stress: sessions, direct calls, forks, and torch's OpenMP runtime, whose threads wait busily."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from compare import assert_same
from onnx import helper
from ort_models import FLOAT, model, node

from mxfp8_ops import cpu, native, ort

K = 512
TASKS = Path("/proc/self/task")
needs_proc = pytest.mark.skipif(not TASKS.is_dir(), reason="needs /proc")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def own_pool() -> Iterator[None]:
    """The library's own pool, also where tests before have used torch's threads."""
    native.use_openmp(on=False)
    yield
    native.use_openmp(on="torch" in sys.modules)


def output_of(script: str, stdin: bytes = b"") -> list[str]:
    """Returns the words that a Python script prints in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=stdin, capture_output=True, check=True, env=environment, timeout=120)
    return done.stdout.decode().split()


def same_in_a_child(quantize, expected: np.ndarray) -> bool:
    """Whether `quantize` gives these elements in a forked child, which has threads of its own."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if bool((quantize() == expected).all()) else 1)
    return os.waitpid(child, 0)[1] == 0


# --- The library's own pool, and ONNX Runtime's -----------------------------------------------------------------------


def branches(width: int, depth: int) -> bytes:
    """`width` independent chains of `depth` quantized linears on one input, so that nodes can run side by side."""
    rng, nodes, weights = np.random.default_rng(0), [], {}
    for i in range(width):
        last = "x"
        for tag in (f"{i}_{j}" for j in range(depth)):
            packed = cpu.pack(rng.standard_normal((K, K), np.float32) / np.float32(K**0.5))
            weights |= {f"b{tag}": packed.elements.view(ml_dtypes.float8_e4m3fn), f"s{tag}": packed.scales}
            nodes.append(node("MXFP8Quantize", last, f"e{tag} es{tag}"))
            nodes.append(node("MXFP8Gemm", f"e{tag} es{tag} b{tag} s{tag}", f"y{tag}"))
            last = f"y{tag}"
        nodes.append(helper.make_node("Identity", [last], [f"out{i}"]))
    shape = (FLOAT, ["m", K])
    return model(nodes, {"x": shape}, {f"out{i}": shape for i in range(width)}, **weights)


def session(proto: bytes, intra: int = 2, inter: int = 0) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = intra
    if inter:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = inter
    return ort.session(proto, session_options=options)


def check(one: onnxruntime.InferenceSession, x: np.ndarray, expected: list[np.ndarray]) -> None:
    for y, wanted in zip(one.run(None, {"x": x}), expected, strict=True):
        assert_same(y, wanted, f"{len(x)} rows")


@pytest.fixture(scope="module")
def proto() -> bytes:
    return branches(4, 3)


@pytest.fixture(scope="module")
def cases(proto) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Inputs, and the results of a session with one thread."""
    one = session(proto, intra=1)
    inputs = [np.random.default_rng(m).standard_normal((m, K), np.float32) for m in (1, 2, 7, 16, 17, 64, 65, 130)]
    return [(x, one.run(None, {"x": x})) for x in inputs]


def test_many_sessions_run_at_once(own_pool, proto, cases):
    """Half of them run nodes side by side; each runs from its own thread, and sessions come and go meanwhile."""

    def work(index: int) -> None:
        for turn in range(2):
            one = session(proto, intra=1 + index % 3, inter=4 if index % 2 == 0 else 0)
            for i in range(len(cases)):
                check(one, *cases[(i + index + turn) % len(cases)])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_sessions_and_direct_calls_run_at_once(own_pool, proto, cases):
    one = session(proto, inter=4)
    x = np.random.default_rng(1).standard_normal((700, 1024), np.float32)
    expected = cpu.quantize(x, threads=1)

    def work(index: int) -> None:
        if index % 2:
            check(one, *cases[index % len(cases)])
            return
        for got, wanted in zip(cpu.quantize(x, threads=index % 5), expected, strict=True):
            assert_same(got, wanted)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(60)))


@needs_proc
def test_a_session_with_one_thread_starts_no_thread_and_loads_no_openmp(proto):
    script = """
import sys
from pathlib import Path
import numpy as np, onnxruntime
from mxfp8_ops import ort
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = ort.session(sys.stdin.buffer.read(), session_options=options)
count = lambda: len(list(Path("/proc/self/task").iterdir()))
before = count()
session.run(None, {"x": np.ones((130, 512), np.float32)})
print(count() - before, "gomp" in Path("/proc/self/maps").read_text())
"""
    assert output_of(script, proto) == ["0", "False"]


@needs_proc
def test_the_pool_never_grows_beyond_what_one_call_asks_for(own_pool):
    x = np.ones((4000, 1024), np.float32)
    cpu.quantize(x, threads=4)
    before = {task.name for task in TASKS.iterdir()}
    callers = [threading.Thread(target=lambda: [cpu.quantize(x, threads=4) for _ in range(20)]) for _ in range(6)]
    for caller in callers:
        caller.start()
    during = {task.name for task in TASKS.iterdir()} - {str(caller.native_id) for caller in callers}
    for caller in callers:
        caller.join()
    assert not during - before


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_fork_may_come_while_other_threads_call(own_pool):
    """A fork may catch the pool at any moment."""
    x = np.random.default_rng(0).standard_normal((600, 1024), np.float32)
    elements = cpu.quantize(x, threads=1)[0]
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            cpu.quantize(x, threads=3)

    busy = [threading.Thread(target=keep_busy) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(25):
            assert same_in_a_child(lambda: cpu.quantize(x, threads=3)[0], elements), "the child hung or was wrong"
    finally:
        stop.set()
        for thread in busy:
            thread.join()


# --- torch's OpenMP runtime -------------------------------------------------------------------------------------------


@pytest.fixture
def openmp():
    """Torch with our ops, where it brings an OpenMP runtime."""
    torch = pytest.importorskip("torch")
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        pytest.skip("needs an OpenMP runtime")
    from mxfp8_ops.torch_ops import operands

    operands.library()
    return torch


@pytest.fixture(params=[2, 5])
def torch(request: pytest.FixtureRequest, openmp):
    """The same, with so many threads."""
    before = openmp.get_num_threads()
    openmp.set_num_threads(request.param)
    yield openmp
    openmp.set_num_threads(before)


def products(x):
    import torch

    a, b = torch.ops.mxfp8.quantize(x), torch.ops.mxfp8.quantize(x[:700])
    return *a, *b, torch.ops.mxfp8.gemm(*a, *b), torch.ops.mxfp8.dequantize(*a)


def test_callers_on_openmp_get_the_bits_of_the_own_pool(torch):
    x = torch.randn(900, 512, generator=torch.Generator().manual_seed(0))
    native.use_openmp(on=False)
    expected = products(x)
    native.use_openmp(on=True)
    with ThreadPoolExecutor(4) as pool:
        for actual in [products(x), *pool.map(products, [x] * 12)]:
            assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_no_thread_is_added_to_those_of_torch(openmp):
    script = """
import os, torch
import mxfp8_ops.torch_ops
torch.set_num_threads(3)
torch.randn(1024, 1024) @ torch.randn(1024, 1024)
before = set(os.listdir("/proc/self/task"))
torch.ops.mxfp8.quantize(torch.randn(4096, 1024))
print(len(set(os.listdir("/proc/self/task")) - before))
"""
    assert output_of(script) == ["0"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_child_of_a_process_with_openmp_has_threads_of_its_own(torch):
    x = torch.randn(2000, 512)

    def quantize() -> np.ndarray:
        return torch.ops.mxfp8.quantize(x)[0].numpy()

    assert same_in_a_child(quantize, quantize()), "the child hung or was wrong"
