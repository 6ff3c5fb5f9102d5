"""Device "cuda-copies" in ONNX Runtime, without a GPU: the native code for it, over an emulated CUDA driver."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import test_ort
from compare import heavy_tailed
from cuda_driver_emulation import Driver, machine

from mxfp8_ops import contract, numerics, ort


def weight_gemm(n: int, k: int) -> bytes:
    """Returns a model y = x w^T whose packed weight [n, k] is a constant."""
    elements, scales = numerics.quantize(heavy_tailed((n, k)))
    return test_ort.model(
        [test_ort.node("MXFP8WeightGemm", "x be bs", "y")],
        {"x": (contract.FLOAT, [None, k])},
        {"y": (contract.FLOAT, None)},
        be=elements.view(ml_dtypes.float8_e4m3fn),
        bs=scales,
    )


class TestEverythingTheCpuKernelsDo:
    """The tests of test_ort.py, with every session on the GPU."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch) -> Iterator[Driver]:
        with machine(monkeypatch) as gpu:
            monkeypatch.setattr(ort, "session", functools.partial(ort.session, device="cuda-copies"))
            yield gpu


for _name, _test in inspect.getmembers(test_ort, inspect.isfunction):
    if _name.startswith("test_"):
        setattr(TestEverythingTheCpuKernelsDo, _name, staticmethod(_test))


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Driver]:
    with machine(monkeypatch) as gpu:
        yield gpu


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


def test_a_weight_that_does_not_fit_is_an_error(gpu):
    gpu.library.set_most(100)
    with pytest.raises(Exception, match=r"'the_y': GPU 0: cannot allocate memory for a weight: .*OUT_OF_MEMORY"):
        ort.session(weight_gemm(7, 64), device="cuda-copies")


def test_a_node_that_cannot_keep_all_its_constants_keeps_none(gpu):
    elements, scales = numerics.quantize(heavy_tailed((40, 1)))
    model = test_ort.model(
        [test_ort.node("MXFP8WeightGemm", "x be bs bias", "y")],
        {"x": (contract.FLOAT, [None, 1])},
        {"y": (contract.FLOAT, None)},
        be=elements.view(ml_dtypes.float8_e4m3fn),
        bs=scales,
        bias=np.ones(40, np.float32),
    )
    before = gpu.allocations
    gpu.library.set_most(100)  # the elements and the scales fit, the 160 bytes of the bias do not
    with pytest.raises(Exception, match="cannot allocate memory for a weight"):
        ort.session(model, device="cuda-copies")
    assert gpu.allocations == before


def test_sessions_on_the_gpu_and_on_the_processor_side_by_side(gpu):
    model, x = weight_gemm(7, 64), heavy_tailed((3, 64))
    sessions = [ort.session(model, device=device) for device in ("cuda-copies", "cpu")]
    results = [session.run(None, {"x": x})[0] for session in sessions]
    assert [launch.kernel.partition("<")[0] for launch in gpu.launches] == ["gemm_skinny"]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-4)
