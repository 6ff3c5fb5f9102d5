"""Executes a plan of the planner on a device: allocates its scratch memory.

It works on addresses, so it serves CuPy arrays, torch tensors and, in tests, host memory. The native library launches
the kernels and calls cuBLASLt. No function waits for the device. ONNX Runtime executes the same plans without Python
(src/cuda_host/executor.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.planner import CODES, Dequantize, Plan


class Device(Protocol):
    """The properties of a device that plans use."""

    index: int
    capability: tuple[int, int]
    processors: int
    """Number of multiprocessors."""


class Queue:
    """A device, one of its streams, and an allocator for scratch memory."""

    def __init__(self, device: Device, stream: int, allocate: Callable[[int], tuple[Any, int]]) -> None:
        """Makes a queue. `allocate` maps a size to (object that keeps the memory alive, its address, 256-aligned)."""
        self.device, self.stream, self.allocate = device, stream, allocate
        self.packed = planner.queue(device.index, stream)
        """The queue as the functions of the planner take it."""


class WideWeight(NamedTuple):
    """A weight in bfloat16 that is kept between products; see `wide_weight`."""

    data: int
    inexact: int
    """Address of a word that is not 0 if bfloat16 cannot hold the weight."""
    memory: Any


def run(plan: Plan, queue: Queue) -> None:
    """Queues the steps of a plan, if they are not yet.

    Raises:
        BackendError: a launch fails.
    """
    if plan.done or not plan.count:
        return
    memory, scratch = queue.allocate(plan.scratch_bytes)
    planner.run(plan, planner.queue(queue.device.index, queue.stream, scratch))
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
