"""Packs weights straight from where they lie, a slice of rows at a time: a weight is never in memory as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from mxfp8_graph.onnx_model.tensor_data import fetching, read
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError, Option

Array = npt.NDArray[Any]
Steps = Sequence[tuple[str, tuple[int, ...]]]
"""("Transpose", perm), ("Cast", (dtype,)), ("Reshape", shape) or ("Slice", (axis, start, stop)), first to last."""

SLICE_BYTES: Final = 32 << 20
"""How much of a weight is read at once."""


@dataclass(frozen=True)
class Packed:
    """A weight as [..., N, K] elements and [..., N, ceil(K / 32)] scales, and what packing it cost."""

    elements: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    signal: float
    """Sum of w^2."""
    noise: float
    """Sum of (w - dequantized)^2."""

    @property
    def relative_l2(self) -> float:
        """|w - dequantized| / |w|; 0 for an all-zero weight."""
        return float((self.noise / self.signal) ** 0.5) if self.signal else 0.0


class NonFiniteError(ContractError):
    """A weight holds a NaN or Inf."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A stack of matrices [..., R, C] that can be read row by row."""

    shape: tuple[int, ...]
    read: Callable[[tuple[int, ...], int, int], Array]
    """(which matrix, first row, last row + 1) -> those rows; valid until the next call."""
    index: Callable[[tuple[int, ...]], list[int]]
    """Where in the stored tensor the value at an index of the stack is."""


def pack(
    rows: Rows,
    *,
    transposed: bool,
    factor: float = 1.0,
    element_format: str = "e4m3",
    scale_rounding: str = "ceil",
    name: str = "weight",
    allow_nonfinite: bool = False,
) -> Packed:
    """Returns `factor` times a weight, quantized along K and laid out with K last.

    Args:
        rows: [..., N, K], or [..., K, N] if `transposed`; float32, float16 or bfloat16.
        transposed: whether K is the last axis but one.
        factor: multiplied in float32 before rounding.
        element_format: "e4m3" or "e5m2".
        scale_rounding: "ceil", "floor" or "even".
        name: what to call the weight in errors.
        allow_nonfinite: whether to pack a NaN or Inf (its block becomes NaN) instead of refusing it.

    Raises:
        NonFiniteError: the weight holds a NaN or Inf and `allow_nonfinite` is false.
    """
    from mxfp8_ops import cpu

    *lead, height, width = rows.shape
    n, k = (width, height) if transposed else (height, width)
    elements = np.empty((*lead, n, k), np.uint8)
    scales = np.empty((*lead, n, -(-k // formats.BLOCK_SIZE)), np.uint8)
    signal = noise = 0.0
    # Slices along K are whole blocks; 4 bytes is the widest value.
    step = -(-SLICE_BYTES // (4 * width * formats.BLOCK_SIZE)) * formats.BLOCK_SIZE
    for at in np.ndindex(*lead):
        for start in range(0, height, step):
            stop = min(start + step, height)
            matrix = rows.read(at, start, stop)
            if factor != 1.0:
                matrix = matrix.astype(np.float32) * np.float32(factor)
            part = cpu.pack(matrix, transposed=transposed, element_format=element_format, scale_rounding=scale_rounding)
            if part.first_nonfinite is not None and not allow_nonfinite:
                row, column = part.first_nonfinite
                allow = Option("allow_nonfinite", True)
                raise NonFiniteError(
                    f"weight {name!r}",
                    f"{matrix[row, column]} at index {rows.index((*at, start + row, column))}",
                    expected="finite values",
                    advice=("repair the checkpoint, or pass ", allow, " to let its block become NaN"),
                )
            if transposed:
                blocks = slice(start // formats.BLOCK_SIZE, -(-stop // formats.BLOCK_SIZE))
                elements[at][:, start:stop], scales[at][:, blocks] = part.elements, part.scales
            else:
                elements[at][start:stop], scales[at][start:stop] = part.elements, part.scales
            signal += part.signal
            noise += part.noise
    return Packed(elements, scales, signal, noise)


@contextlib.contextmanager
def open_rows(tensor: onnx.TensorProto, steps: Steps, folder: Path | None, model: str) -> Iterator[tuple[Rows, bool]]:
    """Yields (the values of `tensor` after `steps` as rows, whether those are the columns of the result).

    Raises:
        ContractError: the tensor cannot be read, see `external.read`.
    """
    straight = _straighten(tuple(tensor.dims), steps)
    if straight is None:
        data = np.ascontiguousarray(apply(steps, read(tensor, folder, model)))

        def seen(at: tuple[int, ...], start: int, stop: int) -> Array:
            return np.asarray(data[at][start:stop])

        yield Rows(shape=data.shape, read=seen, index=list), False
        return
    shape, flipped, casts = straight
    height, width = shape[-2:]
    with fetching(tensor, folder, model) as fetch:

        def stored(at: tuple[int, ...], start: int, stop: int) -> Array:
            matrix = int(np.ravel_multi_index(at, shape[:-2])) if at else 0
            values = fetch((matrix * height + start) * width, (stop - start) * width)
            return _cast(values, casts).reshape(stop - start, width)

        def index(at: tuple[int, ...]) -> list[int]:
            return [int(i) for i in np.unravel_index(np.ravel_multi_index(at, shape), tuple(tensor.dims))]

        yield Rows(shape=shape, read=stored, index=index), flipped


def apply(steps: Steps, data: Array) -> Array:
    """Returns the stored `data` after `steps`; a view wherever NumPy can give one."""
    for step, argument in steps:
        if step == "Transpose":
            data = data.transpose(argument)
        elif step == "Cast":
            data = _cast(data, argument)
        elif step == "Slice":
            axis, start, stop = argument
            data = data[(slice(None),) * axis + (slice(start, stop),)]
        else:
            data = data.reshape(argument)
    return data


def _cast(data: Array, dtypes: Sequence[int]) -> Array:
    with np.errstate(over="ignore"):
        for dtype in dtypes:
            data = data.astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
    return data


def _straighten(dims: tuple[int, ...], steps: Steps) -> tuple[tuple[int, ...], bool, tuple[int, ...]] | None:
    """Returns (shape, flipped, casts) if `steps` leave the values in their stored order, or None.

    The result of the steps is the stored values in `shape` and cast, with the last two axes swapped if `flipped`.
    """
    shape, flipped = dims, False
    casts: list[int] = []
    for step, argument in steps:
        if step == "Cast":
            casts.append(argument[0])
        elif step == "Slice":
            return None
        elif step == "Reshape":
            if flipped:
                return None
            shape = argument
        elif argument == (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2):
            flipped = not flipped
        elif argument != tuple(range(len(shape))):
            return None
    return (shape, flipped, tuple(casts)) if len(shape) >= 2 and 0 not in shape else None
