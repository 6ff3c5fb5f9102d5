"""Plans the launches of each operation on a GPU, with the planner of the native library (src/cuda_host).

CuPy, PyTorch and ONNX Runtime use this planner, so that a product runs on the same kernels everywhere. A plan has
addresses and sizes. If you pass a queue, the call also queues the steps, unless they need scratch memory, which
`execution.run` allocates. Without a queue no function needs a GPU.
"""

from __future__ import annotations

import functools
import struct
from collections import namedtuple
from ctypes import POINTER, Structure, byref, c_char, c_int64, string_at
from typing import Final, NamedTuple

from mxfp8_ops import formats, native

CODES: Final = {name: row.onnx_dtype for name, row in formats.DTYPES.items()}
"""The code of each value dtype and element format in the library: its onnx.TensorProto.DataType."""

BFLOAT16_PRODUCTS, BLOCK_SCALED_PRODUCTS = 1, 2
"""Bits of `Place.cublaslt`: MXFP8_BFLOAT16_PRODUCTS and the next constant in mxfp8_cuda_plan.h."""

LAUNCH, CLEAR, MATMUL = range(3)
"""Values of `Step.what`: MXFP8_LAUNCH and the next two constants."""

PLAIN, TRANSPOSED = range(2)
"""Values of `Quantize.layout`: MXFP8_PLAIN and the next constant."""

# The structs of mxfp8_cuda_plan.h, which documents their fields. All fields are int64_t, so a request is the packed
# bytes of a tuple. To fill a ctypes structure field by field takes longer, and a plan may take at most 3 us
# (benchmarks/cuda_planning.py).
Place = namedtuple(
    "Place",
    "capability processors cublaslt forced splits warps parts_bytes",
    defaults=(0, 0, 0, 0),
)
Gemm = namedtuple(
    "Gemm",
    "x_kind b_kind y_dtype x x_scales b b_scales bias y m n k wide wide_inexact activation_dtype b_swizzled",
    defaults=(0, 0, 0, 0),
)
Quantize = namedtuple(
    "Quantize",
    "x_dtype format increment layout x outer k inner elements scales row_elements row_scales",
    defaults=(0, 0),
)
Dequantize = namedtuple("Dequantize", "format y_dtype elements scales outer k inner y inexact", defaults=(0,))
Embedding = namedtuple("Embedding", "index_dtype b_format y_dtype indices b b_scales count v d y")
Step = namedtuple("Step", "what kernel grid block in_scratch arguments")

_PLACE, _GEMM = (struct.Struct(f"{len(request._fields)}q") for request in (Place, Gemm))
_QUEUE: Final = struct.Struct("3q")  # mxfp8_cuda_queue
_STEP: Final = struct.Struct("5iI14q")  # mxfp8_cuda_step; the first `count` of the 14 arguments are valid


class Plan(Structure):
    """The steps of an operation, in order, for one stream: `mxfp8_cuda_plan`. The thread's next plan invalidates it."""

    count: int
    """Number of steps."""
    done: int
    """1 if the steps are queued."""
    scratch_bytes: int
    """Bytes of scratch memory that the steps need, aligned to 256."""
    route: int
    """Row of the dispatch table; -1 if there is nothing to do, or no choice."""

    _fields_ = (
        ("_steps", POINTER(c_char)),
        *((name, c_int64) for name in ("count", "scratch_bytes", "route", "done", "_number")),
    )

    def steps(self) -> list[Step]:
        """Returns the steps; call it before the thread makes another plan."""
        packed = self._steps[: self.count * _STEP.size] if self.count else b""
        return [
            Step(what, kernel, grid, block, in_scratch, tuple(arguments[:count]))
            for what, kernel, grid, block, count, in_scratch, *arguments in _STEP.iter_unpack(packed)
        ]


class Route(NamedTuple):
    """A row of the dispatch table; `mxfp8_cuda_route` documents the fields."""

    kernel: str
    capability: tuple[int, int]
    most_rows: int
    n_multiple: int
    whole_blocks: int
    x_kinds: int
    b_kinds: int
    cublaslt: int


def gemm(place: Place, product: tuple[int, ...], queue: bytes | None = None) -> Plan:
    """Returns the plan of a product; with a queue, also queues its steps if they need no scratch memory.

    Args:
        place: the device.
        product: the fields of a `Gemm`.
        queue: a result of `queue`, or None to queue nothing. With it, cuBLASLt is asked whether it can do a product
            that would go to it; if not, the product takes the next row of the dispatch table.

    Raises:
        BackendError: the device is too old, the forced row of the dispatch table cannot do the product, or a launch
            fails.
        ShapeError: a dtype or format is unknown, a size or address is impossible, or there are 2^31 or more blocks.
    """
    plan = Plan()
    native.check(
        "gemm", native.load().mxfp8_cuda_plan_gemm(_packed_place(place), _GEMM.pack(*product), queue, byref(plan))
    )
    return plan


def plan(request: tuple[int, ...], queue: bytes | None = None) -> Plan:
    """Returns the plan of a request, such as a `Quantize`; queue and errors as in `gemm`."""
    # The name of the request's type is also the name of the C function.
    name, packed, planned = type(request).__name__.lower(), struct.pack(f"{len(request)}q", *request), Plan()
    native.check(name, getattr(native.load(), f"mxfp8_cuda_plan_{name}")(packed, queue, byref(planned)))
    return planned


def run(plan: Plan, queue: bytes) -> None:
    """Queues the steps of the thread's latest plan.

    Raises:
        BackendError: a launch fails, or the GPU does not exist.
    """
    native.check("cuda", native.load().mxfp8_cuda_run(queue, byref(plan)))


def queue(gpu: int, stream: int, scratch: int = 0) -> bytes:
    """Returns a queue for the functions above; `mxfp8_cuda_queue` documents the fields."""
    return _QUEUE.pack(gpu, stream, scratch)


def swizzled_bytes(rows: int, k: int) -> int:
    """Returns the bytes of scales [rows, ceil(k / 32)] in cuBLASLt's 128x4 layout; errors as in `gemm`."""
    # The result is a size, or a status below 0.
    size: int = native.load().mxfp8_cuda_swizzled_bytes(rows, k)
    native.check("swizzled_bytes", min(size, 0))
    return size


@functools.cache
def kernels() -> tuple[str, ...]:
    """Returns the kernels of src/cuda in the order of their numbers, as C++ names: "quantize_rows<F32, E4M3, false>".

    The name before the "<" is also the name of the file.
    """
    names: list[str] = []
    # The library returns NULL after the last kernel.
    while name := native.load().mxfp8_cuda_kernel(len(names)):
        names.append(name.decode())
    return tuple(names)


@functools.cache
def routes() -> tuple[Route, ...]:
    """Returns the dispatch table (src/cuda_host/routes.cpp). A product takes the first row that fits it."""
    rows: list[Route] = []
    while address := native.load().mxfp8_cuda_route_at(len(rows)):  # NULL after the last row
        name, capability, *rest = (c_int64 * len(Route._fields)).from_address(address)
        rows.append(Route(string_at(name).decode(), divmod(capability, 10), *rest))
    return tuple(rows)


# --- the library -----------------------------------------------------------------------------------------------------


# Cached, because all products of a run share one device and one choice of routes.
@functools.lru_cache
def _packed_place(place: Place) -> bytes:
    return _PLACE.pack(*place)
