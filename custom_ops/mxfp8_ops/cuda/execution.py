"""Does a plan of the planner on a device: scratch memory and the products of libraries; the library launches kernels.

Works on addresses, so CuPy arrays, torch tensors and, in the tests, host memory all come through here. Nothing here
waits for the device. ONNX Runtime executes the same plans without Python (src/cuda_host/executor.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.planner import CODES, MATMUL, NAMES, Dequantize, Plan


class Device(Protocol):
    """What plans need of a device."""

    index: int
    capability: tuple[int, int]
    processors: int
    """Number of multiprocessors."""

    def matmul_bf16(self, x: int, w: int, y: int, sizes: tuple[int, int, int], *, dtype: str, queue: Queue) -> None:
        """Queues y = x w^T with x [M, K], w [N, K] bfloat16 and y bfloat16 or float32, summed in float32 throughout."""


class Queue:
    """Where work goes: a device, one of its streams, and an allocator for scratch memory."""

    def __init__(self, device: Device, stream: int, allocate: Callable[[int], tuple[Any, int]]) -> None:
        """Takes an allocator: bytes -> (an object that keeps the memory alive, its address, aligned to 256)."""
        self.device, self.stream, self.allocate = device, stream, allocate
        self.packed = planner.queue(device.index, stream)
        """For the functions of the planner."""


class Fp8Product(NamedTuple):
    """A product y = x b^T, scaled by blocks, that a library has to do on FP8 tensor cores; addresses, then sizes."""

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


def run(plan: Plan, queue: Queue, fp8_product: Callable[[Fp8Product, Any], int] | None = None) -> None:
    """Queues the steps of a plan that are not queued yet.

    `fp8_product` queues an FP8 product of a library, from the product and the scratch memory that `Queue.allocate`
    returned, and returns the address of the result.

    Raises:
        BackendError: a launch fails.
    """
    if plan.done == plan.count:
        return
    memory, scratch = queue.allocate(plan.scratch_bytes) if plan.scratch_bytes else (None, 0)
    to, result = (queue.device.index, queue.stream, scratch), 0
    while (step := planner.proceed(plan, planner.queue(*to, result))) is not None:
        if step.what == MATMUL:
            x, w, y, m, n, k, dtype = step.arguments
            queue.device.matmul_bf16(x, w, y, (m, n, k), dtype=NAMES[dtype], queue=queue)
        else:
            assert fp8_product is not None  # the plan has such a step only if `Place.libraries` named the library
            x, x_scales, b, b_scales, y, m, n, k, x_kind, b_kind, dtype = step.arguments
            kinds = NAMES[x_kind], NAMES[b_kind], NAMES[dtype]
            product = Fp8Product(x, x_scales, b, b_scales, y, m, n, k, *kinds)
            # The product may have put its result into memory of its own, which the step behind it reads.
            result = fp8_product(product, memory)
        plan.done += 1
    # Alive until everything that reads it is queued: allocators reuse freed memory for later work of the stream only.
    del memory


def wide_weight(queue: Queue, b_format: str, b: tuple[int, int], shape: tuple[int, int]) -> WideWeight:
    """Returns b = (elements, scales) of [N, K] in bfloat16, for products that read it again and again.

    Twice the memory of the elements, and no dequantizing.
    """
    n, k = shape
    # One allocation for both: a word that says whether bfloat16 is exact, and behind it, aligned to 256, the weight.
    memory, inexact = queue.allocate(256 + 2 * n * k)
    data = inexact + 256
    request = Dequantize(CODES[b_format], CODES["bfloat16"], *b, n, k, 1, data, inexact)
    run(planner.plan(request, queue.packed), queue)
    return WideWeight(data, inexact, memory)
