"""Which CUDA kernel runs, on how many threads, with which arguments: everything about a launch but the launching.

Works on addresses, so CuPy arrays, torch tensors and, in the tests, host memory all come through here. Nothing here
waits for the device: what depends on data is decided on the device. src/ort/cuda_launch.cpp does part of this again for
ONNX Runtime; test_ort_cuda.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from mxfp8_ops import formats
from mxfp8_ops.cuda import dispatch as cuda_dispatch
from mxfp8_ops.cuda import fused as cuda_fused
from mxfp8_ops.cuda import skinny as cuda_skinny
from mxfp8_ops.numerics import scale_count

THREADS: Final = 256
"""Threads per block, in every kernel."""

KINDS: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "e4m3": "E4M3", "e5m2": "E5M2"}
"""What src/cuda/codec.cuh calls each dtype and element format."""

DTYPE_CODES: Final = {"float32": 1, "float16": 10, "bfloat16": 16}
"""onnx.TensorProto.DataType of each value dtype."""

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Launch:
    """One kernel launch; every argument is an address or a 64-bit integer."""

    source: str
    kernel: str
    grid: int
    arguments: tuple[int, ...]
    shared: int = 0
    """Bytes of shared memory beyond what the kernel declares."""


class Device(Protocol):
    """What the launches below need from a device."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""

    @property
    def processors(self) -> int:
        """Number of multiprocessors."""

    def launch(self, launch: Launch, stream: int) -> None:
        """Queues a kernel."""

    def matmul_bf16(self, x: int, w: int, y: int, sizes: tuple[int, int, int], *, dtype: str, queue: Queue) -> None:
        """Queues y = x w^T with x [M, K], w [N, K] bfloat16 and y bfloat16 or float32, summed in float32 throughout."""


@dataclass(frozen=True)
class Queue:
    """Where work goes: a device, a stream of it, and whose memory to use for what is needed in between."""

    device: Device
    stream: int
    allocate: Callable[[int, bool], tuple[Any, int]]
    """Bytes, whether they must be zero -> (what keeps the memory alive, its address, aligned to 16)."""


@dataclass(frozen=True)
class Operand:
    """A gemm operand [rows, K]: values, or elements with their scales."""

    kind: str
    """A key of `KINDS`."""
    data: int
    scales: int = 0

    @property
    def quantized(self) -> bool:
        """Whether it is elements with scales."""
        return self.kind in formats.ELEMENT_FORMATS


@dataclass(frozen=True)
class Product:
    """y = x b^T + bias: x [M, K], b [N, K] quantized, bias float32 [N], y [M, N]."""

    x: Operand
    b: Operand
    bias: int
    """Its address, or 0."""
    y: int
    dtype: str
    """Of y."""
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class WideWeight:
    """A weight in bfloat16, kept between products: `wide_weight` makes one."""

    data: int
    inexact: int
    """Address of a word that is not 0 if bfloat16 cannot hold the weight."""
    memory: Any


@dataclass(frozen=True)
class FoldedOperand:
    """An operand with one scale per row, as `folding.fold` defines it: `fold` makes one."""

    data: int
    """Address of E4M3 elements [rows, K]."""
    scales: int
    """Address of float32 [rows]."""
    memory: tuple[Any, Any]
    """What `Queue.allocate` gave for both."""


def quantize(
    queue: Queue,
    x: Operand,
    shape: tuple[int, int, int],
    out: tuple[int, int],
    *,
    element_format: str,
    scale_rounding: str,
    swizzled: bool = False,
    transposed: bool = False,
) -> None:
    """Queues `numerics.quantize` of x [outer, K, inner] into out = (elements, scales).

    `swizzled` puts the scales into cuBLASLt's 128x4 layout, over memory that is zero; for inner = 1 they are those of
    the matrix [outer, K], for outer = 1 those of its transpose [inner, K]. `transposed` (outer = 1) stores elements as
    [inner, K] and scales as [inner, ceil(K / 32)].
    """
    outer, k, inner = shape
    if not outer * k * inner:
        return
    fmt = formats.element_format(element_format)
    increment = formats.scale_increment(fmt, scale_rounding)
    types = f"{KINDS[x.kind]}, {KINDS[element_format]}"
    if inner == 1:
        ragged = bool(k % 32) or _unaligned(x.data, out[0])
        kernel = f"quantize_rows<{types}, {_flags(swizzled, ragged)}>"
        halves = outer * scale_count(k) * 2
        arguments = (x.data, *out, outer, k, increment)
        queue.device.launch(Launch("quantize_rows", kernel, _ceil(halves, THREADS), arguments), queue.stream)
        return
    ragged = bool(inner % 16) or (transposed and bool(k % 32)) or _unaligned(x.data, *out)
    kernel = f"quantize_columns<{types}, false, {_layout(swizzled, transposed)}, {_flags(ragged)}>"
    grid = outer * scale_count(k) * _ceil(inner, 512)
    launch = Launch("quantize_columns", kernel, grid, (x.data, *out, 0, 0, k, inner, increment))
    queue.device.launch(launch, queue.stream)


def quantize_both(
    queue: Queue,
    x: Operand,
    shape: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    *,
    element_format: str,
    scale_rounding: str,
    swizzled: bool = False,
    transposed: bool = False,
) -> None:
    """Queues `numerics.quantize` of a matrix along axis 1 into `rows` and along axis 0 into `columns`, reading it once.

    Both are (elements, scales), the elements in the layout of x; or `columns` `transposed`, as for `quantize`.
    """
    if not shape[0] * shape[1]:
        return
    increment = formats.scale_increment(formats.element_format(element_format), scale_rounding)
    ragged = bool(shape[1] % 32) or (transposed and bool(shape[0] % 32)) or _unaligned(x.data, rows[0], *columns)
    types = f"{KINDS[x.kind]}, {KINDS[element_format]}"
    kernel = f"quantize_columns<{types}, true, {_layout(swizzled, transposed)}, {_flags(ragged)}>"
    grid = scale_count(shape[0]) * _ceil(shape[1], 512)
    arguments = (x.data, *columns, *rows, *shape, increment)
    queue.device.launch(Launch("quantize_columns", kernel, grid, arguments), queue.stream)


def dequantize(
    queue: Queue, x: Operand, shape: tuple[int, int, int], out: int, *, dtype: str, inexact: int = 0
) -> None:
    """Queues `numerics.dequantize` of x [outer, K, inner] into `out`.

    `inexact`, if an address, becomes 1 when dtype is bfloat16 and does not hold every value.
    """
    outer, k, inner = shape
    total = outer * k * inner
    if not total:
        return
    last = inner == 1
    ragged = bool(k % 32 if last else inner % 16) or _unaligned(x.data, out, *(() if last else (x.scales,)))
    kernel = f"dequantize<{KINDS[dtype]}, {KINDS[x.kind]}, {_flags(last, ragged)}>"
    arguments = (x.data, x.scales, out, k, inner, total, inexact)
    queue.device.launch(Launch("dequantize", kernel, _ceil(total, 16 * THREADS), arguments), queue.stream)


def wide_weight(queue: Queue, b: Operand, n: int, k: int) -> WideWeight:
    """Returns b [N, K] in bfloat16, for products that read it again and again (twice the memory, no dequantizing)."""
    memory, address = queue.allocate(2 * n * k, False)
    flag, inexact = queue.allocate(16, True)
    dequantize(queue, b, (n, k, 1), address, dtype="bfloat16", inexact=inexact)
    return WideWeight(address, inexact, (memory, flag))


def fold(queue: Queue, x: Operand, rows: int, k: int) -> FoldedOperand:
    """Returns x [rows, K], E4M3, with one scale per row. K % 32 = 0, and x aligned to 16."""
    elements, data = queue.allocate(rows * k, False)
    scales, address = queue.allocate(4 * rows, False)
    if rows * k:
        launch = Launch("fold", "fold", rows, (x.data, x.scales, data, address, k))
        queue.device.launch(launch, queue.stream)
    return FoldedOperand(data, address, (elements, scales))


def swizzle_scales(queue: Queue, x: Operand, rows: int, k: int) -> tuple[Any, int]:
    """Returns the scales of x [rows, K] in cuBLASLt's 128x4 layout: what keeps the memory alive, and its address."""
    blocks = scale_count(k)
    size = swizzled_size(rows, k)
    memory, address = queue.allocate(size, False)
    if size:
        arguments = (x.scales, address, rows, blocks)
        launch = Launch("swizzle_scales", "swizzle_scales", _ceil(size, 16 * THREADS), arguments)
        queue.device.launch(launch, queue.stream)
    return memory, address


def swizzled_size(rows: int, k: int) -> int:
    """Returns how many scales [rows, ceil(k / 32)] take in the 128x4 layout."""
    return _ceil(rows, 128) * 128 * (_ceil(scale_count(k), 4) * 4)


def finish(  # noqa: PLR0917
    queue: Queue,
    p: Product,
    sums: int,
    scales: tuple[int, int] = (0, 0),
    parts: tuple[int, int] = (1, 0),
    inexact: int = 0,
) -> None:
    """Queues what makes y of float32 sums [parts, M, N]: adds them up, scales rows and columns, adds the bias.

    `parts` is their number and the shift: part i counts 2^(-i shift). `inexact`, if an address, becomes 1 when a sum is
    NaN or Inf.
    """
    ragged = bool(p.n % 8) or _unaligned(sums, p.bias, p.y, scales[1])
    arguments = (sums, *parts, *scales, p.bias, p.y, p.m * p.n, p.n, DTYPE_CODES[p.dtype], inexact)
    grid = _ceil(p.m * p.n, 8 * THREADS)
    queue.device.launch(Launch("finish", f"finish<{_flags(ragged)}>", grid, arguments), queue.stream)


def gemm(queue: Queue, product: Product, wide: WideWeight | None = None) -> None:
    """Queues a product; the gemms of `numerics` differ only in what x is. `wide` is b in bfloat16, if it is kept."""
    if product.m * product.n:
        kernel = choose(queue.device.capability, product, kept=wide is not None)
        _by(kernel, queue, product, wide)


def _by(kernel: str, queue: Queue, product: Product, wide: WideWeight | None) -> None:
    if kernel == "skinny":
        _skinny(queue, product)
    elif kernel == "fused":
        _fused(queue, product)
    elif kernel == "large":
        _large(queue, product, wide)
    elif kernel == "parts":
        _parts(queue, product, wide)
    else:
        _float32(queue, product)


def choose(
    capability: tuple[int, int],
    product: Product,
    libraries: Collection[str] = (),
    *,
    forced: bool = True,
    kept: bool = False,
) -> str:
    """Returns the row of `cuda_dispatch.ROUTES` for a product.

    `libraries`, `forced` and `kept` are as for `cuda_dispatch.route`.

    Raises:
        BackendError: the device is too old, or the forced row cannot do it.
    """
    p = product
    if not p.k:
        return "float32"  # nothing but the bias
    return cuda_dispatch.route(
        capability, p.x.kind, p.m, p.k, (p.x.data, p.b.data), n=p.n, b_kind=p.b.kind, libraries=libraries,
        forced=forced, kept=kept,
    )  # fmt: skip


def _skinny(queue: Queue, p: Product) -> None:
    cut = cuda_skinny.cut((p.m, p.n, p.k), p.x.kind, queue.device.processors)
    memory, to = _sums(queue, p, cut.splits)
    name = cut.kernel(KINDS[p.x.kind], KINDS[p.b.kind])
    queue.device.launch(Launch("gemm_skinny", name, cut.grid(p.n), (*_arguments(to), cut.splits)), queue.stream)
    if cut.splits > 1:
        finish(queue, p, to.y, parts=(cut.splits, 0))
    del memory  # alive until everything that reads it is queued


def _fused(queue: Queue, p: Product) -> None:
    cut = cuda_fused.cut((p.m, p.n, p.k), queue.device.processors)
    flag, inexact = queue.allocate(16, True)
    tiles, x = queue.allocate(cuda_fused.tiles_size(p.m, p.k), False)
    arguments = (p.x.data, p.x.scales, x, p.m, p.k, inexact)
    grid = _ceil(4 * p.m * _ceil(p.k, 64), THREADS)
    queue.device.launch(Launch("tile", f"tile<{KINDS[p.x.kind]}>", grid, arguments), queue.stream)
    memory, to = _sums(queue, p, cut.splits)
    fused = (x, p.b.data, p.b.scales, to.bias, to.y, p.m, p.n, p.k, DTYPE_CODES[to.dtype], cut.splits, inexact)
    name, shared = cut.kernel(KINDS[p.b.kind]), cuda_fused.SHARED
    queue.device.launch(Launch("gemm_fused", name, cut.grid(p.m, p.n), fused, shared), queue.stream)
    if cut.splits > 1:
        finish(queue, p, to.y, parts=(cut.splits, 0))
    _float32(queue, p, only_if=inexact)
    del memory, tiles, flag  # alive until everything that reads them is queued


def _sums(queue: Queue, p: Product, splits: int) -> tuple[Any, Product]:
    """Returns memory for the sums of so many parts of K, and the product that puts them there; `p` itself if one."""
    if splits == 1:
        return None, p
    memory, sums = queue.allocate(4 * splits * p.m * p.n, False)
    return memory, replace(p, y=sums, bias=0, dtype="float32")


def _large(queue: Queue, p: Product, wide: WideWeight | None) -> None:
    wide = wide or wide_weight(queue, p.b, p.n, p.k)
    wide_x = wide_weight(queue, p.x, p.m, p.k) if p.x.quantized else WideWeight(p.x.data, 0, None)
    direct = not p.bias and p.dtype != "float16"
    memory, y = (None, p.y) if direct else queue.allocate(4 * p.m * p.n, False)
    sizes, dtype = (p.m, p.n, p.k), p.dtype if direct else "float32"
    queue.device.matmul_bf16(wide_x.data, wide.data, y, sizes, dtype=dtype, queue=queue)
    if not direct:
        finish(queue, p, y)
    for inexact in (wide_x.inexact, wide.inexact):
        if inexact:
            _float32(queue, p, only_if=inexact)
    del memory, wide_x  # alive until everything that reads them is queued


def _parts(queue: Queue, p: Product, wide: WideWeight | None) -> None:
    """Queues a product of float32 or float16 x: its bfloat16 parts are so many times M rows, and finish.cu adds up."""
    parts = cuda_skinny.PARTS[p.x.kind]
    size = DTYPE_BYTES[p.x.kind]
    rows = min(p.m, max(_PARTS_BYTES // (4 * parts * p.n), 64))
    memory, data = queue.allocate(2 * parts * rows * p.k, False)
    more, sums = queue.allocate(4 * parts * rows * p.n, False)
    flag, inexact = queue.allocate(16, True)
    for first in range(0, p.m, rows):
        m = min(rows, p.m - first)
        x, y = p.x.data + first * p.k * size, p.y + first * p.n * DTYPE_BYTES[p.dtype]
        total, ragged = m * p.k, bool(m * p.k % 16) or _unaligned(x)
        kernel = f"bfloat16_parts<{KINDS[p.x.kind]}, {_flags(ragged)}>"
        grid = _ceil(total, 16 * THREADS)
        queue.device.launch(Launch("bfloat16_parts", kernel, grid, (x, data, total)), queue.stream)
        inner = replace(p, x=Operand("bfloat16", data), bias=0, y=sums, dtype="float32", m=parts * m)
        _by(choose(queue.device.capability, inner, forced=False, kept=wide is not None), queue, inner, wide)
        finish(queue, replace(p, y=y, m=m), sums, parts=(parts, 8), inexact=inexact)
    _float32(queue, p, only_if=inexact)
    del memory, more, flag  # alive until everything that reads them is queued


_PARTS_BYTES: Final = 256 << 20
"""Of the sums of parts, at most: x goes in slices of so many rows."""


def _float32(queue: Queue, p: Product, only_if: int = 0) -> None:
    grid = min(_ceil(p.m, 64) * _ceil(p.n, 64), 4 * queue.device.processors)
    name = f"gemm_float32<{KINDS[p.x.kind]}, {KINDS[p.b.kind]}>"
    queue.device.launch(Launch("gemm_float32", name, grid, (*_arguments(p), only_if)), queue.stream)


def _arguments(p: Product) -> tuple[int, ...]:
    return (p.x.data, p.x.scales, p.b.data, p.b.scales, p.bias, p.y, p.m, p.n, p.k, DTYPE_CODES[p.dtype])


def _layout(swizzled: bool, transposed: bool) -> str:
    return "SWIZZLED" if swizzled else "TRANSPOSED" if transposed else "PLAIN"


def _flags(*flags: bool) -> str:
    return ", ".join("true" if flag else "false" for flag in flags)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _unaligned(*addresses: int) -> bool:
    return any(address % 16 for address in addresses)
