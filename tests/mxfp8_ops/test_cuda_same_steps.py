"""CuPy, PyTorch and ONNX Runtime do the same steps for the same operation, each on addresses of its own.

Every operand has its own memory, so a pointer that is passed in another's place shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda_driver_emulation import Driver, driver, machine
from cuda_emulation import FORMATS, aligned
from grids import looped, pairwise
from ort_emulation import STREAM, Cublas, CudaProvider, own_library
from test_cuda_frontends import array, stand_in

from mxfp8_ops import contract, cuda, native, numerics
from mxfp8_ops.checks import scale_count
from mxfp8_ops.cuda import cublaslt, device
from mxfp8_ops.cuda import loader as cuda_loader
from mxfp8_ops.cuda.execution import Queue
from mxfp8_ops.cuda.planner import CODES

torch = pytest.importorskip("torch")
torch_cuda = pytest.importorskip("mxfp8_ops.torch_ops.cuda")

X_KINDS = ("float32", "float16", "bfloat16", *FORMATS)
MATMUL = "matmul"
Memory = dict[str, tuple[int, int]]
"""Name of an operand -> its address, bytes."""
Steps = list[tuple[str, int, tuple[Any, ...]]]
"""Kernel, grid, arguments; addresses as (operand, offset)."""


class Recorder:
    """A device that only notes what is queued: through `driver`, or for cuBLAS."""

    index, capability, processors = Driver.index, Driver.capability, Driver.processors

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.products: Steps = []
        self.kept: list[np.ndarray] = []
        self.memory: Memory = {}

    @property
    def steps(self) -> Steps:
        return [(work.kernel, work.grid, work.parameters) for work in self.driver.work] + self.products

    def allocate(self, size: int) -> tuple[Any, int]:
        self.kept.append(memory := aligned(size))
        self.memory["scratch"] = memory.ctypes.data, size
        return memory, memory.ctypes.data

    def matmul_bf16(self, x: int, w: int, y: int, sizes: tuple[int, int, int], *, dtype: str, queue: Queue) -> None:
        self.products.append((MATMUL, 0, (x, w, y, *sizes, 14 if dtype == "bfloat16" else 0)))


def named(steps: Steps, memory: Memory) -> Steps:
    """Returns steps whose addresses are (operand, offset); what is empty has none."""

    def name(value: int) -> Any:
        for operand, (address, size) in memory.items():
            if value == address and not size:
                return 0
            if address <= value < address + size:
                return operand, value - address
        assert value < 2**32, f"{value:#x} is no operand of {memory}"
        return value

    return [(kernel, grid, tuple(map(name, arguments))) for kernel, grid, arguments in steps]


@pytest.fixture
def recorder(monkeypatch, ort_steps) -> Recorder:
    """Behind CuPy and torch."""
    made = Recorder(driver())
    queue = Queue(made, STREAM, made.allocate)
    cuda_loader.give(native.load())
    monkeypatch.setattr(torch_cuda, "_queue", lambda x: queue)
    monkeypatch.setattr(device, "cupy_module", stand_in)
    monkeypatch.setattr("mxfp8_ops.cuda.cupy_arrays._queue", lambda: queue)
    monkeypatch.setattr(cublaslt, "available", lambda: False)
    return made


@pytest.fixture
def ort_steps(monkeypatch) -> Iterator[Callable[..., Steps]]:
    """Makes and runs a node of ONNX Runtime; returns its steps, products of cuBLAS after the others."""
    cublas = Cublas()
    monkeypatch.setattr(cuda_loader, "_cublas", cublas.addresses)
    with machine(monkeypatch) as gpu:
        provider = CudaProvider(own_library(), gpu)
        cuda_loader.give(provider.library)

        def steps(op: contract.Op, names: list[str], inputs: list[np.ndarray], codes: list[int], **given: Any) -> Steps:
            gpu.start(STREAM, run=False)
            cublas.products.clear()
            provider.memory.clear()
            provider.run(op, inputs, codes, **given)
            found = [(work.kernel, work.grid, work.parameters) for work in gpu.work]
            found += [(MATMUL, 0, product) for product in cublas.products]
            called = {f"input {i}": name for i, name in enumerate(names)} | {"scratch": "scratch"}
            outputs = ("elements", "scales") if op is contract.QUANTIZE else ("y",)
            called |= {f"output {i}": name for i, name in enumerate(outputs)}
            return named(found, {called[key]: at for key, at in provider.memory.items()})

        yield steps


def at(*arrays: Any) -> list[tuple[int, int]]:
    """Returns the address and bytes of arrays or tensors."""
    return [(a.ctypes.data, a.nbytes) if isinstance(a, np.ndarray) else (a.data_ptr(), a.nbytes) for a in arrays]


def tensor(a: np.ndarray) -> Any:
    return (
        torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype.name == "bfloat16" else torch.from_numpy(a)
    )


def taken(recorder: Recorder, run: Callable[[], dict[str, Any]]) -> Steps:
    """Returns what `run` queues; it returns its operands by name."""
    recorder.products, recorder.memory = [], {}
    recorder.driver.start(STREAM, run=False, bounded=False)
    operands = run()
    memory = dict(zip(operands, at(*operands.values()), strict=True)) | recorder.memory
    return named(recorder.steps, memory)


SIZES = (
    (1, 16, 8192),
    (64, 40, 16384),
    (1, 33, 96),
    (9, 40, 64),
    (64, 17, 2048),
    (65, 272, 96),
    (300, 64, 37),
    (5, 7, 40),
    (3, 5, 0),
    (0, 5, 32),
)


@looped("size, kind, dtype", pairwise(size=SIZES, kind=X_KINDS, dtype=("float32", "float16", "bfloat16")))
def test_gemms(recorder, ort_steps, size, kind, dtype):
    check_gemm(recorder, ort_steps, size, kind, dtype, dtype == "float16")


@looped("size, kind", [*itertools.product(SIZES, X_KINDS[:3])])
def test_gemms_of_values_rounded_to_bfloat16(recorder, ort_steps, size, kind):
    steps = check_gemm(recorder, ort_steps, size, kind, "float32", False, rounds=True)
    names = [kernel.partition("<")[0] for kernel, *_ in steps]
    rounds = kind != "bfloat16" and 0 not in (size[0], size[2])
    assert names.count("bfloat16_rounded") == rounds, names
    assert "bfloat16_parts" not in names


@pytest.mark.slow
def test_parts_of_many_values_go_in_slices(recorder, ort_steps):
    steps = check_gemm(recorder, ort_steps, (65, 360_000, 32), "float32", "bfloat16", False)
    assert [kernel.partition("<")[0] for kernel, *_ in steps].count("bfloat16_parts") == 2


def check_gemm(recorder, ort_steps, size, kind, dtype, with_bias, *, rounds=False):  # noqa: PLR0917
    m, n, k = size
    quantized, blocks, fmt = kind in FORMATS, scale_count(k), "int8" if kind in {"int8", "float16"} else "e5m2"
    operands = {"x": np.zeros((m, k), np.uint8 if quantized else numerics.value_dtype(kind))}
    if quantized:
        operands["x_scales"] = np.zeros((m, blocks), np.uint8)
    operands |= {"b": np.zeros((n, k), np.uint8), "b_scales": np.zeros((n, blocks), np.uint8)}
    if with_bias:
        operands["bias"] = np.zeros(n, np.float32)
    codes = [CODES[kind], contract.UINT8, CODES[fmt], contract.UINT8, contract.FLOAT]
    if not quantized:
        del codes[1]
    op = contract.GEMM if quantized else contract.WEIGHT_GEMM
    settings = {"activation_dtype": contract.BFLOAT16} if rounds else {}
    expected = ort_steps(
        op, [*operands], [*operands.values()], codes[: len(operands)], output_dtype=CODES[dtype], **settings
    )

    formats = {"a_format": kind, "b_format": fmt} if quantized else {"b_format": fmt}
    by_name = {"activation_dtype": "bfloat16"} if rounds else {}
    by_dtype = {"activation_dtype": torch.bfloat16} if rounds else {}

    def by_cupy() -> dict[str, Any]:
        held = {name: array(a) for name, a in operands.items()}
        y = (cuda.gemm if quantized else cuda.weight_gemm)(*held.values(), **formats, **by_name, dtype=dtype)
        return held | {"y": y}

    def by_torch() -> dict[str, Any]:
        held = {name: tensor(a) for name, a in operands.items()}
        run = torch_cuda.gemm if quantized else torch_cuda.weight_gemm
        return held | {"y": run(*held.values(), **formats, **by_dtype, dtype=getattr(torch, dtype))}

    for run in (by_cupy, by_torch):
        assert taken(recorder, run) == expected, run.__name__
    assert bool(expected) == bool(m)
    return expected


SHAPES = ((700, 96, 1), (33, 50, 1), (3, 70, 528), (1, 64, 33), (4, 0, 1))


@looped("shape, fmt", [*itertools.product(SHAPES, FORMATS)])
def test_quantize_and_dequantize(recorder, ort_steps, shape, fmt):
    dims, scale_dims = (s[: 3 if shape[2] > 1 else 2] for s in (shape, (shape[0], scale_count(shape[1]), shape[2])))
    x = np.zeros(dims, np.float16)
    given = {"axis": 1, "output_dtype": CODES[fmt], "scale_rounding": "floor"}
    expected = ort_steps(contract.QUANTIZE, ["x"], [x], [contract.FLOAT16], **given)

    def by_cupy() -> dict[str, Any]:
        pair = cuda.quantize(array(x), axis=1, element_format=fmt, scale_rounding="floor")
        return {"x": x, "elements": pair[0], "scales": pair[1]}

    def by_torch() -> dict[str, Any]:
        pair = torch_cuda.quantize(torch.from_numpy(x), 1, fmt, "floor")
        return {"x": x, "elements": pair[0], "scales": pair[1]}

    for run in (by_cupy, by_torch):
        assert taken(recorder, run) == expected, run.__name__

    codes = {"elements": np.zeros(dims, np.uint8), "scales": np.zeros(scale_dims, np.uint8)}
    given = {"axis": 1, "output_dtype": contract.BFLOAT16}
    expected = ort_steps(contract.DEQUANTIZE, [*codes], [*codes.values()], [CODES[fmt], contract.UINT8], **given)

    def back_by_cupy() -> dict[str, Any]:
        y = cuda.dequantize(*map(array, codes.values()), axis=1, element_format=fmt, dtype="bfloat16")
        return codes | {"y": y}

    def back_by_torch() -> dict[str, Any]:
        y = torch_cuda.dequantize(*map(torch.from_numpy, codes.values()), 1, fmt, torch.bfloat16)
        return codes | {"y": y}

    for run in (back_by_cupy, back_by_torch):
        assert taken(recorder, run) == expected, run.__name__
    assert bool(expected) == bool(x.size)


def test_embedding(recorder, ort_steps):
    operands = {"indices": np.zeros(5, np.int32)}
    operands |= {"b": np.zeros((40, 96), np.uint8), "b_scales": np.zeros((40, 3), np.uint8)}
    codes = [contract.INT32, CODES["e5m2"], contract.UINT8]
    expected = ort_steps(contract.EMBEDDING, [*operands], [*operands.values()], codes, output_dtype=contract.BFLOAT16)

    def by_cupy() -> dict[str, Any]:
        y = cuda.embedding(*map(array, operands.values()), b_format="e5m2", dtype="bfloat16")
        return operands | {"y": y}

    assert taken(recorder, by_cupy) == expected
    assert expected


def test_swapped_operands_would_show():
    memory = {"x": (1 << 20, 64), "b": (1 << 21, 64)}
    steps = [named([("kernel", 1, addresses)], memory) for addresses in itertools.permutations((1 << 20, 1 << 21))]
    assert steps[0] != steps[1]
