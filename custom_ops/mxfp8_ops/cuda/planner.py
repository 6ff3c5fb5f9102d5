"""The launches of each operation on a GPU: the planner of the native library (src/cuda_host), through ctypes.

CuPy, PyTorch and ONNX Runtime take their plans from it, so one product takes the same kernels everywhere. Plans are
made of addresses and sizes. With a queue, the call that plans an operation also launches it, as far as the library can
do that alone; `execution.run` does the rest. Without one, nothing here needs a GPU.
"""

from __future__ import annotations

import functools
import struct
from collections import namedtuple
from ctypes import POINTER, Structure, byref, c_char, c_int64, string_at
from typing import Final, NamedTuple

from mxfp8_ops import formats, native
from mxfp8_ops.errors import BackendError

CODES: Final = {name: row.onnx_dtype for name, row in formats.DTYPES.items()}
"""The code of each value dtype and element format in the library: its onnx.TensorProto.DataType."""

NAMES: Final = {code: name for name, code in CODES.items()}

CUBLAS, CUBLASLT, SCALED_MM = 1, 2, 4
"""`Place.libraries`: MXFP8_CUBLAS and those that follow it in mxfp8_cuda_plan.h."""

LAUNCH, CLEAR, MATMUL, BLOCK_SCALED = range(4)
"""`Step.what`: MXFP8_LAUNCH ..."""

PLAIN, TRANSPOSED = range(2)
"""`Quantize.layout`: MXFP8_PLAIN ..."""

_NO_ROUTE: Final = -4

# The structs of mxfp8_cuda_plan.h, which says what the fields mean. Every field there is an int64_t, so a request is
# the packed bytes of a tuple. That takes less time than to fill a ctypes structure field by field, and a plan may take
# 3 us at most (benchmarks/cuda_planning.py).
Place = namedtuple(
    "Place",
    "capability processors libraries forced splits warps parts_bytes",
    defaults=(0, 0, 0, 0),
)
Gemm = namedtuple(
    "Gemm",
    "x_kind b_kind y_dtype x x_scales b b_scales bias y m n k wide wide_inexact activation_dtype",
    defaults=(0, 0, 0),
)
Quantize = namedtuple(
    "Quantize",
    "x_dtype format increment layout x outer k inner elements scales row_elements row_scales",
    defaults=(0, 0),
)
Dequantize = namedtuple("Dequantize", "format y_dtype elements scales outer k inner y inexact", defaults=(0,))
Embedding = namedtuple("Embedding", "index_dtype b_format y_dtype indices b b_scales count v d y")
Step = namedtuple("Step", "what kernel grid block in_scratch in_result arguments")

_PLACE, _GEMM = (struct.Struct(f"{len(request._fields)}q") for request in (Place, Gemm))
_QUEUE: Final = struct.Struct("4q")  # mxfp8_cuda_queue
_STEP: Final = struct.Struct("5i2I14q")  # mxfp8_cuda_step; all of its arguments, of which `count` are valid


class Plan(Structure):
    """The steps of an operation, in order, for one stream: `mxfp8_cuda_plan`. The next plan of a thread ends it."""

    count: int
    """Number of steps."""
    done: int
    """How many are queued."""
    scratch_bytes: int
    """Memory that the steps need, aligned to 256."""
    route: int
    """Row of the dispatch table, -1 if there is nothing to do or to choose."""

    _fields_ = (
        ("_steps", POINTER(c_char)),
        *((name, c_int64) for name in ("count", "scratch_bytes", "route", "done", "_number")),
    )

    @property
    def makes_its_result(self) -> bool:
        """Whether a library product allocates y itself (`SCALED_MM`), so that the y of the request is not written."""
        return any(step.what == BLOCK_SCALED and step.in_result for step in self.steps()[-1:])

    def steps(self) -> list[Step]:
        """Returns the steps, before the thread makes another plan."""
        packed = self._steps[: self.count * _STEP.size] if self.count else b""
        return [
            Step(what, kernel, grid, block, in_scratch, in_result, tuple(arguments[:count]))
            for what, kernel, grid, block, count, in_scratch, in_result, *arguments in _STEP.iter_unpack(packed)
        ]


class Route(NamedTuple):
    """A row of the dispatch table: `mxfp8_cuda_route`, which says what the fields mean."""

    kernel: str
    capability: tuple[int, int]
    most_rows: int
    n_multiple: int
    whole_blocks: int
    x_kinds: int
    b_kinds: int
    libraries: int


def gemm(place: Place, product: tuple[int, ...], queue: bytes | None = None) -> Plan:
    """Returns the plan of a product, the fields of a `Gemm`; with a queue, done as far as the library can.

    Raises:
        BackendError: the device is too old, the forced row of the dispatch table cannot do the product, or a launch
            fails.
        ShapeError: an unknown dtype or format, sizes or addresses that no tensor has, or 2^31 thread blocks or more.
    """
    plan = Plan()
    status = native.load().mxfp8_cuda_plan_gemm(_packed_place(place), _GEMM.pack(*product), queue, byref(plan))
    if status:
        # Its own error: a message about a route needs the names of dtypes, which the library's text does not have.
        if status == _NO_ROUTE:
            raise _no_route(place, Gemm(*product))
        native.check("gemm", status)
    return plan


def plan(request: tuple[int, ...], queue: bytes | None = None) -> Plan:
    """Returns the plan of a request, a struct of mxfp8_cuda_plan.h such as `Quantize`, by its name; as `gemm` does."""
    name, packed, planned = type(request).__name__.lower(), struct.pack(f"{len(request)}q", *request), Plan()
    native.check(name, getattr(native.load(), f"mxfp8_cuda_plan_{name}")(packed, queue, byref(planned)))
    return planned


def proceed(plan: Plan, queue: bytes) -> Step | None:
    """Queues steps from `plan.done` on; returns the product that a library has to do, or None at the end.

    Raises:
        BackendError: a launch fails, or there is no such GPU.
    """
    native.check("cuda", native.load().mxfp8_cuda_continue(queue, byref(plan)))
    return plan.steps()[plan.done] if plan.done < plan.count else None


def queue(gpu: int, stream: int, scratch: int = 0, result: int = 0) -> bytes:
    """Returns a queue for the functions above: `mxfp8_cuda_queue`, which says what the fields mean."""
    return _QUEUE.pack(gpu, stream, scratch, result)


def swizzled_bytes(rows: int, k: int) -> int:
    """Returns how many scales [rows, ceil(k / 32)] take in cuBLASLt's 128x4 layout; ShapeError as `gemm`."""
    # The result is a size, or a status below 0.
    size: int = native.load().mxfp8_cuda_swizzled_bytes(rows, k)
    native.check("swizzled_bytes", min(size, 0))
    return size


@functools.cache
def kernels() -> tuple[str, ...]:
    """Returns every kernel of src/cuda by number, as C++ writes it: "quantize_rows<F32, E4M3, false>".

    The file has the name before the "<".
    """
    names: list[str] = []
    # The library answers NULL past the last number: it has no function that counts.
    while name := native.load().mxfp8_cuda_kernel(len(names)):
        names.append(name.decode())
    return tuple(names)


@functools.cache
def routes() -> tuple[Route, ...]:
    """Returns the dispatch table (src/cuda_host/routes.cpp). The first row that fits a product counts."""
    rows: list[Route] = []
    while address := native.load().mxfp8_cuda_route_at(len(rows)):  # NULL past the last row
        name, capability, *rest = (c_int64 * len(Route._fields)).from_address(address)
        rows.append(Route(string_at(name).decode(), divmod(capability, 10), *rest))
    return tuple(rows)


# --- the library -----------------------------------------------------------------------------------------------------


# Cached, because all products of a run share one device and one choice of routes.
@functools.lru_cache
def _packed_place(place: Place) -> bytes:
    return _PLACE.pack(*place)


def _no_route(place: Place, p: Gemm) -> BackendError:
    major, minor = divmod(place.capability, 10)
    forced = f"the forced route {routes()[place.forced - 1].kernel!r} to fit" if place.forced else ""
    return BackendError(
        "cuda",
        f"no route for {NAMES[p.x_kind]} times {NAMES[p.b_kind]}, M = {p.m}, N = {p.n}, K = {p.k} on compute "
        f"capability {major}.{minor}",
        expected=forced or "compute capability 8.0 or later",
        advice="use another device or route",
    )
