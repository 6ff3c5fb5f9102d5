"""Reads the views between a stored weight and its matmul, and applies them to the weight.

initializer | Constant -> (Identity | Transpose | Cast | Reshape | Squeeze | Unsqueeze | Split | Slice)* -> operand

An Expand or Tile behind them may repeat the value along leading dimensions. Where the views leave the values in their
stored order, rows are read straight from the file; otherwise the whole tensor is read first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import attribute, shape_of
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_ops.contract import VALUE_NAMES

Array = npt.NDArray[Any]
Steps = tuple[tuple[str, tuple[int, ...]], ...]
"""Steps, first to last: ("Transpose", perm), ("Cast", (dtype,)), ("Reshape", shape), ("Slice", (axis, start, stop)),
("Pad", (axis, count of zeros at its end)) or ("Flip", axes)."""


@dataclass(frozen=True, kw_only=True)
class Static:
    """An operand whose value is known before the model runs: stored data, and the steps from it to the operand."""

    value: ir.Value
    """The initializer, or the output of the Constant node."""
    tensor: ir.TensorProtocol
    """The stored data."""
    shape: tuple[int, ...]
    """Shape after the steps."""
    dtype: int
    """onnx.TensorProto.DataType after the steps."""
    steps: Steps = ()
    repeated_axes: int = 0
    """Number of further leading dimensions that the consumer sees; the value repeats along them."""

    @property
    def name(self) -> str:
        """Name of the initializer, or of the Constant node's output."""
        return str(self.value.name)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored data."""
        return int(self.tensor.nbytes)

    @property
    def byte_size(self) -> int:
        """Bytes of the tensor after the steps."""
        return math.prod(self.shape) * int(onnx.helper.tensor_dtype_to_np_dtype(self.dtype).itemsize)

    def then(self, step: str, argument: tuple[int, ...], **changes: Any) -> Static:
        """Returns the operand after one more step; `changes` has its new shape or dtype."""
        return replace(self, steps=(*self.steps, (step, argument)), **changes)


Integers = Callable[[ir.Value | None], list[int] | None]
"""Returns the values of a small static vector of integers, or None."""

View = Callable[[ir.Node, Static, ir.Value, Integers], Static | None]
"""(node, its first input, one of its outputs, reader of the other inputs) -> that output, or None if not static."""


def identity(node: ir.Node, before: Static, output: ir.Value, integers: Integers) -> Static:
    """Returns the result of Identity."""
    return before


def cast(node: ir.Node, before: Static, output: ir.Value, integers: Integers) -> Static:
    """Returns the result of Cast."""
    code = int(attribute(node, "to", 0))
    return before.then("Cast", (code,), dtype=code)


def transpose(node: ir.Node, before: Static, output: ir.Value, integers: Integers) -> Static | None:
    """Returns the result of Transpose. The leading dimensions of a value that repeats must stay in front."""
    perm, repeated_axes = permutation(node, before.repeated_axes + len(before.shape)), before.repeated_axes
    if perm is None or perm[:repeated_axes] != tuple(range(repeated_axes)):
        return None
    perm = tuple(axis - repeated_axes for axis in perm[repeated_axes:])
    return before.then("Transpose", perm, shape=tuple(before.shape[axis] for axis in perm))


def reshape(node: ir.Node, before: Static, output: ir.Value, integers: Integers) -> Static | None:
    """Returns the result of Reshape, Squeeze or Unsqueeze, in the shape that onnx infers.

    A value that repeats must keep its shape.
    """
    shape = _sizes_of(output)
    if before.repeated_axes:
        return before if node.inputs[0] is not None and _sizes_of(node.inputs[0]) == shape is not None else None
    # Not of an empty value: NumPy may not have its shape, as [2**61, 0].
    if shape is None or not 0 < math.prod(shape) == math.prod(before.shape):
        return None
    return before.then("Reshape", shape, shape=shape)


def split(node: ir.Node, before: Static, output: ir.Value, integers: Integers) -> Static | None:
    """Returns one output of Split."""
    axis, which = _axis(attribute(node, "axis", 0), len(before.shape)), node.outputs.index(output)
    parts = [_sizes_of(each) for each in node.outputs[: which + 1]]
    if axis is None or None in parts:
        return None
    *ends, end = itertools.accumulate(part[axis] for part in parts if part)
    return _cut(before, axis, ends[-1] if ends else 0, end)


def slice_(node: ir.Node, before: Static, output: ir.Value, integers: Integers) -> Static | None:
    """Returns the result of Slice with steps of 1."""
    arguments = [integers(value) for value in node.inputs[1:]]
    if None in arguments:
        return None
    starts, ends, *rest = (argument for argument in arguments if argument is not None)
    axes = [_axis(axis, len(before.shape)) for axis in (rest[0] if rest else range(len(starts)))]
    if len(rest) > 1 and (len(rest[1]) != len(starts) or any(step != 1 for step in rest[1])):
        return None
    if not len(starts) == len(ends) == len(axes) == len(set(axes)):
        return None
    for axis, first, last in zip(axes, starts, ends, strict=True):
        if axis is None:
            return None
        # Python clamps as ONNX does. For an empty slice its stop may be before the start.
        start, stop, _ = slice(first, last).indices(before.shape[axis])
        before = _cut(before, axis, start, max(start, stop))
    return before


def repeat(node: ir.Node, before: Static, output: ir.Value, integers: Integers) -> Static | None:
    """Returns the result of an Expand or Tile that only repeats a value along leading dimensions."""
    seen, own = shape_of(output), before.shape
    # A leading dimension of 1 is one that the op repeats the value along.
    while len(own) > 2 and own[0] == 1:
        own = own[1:]
    if seen is None or len(seen) < len(own):
        return None
    repeated_axes = len(seen) - len(own)
    # Expand changes only dimensions of 1, whatever shape it gets at run time.
    if tuple(seen[repeated_axes:]) != own and not (node.op_type == "Expand" and 1 not in own):
        return None
    same = before if own == before.shape else before.then("Reshape", own, shape=own)
    return replace(same, repeated_axes=repeated_axes)


BEHIND_REPEAT: Final = (identity, cast, transpose, reshape)
"""The views that may follow an Expand or Tile."""


def permutation(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    """Returns the axes of a Transpose of a tensor of that rank, or None if they are not a permutation."""
    perm = tuple(attribute(node, "perm", range(rank)[::-1]))
    return perm if sorted(perm) == list(range(rank)) else None


def _axis(axis: int, rank: int) -> int | None:
    """Returns an axis counted from the front, or None if there is no such axis."""
    return axis % rank if -rank <= axis < rank else None


def _sizes_of(value: ir.Value) -> tuple[int, ...] | None:
    """Returns the shape of a value; None if a size of it is unknown."""
    shape = shape_of(value) or ()
    sizes = tuple(size for size in shape if isinstance(size, int))
    return sizes if sizes and len(sizes) == len(shape) else None


def _cut(before: Static, axis: int, start: int, stop: int) -> Static:
    shape = (*before.shape[:axis], stop - start, *before.shape[axis + 1 :])
    return before.then("Slice", (axis, start, stop), shape=shape)


def layout_of(tensor: ir.TensorProtocol, steps: Steps, transposed: bool) -> tuple[object, ...]:
    """Returns a key of the values that `steps` and `transposed` make of `tensor`: equal keys mean equal values.

    A table that an embedding reads as it is and an output projection reads through a Transpose is one weight.
    """
    straight = in_stored_order(tuple(tensor.shape.numpy()), steps)
    if straight is None:
        return (steps, transposed)
    shape, flipped, casts = straight
    # A cast of a value dtype to float32, or to itself, changes no value.
    dtype = int(tensor.dtype)
    if dtype in VALUE_NAMES and {*casts} <= {dtype, onnx.TensorProto.FLOAT}:
        casts = ()
    return (shape, flipped != transposed, casts)


def apply(steps: Steps, data: Array) -> Array:
    """Returns the stored `data` after `steps`; a view wherever NumPy can give one."""
    for step, argument in steps:
        if step == "Transpose":
            data = data.transpose(argument)
        elif step == "Cast":
            data = cast_to(data, argument)
        elif step == "Slice":
            axis, start, stop = argument
            data = data[(slice(None),) * axis + (slice(start, stop),)]
        elif step == "Pad":
            axis, count = argument
            data = np.pad(data, [(0, count if each == axis else 0) for each in range(data.ndim)])
        elif step == "Flip":
            data = np.flip(data, argument)
        else:
            data = data.reshape(argument)
    return data


def cast_to(data: Array, dtypes: Sequence[int]) -> Array:
    """Returns values cast to each of these onnx.TensorProto.DataType in turn."""
    # A value above the range becomes Inf, as in the model.
    with np.errstate(over="ignore"):
        for dtype in dtypes:
            data = data.astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
    return data


def in_stored_order(dims: tuple[int, ...], steps: Steps) -> tuple[tuple[int, ...], bool, tuple[int, ...]] | None:
    """Returns (shape, flipped, casts) if `steps` leave the values in their stored order, or None.

    The result of the steps is the stored values in `shape` and cast, with the last two axes swapped if `flipped`.
    """
    shape, flipped = dims, False
    casts: list[int] = []
    for step, argument in steps:
        if step == "Cast":
            casts.append(argument[0])
        elif step in {"Slice", "Pad", "Flip"}:
            return None
        elif step == "Reshape":
            # The stored order of swapped axes is not the order that the Reshape reads.
            if flipped:
                return None
            shape = argument
        elif len(shape) >= 2 and argument == k_last(range(len(shape))):
            flipped = not flipped
        elif argument != tuple(range(len(shape))):
            return None
    return (shape, flipped, tuple(casts)) if len(shape) >= 2 and 0 not in shape else None
