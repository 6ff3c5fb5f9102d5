"""Executes a plan: launches kernels on a device, clears memory, and calls libraries for their products.

Works on addresses, so CuPy arrays, torch tensors and, in the tests, host memory all come through here. Nothing here
waits for the device. ONNX Runtime executes the same plans without Python (src/cuda_host/executor.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.planner import CLEAR, CODES, LAUNCH, MATMUL, NAMES, Dequantize, Fold, Plan


class Launch(NamedTuple):
    """One kernel launch; every argument is an address or a 64-bit integer."""

    kernel: str
    """As C++ writes it; the file has the name before the "<"."""
    grid: int
    arguments: tuple[int, ...]
    block: int = 256
    shared: int = 0
    """Bytes of shared memory beyond what the kernel declares."""


class Device(Protocol):
    """The functions of a device that plans need."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""

    @property
    def processors(self) -> int:
        """Number of multiprocessors."""

    def launch(self, launch: Launch, stream: int) -> None:
        """Queues a kernel."""

    def clear(self, address: int, size: int, stream: int) -> None:
        """Queues zeros into so many bytes."""

    def matmul_bf16(self, x: int, w: int, y: int, sizes: tuple[int, int, int], *, dtype: str, queue: Queue) -> None:
        """Queues y = x w^T with x [M, K], w [N, K] bfloat16 and y bfloat16 or float32, summed in float32 throughout."""


@dataclass(frozen=True)
class Queue:
    """Where work goes: a device, one of its streams, and an allocator for scratch memory."""

    device: Device
    stream: int
    allocate: Callable[[int], tuple[Any, int]]
    """Bytes -> (an object that keeps the memory alive, its address, aligned to 256)."""


class Fp8Product(NamedTuple):
    """A product y = x b^T that a library has to do on FP8 tensor cores; addresses, and sizes in the kernels' order."""

    how: int
    """`planner.BLOCK_SCALED`, `ROW_SCALED` or `UNSCALED`."""
    x: int
    x_scales: int
    b: int
    b_scales: int
    y: int
    """0 if the library has memory of its own."""
    m: int
    n: int
    k: int
    x_kind: str
    b_kind: str
    dtype: str
    """Dtype of y."""


class WideWeight(NamedTuple):
    """A weight in bfloat16, kept between products: `wide_weight` makes one."""

    data: int
    inexact: int
    """Address of a word that is not 0 if bfloat16 cannot hold the weight."""
    memory: Any


class FoldedOperand(NamedTuple):
    """An operand with one scale per row, as `folding.fold` defines it: `fold` makes one."""

    data: int
    """Address of E4M3 elements [rows, K]."""
    scales: int
    """Address of float32 [rows]."""
    memory: tuple[Any, Any]
    """The objects of `Queue.allocate` that keep both alive."""


def run(plan: Plan, queue: Queue, fp8_product: Callable[[Fp8Product, Any], int] | None = None) -> None:
    """Queues the steps of a plan.

    Args:
        plan: from the planner.
        queue: where the work goes.
        fp8_product: queues an FP8 product of a library, from the product and the scratch memory that `Queue.allocate`
            returned, and returns the address of the result.
    """
    memory, scratch = queue.allocate(plan.scratch_bytes) if plan.scratch_bytes else (None, 0)
    device, stream, names, result = queue.device, queue.stream, planner.kernels(), 0
    for what, kernel, grid, block, shared, in_scratch, in_result, values in plan.steps():
        # Plans do not know where scratch memory is, nor where a library puts its result: those arguments are offsets.
        arguments = [*values]
        for i in _positions(in_scratch):
            arguments[i] += scratch
        # A product in front of this step may have put its result into memory of its own.
        for i in _positions(in_result):
            arguments[i] = result
        if what == LAUNCH:
            device.launch(Launch(names[kernel], grid, tuple(arguments), block, shared), stream)
        elif what == CLEAR:
            device.clear(arguments[0], 4 * arguments[1], stream)
        elif what == MATMUL:
            x, w, y, m, n, k, dtype = arguments
            device.matmul_bf16(x, w, y, (m, n, k), dtype=NAMES[dtype], queue=queue)
        else:
            assert fp8_product is not None  # the plan has such a step only if `Place.libraries` named the library
            x, x_scales, b, b_scales, y, m, n, k, x_kind, b_kind, dtype = arguments
            kinds = NAMES[x_kind], NAMES[b_kind], NAMES[dtype]
            result = fp8_product(Fp8Product(what, x, x_scales, b, b_scales, y, m, n, k, *kinds), memory)
    # Alive until everything that reads it is queued: allocators reuse freed memory for later work of the stream only.
    del memory


# Few different masks occur, and the loop over bits would run for each argument mask of each step.
@functools.cache
def _positions(bits: int) -> tuple[int, ...]:
    return tuple(i for i in range(32) if bits >> i & 1)


def wide_weight(queue: Queue, b_format: str, b: tuple[int, int], shape: tuple[int, int]) -> WideWeight:
    """Returns b = (elements, scales) of [N, K] in bfloat16, for products that read it again and again.

    Twice the memory of the elements, and no dequantizing.
    """
    n, k = shape
    # One allocation for both: a word that says whether bfloat16 is exact, and behind it, aligned to 256, the weight.
    memory, inexact = queue.allocate(256 + 2 * n * k)
    data = inexact + 256
    run(planner.dequantize(Dequantize(CODES[b_format], CODES["bfloat16"], *b, n, k, 1, data, inexact)), queue)
    return WideWeight(data, inexact, memory)


def fold(queue: Queue, x: tuple[int, int], shape: tuple[int, int]) -> FoldedOperand:
    """Returns x = (elements, scales) of [rows, K], E4M3, with one scale per row. K % 32 = 0, x aligned to 16."""
    rows, k = shape
    elements, data = queue.allocate(rows * k)
    scales, address = queue.allocate(4 * rows)
    run(planner.fold(Fold(*x, rows, k, data, address)), queue)
    return FoldedOperand(data, address, (elements, scales))
