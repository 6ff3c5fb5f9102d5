"""Fixtures shared by all tests. The model builders are in `models.py`, which pyproject.toml puts on the path."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from process_pool import ProcessPool
from releases import release

# A shell that starts a command in the background makes it ignore SIGINT, and so do its child processes. The tests of
# interrupts need the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in two processes, each with threads of torch. An idle thread that spins keeps the other process waiting.
# Here they sleep: tests of training take a third of the time. OpenMP reads this when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

LONGEST = (
    "test_cuda_gemms.py",
    "test_cuda_build.py",
    "test_torch_training_run.py",
    "test_distributed.py",
    "test_torch_models.py",
    "test_random_graphs.py",
    "test_cpu.py",
    "test_real_models.py",
    "test_to_onnx_files.py",
    "test_from_hf.py",
    "test_convert.py",
    "test_convert_runs.py",
    "test_tune.py",
    "test_documentation.py",
    "test_streaming.py",
    "test_ort_devices.py",
    "test_torch_caches.py",
    "test_verify.py",
    "test_torch_parity.py",
    "test_torch_programs.py",
    "test_to_onnx.py",
)
"""Files that take longest. They come first, so that none is left to one process when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessPool]:
    """Two processes with a process group."""
    with ProcessPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[ProcessPool]:
    with ProcessPool(4) as pool:
        yield pool


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> ProcessPool:
    """The pool that a test's mark names, or two processes."""
    processes: ProcessPool = request.getfixturevalue(getattr(request, "param", "two"))
    return processes


CANNOT = {
    "onnxruntime": (
        (1, 24),
        r"Unsupported model IR version|Opset \d+ is under development|No corresponding Numpy type|ReduceMax node"
        r"|a profile that is not JSON|quantization\.matmul_nbits_quantizer"
        r"|only supports past_key and present_key both",
    ),
    "onnx": ((1, 21), r"which onnx \S+ knows|No Op registered for \w+ with domain_version"),
}
"""The release that can, and what an error says before it: of ONNX Runtime, where it cannot read a model, hand out
float8, take the maximum of nothing, write some names, quantize to 8 bits by blocks, or attend to no past; of onnx,
where it does not know an opset or IR version."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skips a test that needs more of ONNX Runtime or onnx than the installed release can do."""
    try:
        return (yield)
    except Exception as error:
        old = {package: text for package, (able, text) in CANNOT.items() if release(package) < able}
        chain: BaseException | None = error
        while chain is not None:
            for package, text in old.items():
                if found := re.search(text, str(chain)):
                    pytest.skip(f"{package} {metadata.version(package)}: {found[0]}")
            chain = chain.__cause__ or chain.__context__
        raise


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runtime() -> Iterator[None]:
    """Runs a test twice: what `oracle.run` runs, it runs by the nodes' function bodies and then by our kernels."""
    import oracle  # here, because it imports all of mxfp8_graph, which a machine that only tests kernels need not have

    oracle.runtime = oracle.Runtime(rewritten={})
    yield
    oracle.runtime = oracle.Runtime()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls a test with the fixture `runtime`, and a second time if it ran a model at all."""
    oracle = sys.modules.get("oracle")
    if oracle is None or oracle.runtime.rewritten is None:  # the fixture did not run
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for oracle.runtime.kernels in (False, True):
        if oracle.runtime.kernels and "tmp_path" in arguments:  # what the first call wrote is not in the way
            arguments["tmp_path"] /= "kernels"
            arguments["tmp_path"].mkdir()
        print("nodes run by our kernels:" if oracle.runtime.kernels else "nodes run by their function bodies:")
        pyfuncitem.obj(**arguments)
        if not oracle.runtime.has_run:
            break
    return True
