"""Threads under stress: many sessions, inter-op parallelism, concurrent callers, forks; results and thread counts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from mxfp8_ops import contract, cpu, native, ort

FLOAT = TensorProto.FLOAT
K = 512


@pytest.fixture(autouse=True, scope="module")
def own_threads() -> Iterator[None]:
    """The library's own pool, also where tests before have used torch's threads."""
    native.use_openmp(on=False)
    yield
    native.use_openmp(on="torch" in sys.modules)


def branches(width: int, depth: int) -> bytes:
    """`width` independent chains of `depth` quantized linears on one input, so that nodes can run side by side."""
    rng = np.random.default_rng(0)
    nodes, weights = [], {}
    for i in range(width):
        last = "x"
        for j in range(depth):
            tag = f"{i}_{j}"
            packed = cpu.pack(rng.standard_normal((K, K), np.float32) / np.float32(K**0.5))
            weights |= {f"b{tag}": packed.elements, f"s{tag}": packed.scales}
            nodes.append(helper.make_node("MXFP8Quantize", [last], [f"e{tag}", f"es{tag}"], domain=contract.DOMAIN))
            operands = [f"e{tag}", f"es{tag}", f"b{tag}", f"s{tag}"]
            nodes.append(helper.make_node("MXFP8Gemm", operands, [f"y{tag}"], domain=contract.DOMAIN))
            last = f"y{tag}"
        nodes.append(helper.make_node("Identity", [last], [f"out{i}"]))
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    for tensor in initializers:
        if tensor.name.startswith("b"):
            tensor.data_type = TensorProto.FLOAT8E4M3FN
    graph = helper.make_graph(
        nodes,
        "branches",
        [helper.make_tensor_value_info("x", FLOAT, ["m", K])],
        [helper.make_tensor_value_info(f"out{i}", FLOAT, ["m", K]) for i in range(width)],
        initializers,
    )
    opsets = [helper.make_opsetid("", contract.MIN_OPSET), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def options(*, parallel: bool = False, intra: int = 2, inter: int = 4) -> onnxruntime.SessionOptions:
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = intra
    if parallel:
        chosen.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        chosen.inter_op_num_threads = inter
    return chosen


def assert_all_same(what: str, actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        differ = np.argwhere(got != wanted)
        assert not len(differ), f"{what}: output {index} differs at {differ[0]}: {got[tuple(differ[0])]}"


@pytest.fixture(scope="module")
def model() -> bytes:
    return branches(4, 3)


@pytest.fixture(scope="module")
def inputs() -> list[np.ndarray]:
    return [np.random.default_rng(m).standard_normal((m, K), np.float32) for m in (1, 2, 7, 16, 17, 64, 65, 130)]


@pytest.fixture(scope="module")
def expected(model, inputs) -> list[list[np.ndarray]]:
    session = ort.session(model, session_options=options(intra=1))
    return [session.run(None, {"x": x}) for x in inputs]


@pytest.mark.parametrize(("intra", "inter"), [(1, 2), (3, 8)])
def test_inter_op_parallelism(model, inputs, expected, intra, inter):
    session = ort.session(model, session_options=options(parallel=True, intra=intra, inter=inter))
    for _ in range(3):
        for x, wanted in zip(inputs, expected, strict=True):
            assert_all_same(f"{len(x)} rows", session.run(None, {"x": x}), wanted)


def test_many_sessions_at_once(model, inputs, expected):
    """Half of them with inter-op parallelism; each run from its own thread, made and dropped meanwhile."""

    def work(index: int) -> None:
        for turn in range(2):
            session = ort.session(model, session_options=options(parallel=index % 2 == 0))
            for i in range(len(inputs)):
                at = (i + index + turn) % len(inputs)
                assert_all_same(f"session {index}", session.run(None, {"x": inputs[at]}), expected[at])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_sessions_and_direct_calls_at_once(model, inputs, expected):
    """The library's own pool and ONNX Runtime's side by side."""
    session = ort.session(model, session_options=options(parallel=True))
    x = np.random.default_rng(1).standard_normal((700, 1024), np.float32)
    elements, scales = cpu.quantize(x, threads=1)

    def run(index: int) -> None:
        at = index % len(inputs)
        assert_all_same("session", session.run(None, {"x": inputs[at]}), expected[at])

    def call(index: int) -> None:
        actual = cpu.quantize(x, threads=index % 5)
        assert_all_same("quantize", list(actual), [elements, scales])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: (run if i % 2 else call)(i), range(60)))


def test_a_session_with_one_thread_starts_none(model, inputs):
    """Inside ONNX Runtime its pool does the work: the library starts no threads of its own, and no OpenMP is loaded."""
    script = """
import sys, threading
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
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs /proc")
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=model,
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.decode().split() == ["0", "False"], done.stderr.decode()


def test_the_pool_never_grows_beyond_what_one_call_asks_for():
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("needs /proc")
    x = np.ones((4000, 1024), np.float32)
    cpu.quantize(x, threads=4)
    before = {task.name for task in tasks.iterdir()}
    callers = [threading.Thread(target=lambda: [cpu.quantize(x, threads=4) for _ in range(20)]) for _ in range(6)]
    for caller in callers:
        caller.start()
    ours = {str(caller.native_id) for caller in callers}
    during = {task.name for task in tasks.iterdir()}
    for caller in callers:
        caller.join()
    assert not during - before - ours


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_fork_while_other_threads_call():
    """A fork may catch the pool at any moment; the child starts a pool of its own."""
    x = np.random.default_rng(0).standard_normal((600, 1024), np.float32)
    elements, scales = cpu.quantize(x, threads=1)
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            cpu.quantize(x, threads=3)

    busy = [threading.Thread(target=keep_busy) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(25):
            child = os.fork()
            if child == 0:
                import signal

                signal.alarm(30)
                actual = cpu.quantize(x, threads=3)
                same = (actual[0] == elements).all() and (actual[1] == scales).all()
                os._exit(0 if same else 1)
            assert os.waitpid(child, 0)[1] == 0, "a forked child hung or was wrong"
    finally:
        stop.set()
        for thread in busy:
            thread.join()
