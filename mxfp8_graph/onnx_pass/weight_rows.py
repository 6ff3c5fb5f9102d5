"""A stored weight as rows for `weights.pack`: what the view-like nodes in front of a matmul make of it.

Where the views leave the values in their stored order, rows are read straight from the file; otherwise the whole tensor
is read first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import onnx

from mxfp8_graph.file_reading import ModelFolder
from mxfp8_graph.onnx_model.tensor_data import Array, fetching, read
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.weights import Rows
from mxfp8_ops.contract import VALUE_NAMES

Steps = tuple[tuple[str, tuple[int, ...]], ...]
"""("Transpose", perm), ("Cast", (dtype,)), ("Reshape", shape) or ("Slice", (axis, start, stop)), first to last."""


@contextlib.contextmanager
def open_rows(
    tensor: onnx.TensorProto, steps: Steps, folder: ModelFolder | None, model: str
) -> Iterator[tuple[Rows, bool]]:
    """Yields (the values of `tensor` after `steps` as rows, whether those are the columns of the result)."""
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


def layout_of(tensor: onnx.TensorProto, steps: Steps, transposed: bool) -> tuple[object, ...]:
    """Returns what tells apart the ways to see `tensor`: equal where `steps` and `transposed` come to the same values.

    A table that an embedding reads as it is and an output projection reads through a Transpose is one weight.
    """
    straight = _straighten(tuple(tensor.dims), steps)
    if straight is None:
        return (steps, transposed)
    shape, flipped, casts = straight
    if _is_exact(tensor.data_type, casts):
        casts = ()
    return (shape, flipped != transposed, casts)


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


def _is_exact(dtype: int, casts: Sequence[int]) -> bool:
    """Whether casts from `dtype` change no value: to float32, or to what it is."""
    return all(cast in {dtype, onnx.TensorProto.FLOAT} for cast in casts) and dtype in VALUE_NAMES


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
        elif len(shape) >= 2 and argument == k_last(range(len(shape))):
            flipped = not flipped
        elif argument != tuple(range(len(shape))):
            return None
    return (shape, flipped, tuple(casts)) if len(shape) >= 2 and 0 not in shape else None
