"""Which operands are known before the model runs: an initializer or Constant, behind view-like nodes.

initializer | Constant -> (Identity | Transpose | Cast | Reshape | Squeeze | Unsqueeze | Split | Slice)* -> operand
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

from mxfp8_graph.onnx_model.open import INLINE_BYTES, OpenedModel
from mxfp8_graph.onnx_model.tensor_data import Array
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

    @property
    def byte_size(self) -> int:
        """Bytes of the tensor after the steps."""
        return math.prod(self.shape) * int(onnx.helper.tensor_dtype_to_np_dtype(self.dtype).itemsize)

    def then(self, step: str, argument: tuple[int, ...], **changes: Any) -> Static:
        """Returns this after one more step, with the shape or dtype that the step changes."""
        return replace(self, steps=(*self.steps, (step, argument)), **changes)


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
        if id(tensor) in self._stored:
            owner, stored = self._stored[id(tensor)]
            return Static(
                name=tensor.name, tensor=stored, owner=owner, shape=tuple(stored.dims), dtype=stored.data_type
            )
        if len(tensor.inputs) != 1:
            return None
        node = tensor.inputs[0]
        step = _STEPS.get(node.op) if node.domain in STANDARD else None
        before = self.resolve(node.inputs[0]) if step else None
        return step(self, node, before, tensor) if step and before else None

    def value(self, tensor: gs.Tensor) -> Array | None:
        """Returns the value of a small static tensor, or None."""
        static = self.resolve(tensor)
        if static is None or static.byte_size > INLINE_BYTES or static.name in self._opened.tensors:
            return None
        return apply(static.steps, numpy_helper.to_array(static.tensor))

    def gathered(self, tensor: gs.Tensor) -> str | None:
        """Returns the name of the stack of matrices that `tensor` is chosen from while the model runs, or None."""
        while tensor.inputs and tensor.inputs[0].op in VIEW_OPS:
            tensor = tensor.inputs[0].inputs[0]
        if not tensor.inputs or tensor.inputs[0].op != "Gather":
            return None
        stack = self.resolve(tensor.inputs[0].inputs[0])
        return stack.name if stack is not None and len(stack.shape) > 2 else None

    def source_of(self, tensor: gs.Tensor) -> str:
        """Returns the op behind the views that a constant comes from."""
        while tensor.inputs[0].op in VIEW_OPS and tensor.inputs[0].inputs[0].inputs:
            tensor = tensor.inputs[0].inputs[0]
        return str(tensor.inputs[0].op)

    def is_constant(self, tensor: gs.Tensor) -> bool:
        """Whether `tensor` depends on no graph input, whatever the ops on the way."""
        return id(tensor) in self._constant

    def _split(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        which = next(i for i, tensor in enumerate(node.outputs) if tensor is output)
        axis = int(node.attrs.get("axis", 0)) % len(before.shape)
        length, count = before.shape[axis], len(node.outputs)
        sizes: Any = [-(-length // count)] * count  # the last one takes what is left
        if "split" in node.attrs:  # before opset 13
            sizes = node.attrs["split"]
        elif len(node.inputs) > 1 and not node.inputs[1].is_empty():
            sizes = self.value(node.inputs[1])
        if sizes is None:
            return None
        start = int(sum(sizes[:which]))
        return _cut(before, axis, start, min(start + int(sizes[which]), length))

    def _slice(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        values = [self.value(tensor) for tensor in node.inputs[1:]]
        if len(values) < 2 or any(value is None for value in values):
            return None
        starts, ends, *rest = ([int(v) for v in value] for value in values if value is not None)
        axes = rest[0] if rest else range(len(starts))
        if len(rest) > 1 and any(step != 1 for step in rest[1]):
            return None
        for axis, first, last in zip(axes, starts, ends, strict=True):
            start, stop, _ = slice(first, last).indices(before.shape[axis])
            before = _cut(before, axis % len(before.shape), start, max(start, stop))
        return before

    def _transpose(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static:
        perm = tuple(node.attrs.get("perm") or reversed(range(len(before.shape))))
        return before.then("Transpose", perm, shape=tuple(before.shape[axis] for axis in perm))

    def _cast(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static:
        dtype = node.attrs["to"]
        code = dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return before.then("Cast", (code,), dtype=code)

    def _identity(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static:
        return before

    def _reshape(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        wanted = self.value(node.inputs[1])
        if wanted is None:
            return None
        dims = [int(d) for d in wanted]
        if not node.attrs.get("allowzero", 0):
            dims = [before.shape[i] if d == 0 else d for i, d in enumerate(dims)]
        if -1 in dims:
            rest = math.prod(d for d in dims if d != -1)
            dims[dims.index(-1)] = math.prod(before.shape) // rest if rest else 0
        return _reshaped(before, tuple(dims))

    def _squeeze(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        axes: Any = [i for i, d in enumerate(before.shape) if d == 1]
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            axes = self.value(node.inputs[1])
        if axes is None:
            return None
        gone = {int(a) % len(before.shape) for a in axes}
        return _reshaped(before, tuple(d for i, d in enumerate(before.shape) if i not in gone))

    def _unsqueeze(self, node: gs.Node, before: Static, output: gs.Tensor) -> Static | None:
        axes = self.value(node.inputs[1])
        if axes is None:
            return None
        rank = len(before.shape) + len(axes)
        ones = {int(a) % rank for a in axes}
        rest = iter(before.shape)
        return _reshaped(before, tuple(1 if i in ones else next(rest) for i in range(rank)))


def _reshaped(before: Static, shape: tuple[int, ...]) -> Static:
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
}
VIEW_OPS: Final = tuple(_STEPS)
"""The ops a weight may stand behind."""

QUANTIZED: Final = frozenset({"DequantizeLinear", "TRT_MXFP8DequantizeLinear"})
"""The ops that give back values which something else has quantized: ONNX's, with any scale, and TensorRT's."""
