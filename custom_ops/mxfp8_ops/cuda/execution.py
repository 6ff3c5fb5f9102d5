"""Executes a plan of the planner on a device: allocates its scratch memory, and calls the libraries that it needs.

It works on addresses, so it serves CuPy arrays, torch tensors and, in tests, host memory. The native library launches
the kernels. No function waits for the device. ONNX Runtime executes the same plans without Python
(src/cuda_host/executor.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.planner import CODES, MATMUL, NAMES, Dequantize, Plan
from mxfp8_ops.errors import BackendError


class RefusedError(BackendError):
    """A library cannot compute an FP8 product."""

    @classmethod
    def of(
        cls, library: str, kinds: tuple[str, str, str], sizes: tuple[int, int, int], why: str, *, advice: str
    ) -> RefusedError:
        """Returns the error of a library, such as "torch 2.13", for the dtypes of x, b and y, and for M, N and K."""
        (x, b, y), (m, n, k) = kinds, sizes
        what = f"{library} refuses {x} times {b} -> {y}, M = {m}, N = {n}, K = {k} ({why})"
        return cls("cuda", what, expected="an FP8 product", advice=advice)


class Device(Protocol):
    """The properties and products of a device that plans use."""

    index: int
    capability: tuple[int, int]
    processors: int
    """Number of multiprocessors."""

    def matmul_bf16(self, x: int, w: int, y: int, sizes: tuple[int, int, int], *, dtype: str, queue: Queue) -> None:
        """Queues y = x w^T with x [M, K], w [N, K] bfloat16 and y bfloat16 or float32, summed in float32 throughout."""


class Queue:
    """A device, one of its streams, and an allocator for scratch memory."""

    def __init__(self, device: Device, stream: int, allocate: Callable[[int], tuple[Any, int]]) -> None:
        """Makes a queue. `allocate` maps a size to (object that keeps the memory alive, its address, 256-aligned)."""
        self.device, self.stream, self.allocate = device, stream, allocate
        self.packed = planner.queue(device.index, stream)
        """The queue as the functions of the planner take it."""


class Fp8Product(NamedTuple):
    """A block-scaled product y = x b^T for a library that uses FP8 tensor cores: addresses, sizes, names of dtypes."""

    x: int
    x_scales: int
    b: int
    b_scales: int
    y: int
    """0 if the library allocates the result."""
    m: int
    n: int
    k: int
    x_kind: str
    b_kind: str
    dtype: str
    """Dtype of y."""


class WideWeight(NamedTuple):
    """A weight in bfloat16 that is kept between products; see `wide_weight`."""

    data: int
    inexact: int
    """Address of a word that is not 0 if bfloat16 cannot hold the weight."""
    memory: Any


def run(plan: Plan, queue: Queue, fp8_product: Callable[[Fp8Product, Any], int] | None = None) -> None:
    """Queues the remaining steps of a plan.

    Args:
        plan: the plan.
        queue: the device and stream.
        fp8_product: queues an FP8 product on a library, and returns the address of its result. Its arguments are the
            product and the object of the scratch memory, from `Queue.allocate`.

    Raises:
        BackendError: a launch fails.
        RefusedError: `fp8_product` raises it. Nothing has been written but scratch memory.
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
            # The library may have allocated the result: the next step reads it at this address.
            result = fp8_product(product, memory)
        plan.done += 1
    # Alive until all steps are queued. Then it may be freed: allocators reuse it for later work of the stream only.
    del memory


def wide_weight(queue: Queue, b_format: str, b: tuple[int, int], shape: tuple[int, int]) -> WideWeight:
    """Returns the weight b = (elements, scales) of shape [N, K] in bfloat16, so that products need not dequantize it.

    It takes twice the memory of the elements.
    """
    n, k = shape
    # One allocation for both: the word that tells whether bfloat16 is exact, and the weight, aligned to 256.
    memory, inexact = queue.allocate(256 + 2 * n * k)
    data = inexact + 256
    request = Dequantize(CODES[b_format], CODES["bfloat16"], *b, n, k, 1, data, inexact)
    run(planner.plan(request, queue.packed), queue)
    return WideWeight(data, inexact, memory)
