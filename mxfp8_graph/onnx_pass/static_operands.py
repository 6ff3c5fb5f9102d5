"""Which operands are known before the model runs: an initializer or Constant, behind view-like nodes.

initializer | Constant -> (Identity | Transpose | Cast | Reshape | Squeeze | Unsqueeze | Split | Slice)* -> operand

Behind them may stand an Expand or Tile that only repeats the value along leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from mxfp8_graph.onnx_model.check import DTYPES, MOST_DIMS
from mxfp8_graph.onnx_model.dialect_ops import TRT_DEQUANTIZE
from mxfp8_graph.onnx_model.open import INLINE_BYTES, OpenedModel
from mxfp8_graph.onnx_model.tensor_data import is_apart
from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.onnx_pass.weight_rows import Steps, apply


@dataclass(frozen=True, kw_only=True)
class Static:
    """An operand whose value is known: stored data and the steps from it to what the consumer sees."""

    name: str
    """Name of the initializer, or of the Constant node's output."""
    tensor: onnx.TensorProto
    """The stored data."""
    owner: onnx.GraphProto
    """The graph that holds it."""
    shape: tuple[int, ...]
    """Shape after the steps."""
    dtype: int
    """onnx.TensorProto.DataType after the steps."""
    steps: Steps = ()
    lead: int = 0
    """How many more leading dimensions the consumer sees, along which the value repeats."""

    @property
    def byte_size(self) -> int:
        """Bytes of the tensor after the steps."""
        return math.prod(self.shape) * int(onnx.helper.tensor_dtype_to_np_dtype(self.dtype).itemsize)

    def then(self, step: str, argument: tuple[int, ...], **changes: Any) -> Static:
        """Returns this after one more step, with the shape or dtype that the step changes."""
        return replace(self, steps=(*self.steps, (step, argument)), **changes)


MOST_VIEWS: Final = 100
"""A stored tensor behind more views than this is not looked for."""

_INTEGERS: Final = frozenset({onnx.TensorProto.INT32, onnx.TensorProto.INT64})
"""The dtypes in which nodes take shapes and axes."""

_NUMBERS: Final = DTYPES - {onnx.TensorProto.STRING}

Stored = Mapping[str, tuple[onnx.GraphProto, onnx.TensorProto]]
"""Name -> the graph that holds the data, and the tensor with it."""


def overridable(opened: OpenedModel) -> set[str]:
    """Returns the initializers that are graph inputs too: defaults a caller may replace, so not static."""
    if opened.weights_are_inputs:
        return set()
    return {i.name for i in opened.proto.graph.input} & {t.name for t in opened.proto.graph.initializer}


class StaticOperands:
    """Resolves operands of one model to `Static` values.

    Goes by graphsurgeon's tensors and not by name: two branches of an If may use one name for different weights.
    """

    def __init__(self, opened: OpenedModel, graphs: Iterable[tuple[gs.Graph, Stored]]) -> None:
        """`graphs`: outermost first, each with what it can see, its own and that of the graphs around it."""
        self._opened = opened
        self.overridable: Final = overridable(opened)
        self._stored: dict[int, tuple[onnx.GraphProto, onnx.TensorProto]] = {}
        self._constant: set[int] = set()
        self._resolved: dict[int, Static | None] = {}
        """What `resolve` found, by the tensor's id."""
        self._nested = 0
        """How many calls of `value` are inside each other."""
        for view, visible in graphs:
            for node in view.nodes:
                for tensor in (*node.inputs, *node.outputs):
                    if tensor.name in visible:
                        self._stored[id(tensor)] = visible[tensor.name]
                        self._constant.add(id(tensor))
                given = [tensor for tensor in node.inputs if not tensor.is_empty()]
                branches = any(isinstance(value, gs.Graph) for value in node.attrs.values())
                if given and not branches and all(self.is_constant(tensor) for tensor in given):
                    self._constant.update(id(tensor) for tensor in node.outputs)

    def resolve(self, tensor: gs.Tensor) -> Static | None:
        """Returns `tensor` as stored data and steps, or None if it is not static in that way."""
        views: list[tuple[gs.Node, gs.Tensor]] = []
        while id(tensor) not in self._resolved:
            node = _view_of(tensor)
            if id(tensor) in self._stored or node is None or len(views) == MOST_VIEWS:
                self._resolved[id(tensor)] = self._origin(tensor)
                break
            views.append((node, tensor))
            tensor = node.inputs[0]
        static = self._resolved[id(tensor)]
        for node, output in reversed(views):
            step = _behind_repeat if static and static.lead else _STEPS[node.op]
            static = step(self, node, static, output) if static else None
            self._resolved[id(output)] = static
        return static

    def _origin(self, tensor: gs.Tensor) -> Static | None:
        if id(tensor) not in self._stored:
            return None
        owner, stored = self._stored[id(tensor)]
        shape = tuple(stored.dims)
        return Static(name=tensor.name, tensor=stored, owner=owner, shape=shape, dtype=stored.data_type)

    def value(self, tensor: gs.Tensor) -> list[int] | None:
        """Returns the values of a small static vector of integers, or None."""
        if self._nested == MOST_VIEWS:
            return None
        self._nested += 1
        static = self.resolve(tensor)
        self._nested -= 1
        if static is None or static.lead or static.byte_size > INLINE_BYTES or static.name in self._opened.tensors:
            return None
        if len(static.shape) != 1 or static.dtype not in _INTEGERS or is_apart(static.tensor):
            return None
        return [int(value) for value in apply(static.steps, numpy_helper.to_array(static.tensor))]

    def step(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        """Returns `output`, which a view-like `node` makes of `before`, or None if that is not static."""
        return _STEPS[node.op](self, node, before, output)

    def repeated(self, tensor: gs.Tensor) -> str | None:
        """Returns the stored tensor that `tensor` repeats as often as the model says when it runs, by name, or None."""
        while (node := _view_of(tensor)) is not None and node.op not in REPEATS:
            tensor = node.inputs[0]
        stored = None if node is None else self.resolve(node.inputs[0])
        return None if stored is None else stored.name

    def source_of(self, tensor: gs.Tensor) -> str:
        """Returns the op behind the views that a constant comes from."""
        while (node := _view_of(tensor)) is not None and node.inputs[0].inputs:
            tensor = node.inputs[0]
        return str(tensor.inputs[0].op)

    def is_constant(self, tensor: gs.Tensor) -> bool:
        """Whether `tensor` depends on no graph input, whatever the ops on the way."""
        return id(tensor) in self._constant

    def _split(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        which = next(i for i, tensor in enumerate(node.outputs) if tensor is output)
        axis = _axis(node.attrs.get("axis", 0), len(before.shape))
        if axis is None:
            return None
        length, count = before.shape[axis], len(node.outputs)
        part = -(-length // count)
        sizes: list[int] | None = [*[part] * (count - 1), length - part * (count - 1)]  # the last takes what is left
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            sizes = self.value(node.inputs[1])
        elif node.attrs.get("num_outputs", count) != count:
            return None
        if sizes is None or len(sizes) != count or sum(sizes) != length or min(sizes) < 0:
            return None
        start = sum(sizes[:which])
        return _cut(before, axis, start, start + sizes[which])

    def _slice(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        given = [None if tensor.is_empty() else self.value(tensor) for tensor in node.inputs[1:]]
        if any(value is None for value in given):
            return None
        starts, ends, *rest = (value for value in given if value is not None)
        axes = [_axis(axis, len(before.shape)) for axis in (rest[0] if rest else range(len(starts)))]
        if len(rest) > 1 and (len(rest[1]) != len(starts) or any(step != 1 for step in rest[1])):
            return None
        if not len(starts) == len(ends) == len(axes) == len(set(axes)):
            return None
        for axis, first, last in zip(axes, starts, ends, strict=True):
            if axis is None:
                return None
            start, stop, _ = slice(first, last).indices(before.shape[axis])
            before = _cut(before, axis, start, max(start, stop))
        return before

    def _transpose(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        perm = permutation(node, len(before.shape))
        if perm is None:
            return None
        return before.then("Transpose", perm, shape=tuple(before.shape[axis] for axis in perm))

    def _cast(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        dtype = node.attrs["to"]
        code = dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        if not {code, before.dtype} <= _NUMBERS:
            return None
        return before.then("Cast", (code,), dtype=code)

    def _identity(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static:
        return before

    def _reshape(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        dims = self.value(node.inputs[1])
        if dims is None or min(dims, default=0) < -1 or dims.count(-1) > 1:
            return None
        if not node.attrs.get("allowzero", 0):
            if 0 in dims[len(before.shape) :]:
                return None
            dims = [before.shape[i] if d == 0 else d for i, d in enumerate(dims)]
        if -1 in dims:
            rest = math.prod(d for d in dims if d != -1)
            dims[dims.index(-1)] = math.prod(before.shape) // rest if rest else 0
        return _reshaped(before, tuple(dims))

    def _squeeze(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        rank = len(before.shape)
        gone = {i for i, d in enumerate(before.shape) if d == 1}
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            axes = self.value(node.inputs[1])
            chosen = {None} if axes is None else {_axis(axis, rank) for axis in axes}
            if None in chosen:
                return None
            gone = {axis for axis in chosen if axis is not None}
        return _reshaped(before, tuple(d for i, d in enumerate(before.shape) if i not in gone))

    def _unsqueeze(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        axes = self.value(node.inputs[1])
        if axes is None:
            return None
        rank = len(before.shape) + len(axes)
        ones = {_axis(axis, rank) for axis in axes}
        if len(ones) < len(axes) or None in ones:
            return None
        rest = iter(before.shape)
        return _reshaped(before, tuple(1 if i in ones else next(rest) for i in range(rank)))

    def _repeat(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        """Returns what Expand or Tile makes of `before` if it repeats it along leading dimensions and nothing else."""
        seen, own = output.shape, before.shape
        while len(own) > 2 and own[0] == 1:
            own = own[1:]
        if seen is None or len(seen) < len(own):
            return None
        lead = len(seen) - len(own)
        # Expand changes no dimension but those of 1, whatever the shape that it is given while the model runs.
        if tuple(seen[lead:]) != own and not (node.op == "Expand" and 1 not in own):
            return None
        same = before if own == before.shape else before.then("Reshape", own, shape=own)
        return replace(same, lead=lead)


def _behind_repeat(statics: StaticOperands, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
    """Returns what a view makes of a value that repeats, if it leaves the leading dimensions as they are."""
    lead, rank = before.lead, len(before.shape)
    if node.op == "Transpose":
        perm = permutation(node, lead + rank)
        if perm is None or perm[:lead] != tuple(range(lead)):
            return None
        inner = tuple(axis - lead for axis in perm[lead:])
        return before.then("Transpose", inner, shape=tuple(before.shape[axis] for axis in inner))
    if node.op == "Reshape":
        shapes = [tensor.shape for tensor in (node.inputs[0], output)]
        return before if None not in shapes and None not in shapes[0] and shapes[0] == shapes[1] else None
    return _STEPS[node.op](statics, node, before, output) if node.op in {"Identity", "Cast"} else None


def dtype_of(tensor: gs.Tensor) -> int:
    """Returns the onnx.TensorProto.DataType of a tensor; 0 if it is unknown."""
    if tensor.dtype is None:
        return 0
    if isinstance(tensor.dtype, int):
        return tensor.dtype
    try:
        return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)))
    except (TypeError, ValueError):  # graphsurgeon gives a type message for a value that is not a tensor
        return 0


def permutation(node: gs.Node, rank: int) -> tuple[int, ...] | None:
    """Returns the axes of a Transpose of a tensor of that rank, or None if it has others."""
    perm = node.attrs.get("perm")
    perm = tuple(reversed(range(rank))) if perm is None else tuple(perm)
    return perm if sorted(perm) == list(range(rank)) else None


def _view_of(tensor: gs.Tensor) -> gs.Node | None:
    """Returns the node that makes `tensor` as a view of its first input, or None."""
    node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    return node if node is not None and node.domain in STANDARD and node.op in _STEPS and node.inputs else None


def _axis(axis: int, rank: int) -> int | None:
    """Returns an axis that may count from the end, or None if there is no such axis."""
    return axis % rank if -rank <= axis < rank else None


def _reshaped(before: Static, shape: tuple[int, ...]) -> Static | None:
    """Returns `before` in another shape of as many values, or None if there is none.

    An empty one has none: it could be one that NumPy does not have, as [2**61, 0].
    """
    if len(shape) > MOST_DIMS or not 0 < math.prod(shape) == math.prod(before.shape):
        return None
    return before.then("Reshape", shape, shape=shape)


def _cut(before: Static, axis: int, start: int, stop: int) -> Static:
    shape = (*before.shape[:axis], stop - start, *before.shape[axis + 1 :])
    return before.then("Slice", (axis, start, stop), shape=shape)


_STEPS: Final[dict[str, Callable[[StaticOperands, gs.Node, Static, gs.Tensor], Static | None]]] = {
    "Identity": StaticOperands._identity,
    "Transpose": StaticOperands._transpose,
    "Cast": StaticOperands._cast,
    "Reshape": StaticOperands._reshape,
    "Squeeze": StaticOperands._squeeze,
    "Unsqueeze": StaticOperands._unsqueeze,
    "Split": StaticOperands._split,
    "Slice": StaticOperands._slice,
    "Expand": StaticOperands._repeat,
    "Tile": StaticOperands._repeat,
}
REPEATS: Final = ("Expand", "Tile")
"""The ops a weight may stand behind if they do nothing but repeat it along leading dimensions."""

VIEW_OPS: Final = tuple(op for op in _STEPS if op not in REPEATS)
"""The ops a weight may stand behind."""

QUANTIZED: Final = frozenset({"DequantizeLinear", TRT_DEQUANTIZE})
"""The ops that give back values which something else has quantized: ONNX's, with any scale, and TensorRT's."""
