"""The torch ops on the threads of torch's own OpenMP runtime, which wait busily: neither pool waits."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from mxfp8_ops import native  # noqa: E402
from mxfp8_ops.torch_ops import operands  # noqa: E402

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"), reason="needs an OpenMP runtime"
)


@pytest.fixture(params=[2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def own_pool() -> Iterator[None]:
    operands.library()
    native.use_openmp(on=False)
    yield
    native.use_openmp(on=True)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = torch.ops.mxfp8.quantize(x), torch.ops.mxfp8.quantize(x[:700])
    return *a, *b, torch.ops.mxfp8.gemm(*a, *b), torch.ops.mxfp8.dequantize(*a)


def test_the_same_bits_as_on_the_own_pool(threads, own_pool):
    x = values(900, 512)
    expected = products(x)
    native.use_openmp(on=True)
    for one, other in zip(products(x), expected, strict=True):
        assert torch.equal(one, other)


def test_callers_in_several_threads(threads):
    x = values(900, 512)
    expected = products(x)
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(products, [x] * 12):
            assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


THREADS = """
import os, torch
import mxfp8_ops.torch_ops
torch.set_num_threads(3)
torch.randn(1024, 1024) @ torch.randn(1024, 1024)
before = set(os.listdir("/proc/self/task"))
torch.ops.mxfp8.quantize(torch.randn(4096, 1024))
print(len(set(os.listdir("/proc/self/task")) - before))
"""


def test_no_thread_is_added_to_those_of_torch():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.strip() == "0"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_child_has_threads_of_its_own(threads):
    x = values(2000, 512)
    elements, _ = torch.ops.mxfp8.quantize(x)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        actual, _ = torch.ops.mxfp8.quantize(x)
        os._exit(0 if bool((actual.numpy() == elements.numpy()).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child hung or was wrong"
