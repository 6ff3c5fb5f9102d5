"""What a GPU has to do for each operation, as data: the planner of the native library (src/cuda_host), through ctypes.

CuPy, PyTorch and ONNX Runtime take their plans from it, so one product takes the same kernels everywhere. Plans are
made of addresses and sizes; nothing here needs a GPU. `execution.run` does what a plan says.
"""

from __future__ import annotations

import functools
import struct
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_int64
from typing import Any, Final, NamedTuple

from mxfp8_ops import contract, formats, native
from mxfp8_ops.errors import BackendError

CODES: Final = {
    **{name: code for code, name in contract.VALUE_NAMES.items()},
    **{name: row.onnx_dtype for name, row in formats.ELEMENT_FORMATS.items()},
}
"""What the library calls each value dtype and element format: its onnx.TensorProto.DataType."""

NAMES: Final = {code: name for name, code in CODES.items()}

CUBLAS: Final = 1
"""`Place.libraries`: bfloat16 products."""
CUBLASLT: Final = 2
"""FP8 products, into memory that the library is given."""
SCALED_MM: Final = 4
"""FP8 products, into memory of the library's own."""
SCALED_MM_ROWS: Final = 8
"""With `SCALED_MM`: scales per row on Hopper."""

LAUNCH, CLEAR, MATMUL, BLOCK_SCALED, ROW_SCALED, UNSCALED = range(6)
"""`Step.what`."""

PLAIN, SWIZZLED, TRANSPOSED = range(3)
"""`Quantize.layout`."""

_NO_ROUTE: Final = -4


class Place(NamedTuple):
    """Where a product runs and what was chosen for it: `mxfp8_cuda_place` of mxfp8_cuda_plan.h."""

    capability: int
    """10 major + minor."""
    processors: int
    libraries: int
    allowed: int = 0
    """Bits of rows of the dispatch table."""
    forced: int = 0
    """Number of a row, counted from 1."""
    splits: int = 0
    warps: int = 0
    blocks: int = 0
    parts_bytes: int = 0


class Gemm(NamedTuple):
    """A product y = x b^T + bias: `mxfp8_cuda_gemm`. Kinds are `CODES`, operands addresses, 0 for what there is not."""

    x_kind: int
    b_kind: int
    y_dtype: int
    x: int
    x_scales: int
    b: int
    b_scales: int
    bias: int
    y: int
    m: int
    n: int
    k: int
    wide: int = 0
    wide_inexact: int = 0
    folded: int = 0
    folded_scales: int = 0


class Quantize(NamedTuple):
    """x [outer, k, inner] along k, and with `row_elements` along inner too: `mxfp8_cuda_quantize`."""

    x_dtype: int
    format: int
    increment: int
    """`formats.scale_increment`."""
    layout: int
    x: int
    outer: int
    k: int
    inner: int
    elements: int
    scales: int
    row_elements: int = 0
    row_scales: int = 0


class Dequantize(NamedTuple):
    """(elements, scales) [outer, k, inner] to y: `mxfp8_cuda_dequantize`."""

    format: int
    y_dtype: int
    elements: int
    scales: int
    outer: int
    k: int
    inner: int
    y: int
    inexact: int = 0


class Fold(NamedTuple):
    """E4M3 elements [rows, k] to one scale per row: `mxfp8_cuda_fold`."""

    elements: int
    scales: int
    rows: int
    k: int
    folded: int
    row_scales: int


class Step(NamedTuple):
    """A step of a plan: `mxfp8_cuda_step`."""

    what: int
    """`LAUNCH` or another of those."""
    kernel: int
    """Number in `kernels`, of a `LAUNCH`."""
    grid: int
    block: int
    shared: int
    in_scratch: int
    """Bits of the arguments that are offsets into the scratch memory."""
    in_result: int
    """Bits of the arguments that stand for what the library product before made."""
    arguments: tuple[int, ...]


class Plan(Structure):
    """What to do, in order, on one stream: `mxfp8_cuda_plan`."""

    packed: bytes
    """The steps as the library gave them; see `unpack`."""
    scratch_bytes: int
    """Memory that the steps need, aligned to 256."""
    route: int
    """Row of the dispatch table, -1 if there is nothing to do or to choose."""

    _fields_ = (("_steps", POINTER(c_char)), ("_count", c_int64), ("scratch_bytes", c_int64), ("route", c_int64))

    @property
    def makes_its_result(self) -> bool:
        """Whether y is what a library product makes in memory of its own (`SCALED_MM`), and not written to."""
        if not self.packed:
            return False
        what, *_, in_result = _HEAD.unpack_from(self.packed, len(self.packed) - _STEP.size)
        return bool(what >= BLOCK_SCALED and in_result)

    def steps(self) -> list[Step]:
        """Returns the steps."""
        return [
            Step(what, kernel, grid, block, shared, in_scratch, in_result, tuple(arguments[:count]))
            for what, kernel, grid, block, shared, count, in_scratch, in_result, *arguments in unpack(self.packed)
        ]


class Route(NamedTuple):
    """A row of the dispatch table (src/cuda_host/routes.cpp): which products it is for. The first that fits counts."""

    kernel: str
    capability: tuple[int, int]
    """Least compute capability."""
    alone: bool
    """Whether no later one will do."""
    most_rows: int
    """Greatest M, 0 for any; of float32 (float16) x, whose rows are three (two) of bfloat16, a third (half) of it."""
    n_multiple: int
    whole_blocks: bool
    """Whether K must be a multiple of 32 and both operands aligned to 16 bytes."""
    libraries: int
    """Bits of the libraries of which the caller has to bring one; 0 if it needs none."""
    opt_in: bool
    """Whether it is taken only when allowed or forced."""


def gemm(place: Place, product: Gemm) -> Plan:
    """Returns the plan of a product.

    Raises:
        BackendError: the device is too old, or the forced row of the dispatch table cannot do it.
        ShapeError: an unknown dtype or format, or more thread blocks than a GPU has.
    """
    plan = Plan()
    status = _library().mxfp8_cuda_plan_gemm(_packed_place(place), _GEMM.pack(*product), plan)
    if status == _NO_ROUTE:
        raise _no_route(place, product)
    return _made("gemm", status, plan)


def quantize(request: Quantize) -> Plan:
    """Returns the plan of `numerics.quantize` along one axis or, of a matrix, along both.

    Raises:
        ShapeError: an unknown dtype, format or layout, or more thread blocks than a GPU has.
    """
    plan = Plan()
    return _made("quantize", _library().mxfp8_cuda_plan_quantize(_QUANTIZE.pack(*request), plan), plan)


def dequantize(request: Dequantize) -> Plan:
    """Returns the plan of `numerics.dequantize`.

    Raises:
        ShapeError: an unknown dtype or format, or more thread blocks than a GPU has.
    """
    plan = Plan()
    return _made("dequantize", _library().mxfp8_cuda_plan_dequantize(_DEQUANTIZE.pack(*request), plan), plan)


def fold(request: Fold) -> Plan:
    """Returns the plan of `folding.fold`.

    Raises:
        ShapeError: more rows than a GPU has thread blocks.
    """
    plan = Plan()
    return _made("fold", _library().mxfp8_cuda_plan_fold(_FOLD.pack(*request), plan), plan)


def swizzled_bytes(rows: int, k: int) -> int:
    """Returns how many scales [rows, ceil(k / 32)] take in cuBLASLt's 128x4 layout."""
    size: int = _library().mxfp8_cuda_swizzled_bytes(rows, k)
    return size


@functools.cache
def kernels() -> tuple[str, ...]:
    """Returns every kernel of src/cuda by number, as C++ writes it: "quantize_rows<F32, E4M3, false, false>".

    The file has the name before the "<".
    """
    found: list[str] = []
    while name := _library().mxfp8_cuda_kernel(len(found)):
        found.append(name.decode())
    return tuple(found)


@functools.cache
def routes() -> tuple[Route, ...]:
    """Returns the dispatch table."""
    found: list[Route] = []
    while row := _library().mxfp8_cuda_route_at(len(found)):
        r = row.contents
        found.append(
            Route(
                r.name.decode(), divmod(r.capability, 10), bool(r.only_that), r.most_rows, r.n_multiple,
                bool(r.whole_blocks), r.libraries, bool(r.opt_in),
            )
        )  # fmt: skip
    return tuple(found)


# --- the library -----------------------------------------------------------------------------------------------------

_PLACE, _GEMM, _QUANTIZE, _DEQUANTIZE, _FOLD = (
    struct.Struct(f"{len(request._fields)}q") for request in (Place, Gemm, Quantize, Dequantize, Fold)
)
_STEP, _HEAD = struct.Struct("6i2I12q"), struct.Struct("6i2I")
unpack: Final = _STEP.iter_unpack
"""Takes `Plan.packed` apart: the fields of `mxfp8_cuda_step`, one tuple for each step."""


@functools.lru_cache
def _packed_place(place: Place) -> bytes:
    return _PLACE.pack(*place)


class _Route(Structure):
    """`mxfp8_cuda_route`."""

    _fields_ = (
        ("name", c_char_p),
        *((name, c_int64) for name in ("capability", "only_that", "most_rows", "n_multiple", "whole_blocks")),
        *((name, c_int64) for name in ("x_kinds", "b_kinds", "libraries", "opt_in", "not_if_wide")),
    )


@functools.cache
def _library() -> Any:
    """Returns the native library, the planner's functions typed. Requests go in as the bytes of their fields."""
    library = native.load()
    signatures: dict[str, tuple[Any, ...]] = {
        "mxfp8_cuda_plan_gemm": (c_int, c_char_p, c_char_p, POINTER(Plan)),
        "mxfp8_cuda_plan_quantize": (c_int, c_char_p, POINTER(Plan)),
        "mxfp8_cuda_plan_dequantize": (c_int, c_char_p, POINTER(Plan)),
        "mxfp8_cuda_plan_fold": (c_int, c_char_p, POINTER(Plan)),
        "mxfp8_cuda_swizzled_bytes": (c_int64, c_int64, c_int64),
        "mxfp8_cuda_kernel": (c_char_p, c_int),
        "mxfp8_cuda_route_at": (POINTER(_Route), c_int),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _made(where: str, status: int, plan: Plan) -> Plan:
    """Returns the plan with steps of its own: the library's are gone with the thread's next plan."""
    if status:
        native.check(where, status)
    plan.packed = plan._steps[: plan._count * _STEP.size] if plan._count else b""
    return plan


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
