"""Which tensors are known before the model runs: an initializer or Constant, behind view-like nodes.

initializer | Constant -> (Identity | Transpose | Cast | Reshape | Squeeze | Unsqueeze)* -> operand
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from mxfp8_graph.onnx_pass.source import INLINE_BYTES, Source
from mxfp8_graph.weights import apply

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Static:
    """A tensor whose value is known: stored data and the steps from it to what the consumer sees."""

    name: str
    """Of the initializer, or of the Constant node's output."""
    tensor: onnx.TensorProto
    """Where the data lies."""
    owner: onnx.GraphProto
    """The graph that holds it."""
    shape: tuple[int, ...]
    """After the steps."""
    dtype: int
    """onnx.TensorProto.DataType after the steps."""
    steps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """("Transpose", perm), ("Cast", (dtype,)) or ("Reshape", shape), first to last."""
    through: tuple[str, ...] = field(default=(), compare=False)
    """Outputs of the nodes on the way, which die with their last consumer."""

    @property
    def byte_size(self) -> int:
        """Bytes of the tensor after the steps."""
        return math.prod(self.shape) * int(onnx.helper.tensor_dtype_to_np_dtype(self.dtype).itemsize)


class Constants:
    """Resolves operands of one model to `Static` values. `initializers` is by name: ONNX forbids shadowing."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._owners: dict[str, tuple[onnx.GraphProto, onnx.TensorProto]] = {}
        inputs = () if source.weights_are_inputs else source.proto.graph.input
        overridable = {i.name for i in inputs}
        self.overridable: Final = overridable & {t.name for t in source.proto.graph.initializer}
        """Initializers that are graph inputs too: defaults a caller may replace, so not static."""

    def add_graph(self, graph: onnx.GraphProto) -> None:
        """Makes the initializers and Constant nodes of `graph` known."""
        for tensor in graph.initializer:
            if tensor.name not in self.overridable:
                self._owners[tensor.name] = (graph, tensor)
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in {"", "ai.onnx"}:
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self._owners[node.output[0]] = (graph, attribute.t)

    def resolve(self, tensor: gs.Tensor) -> Static | None:
        """Returns `tensor` as stored data and steps, or None if it is not static in that way."""
        if tensor.name in self._owners:
            owner, stored = self._owners[tensor.name]
            return Static(
                name=tensor.name, tensor=stored, owner=owner, shape=tuple(stored.dims), dtype=stored.data_type
            )
        if len(tensor.inputs) != 1:
            return None
        node = tensor.inputs[0]
        step = _STEPS.get(node.op) if node.domain in {None, "", "ai.onnx"} else None
        before = self.resolve(node.inputs[0]) if step else None
        if step is None or before is None:
            return None
        after = step(self, node, before)
        return None if after is None else replace(after, through=(*before.through, tensor.name))

    def value(self, tensor: gs.Tensor) -> Array | None:
        """Returns the value of a small static tensor, or None."""
        static = self.resolve(tensor)
        if static is None or static.byte_size > INLINE_BYTES or static.name in self._source.tensors:
            return None
        return apply(static.steps, numpy_helper.to_array(static.tensor))

    def is_constant(self, tensor: gs.Tensor, _depth: int = 0) -> bool:
        """Whether `tensor` depends on no graph input, whatever the ops on the way."""
        if tensor.name in self._owners:
            return True
        if not tensor.inputs or _depth > 64:
            return False
        inputs = tensor.inputs[0].inputs
        return bool(inputs) and all(self.is_constant(i, _depth + 1) for i in inputs if not i.is_empty())

    def _transpose(self, node: gs.Node, before: Static) -> Static:
        perm = tuple(node.attrs.get("perm") or reversed(range(len(before.shape))))
        shape = tuple(before.shape[axis] for axis in perm)
        return replace(before, shape=shape, steps=(*before.steps, ("Transpose", perm)))

    def _cast(self, node: gs.Node, before: Static) -> Static:
        dtype = node.attrs["to"]
        code = dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return replace(before, dtype=code, steps=(*before.steps, ("Cast", (code,))))

    def _identity(self, node: gs.Node, before: Static) -> Static:
        return before

    def _reshape(self, node: gs.Node, before: Static) -> Static | None:
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

    def _squeeze(self, node: gs.Node, before: Static) -> Static | None:
        axes: Any = [i for i, d in enumerate(before.shape) if d == 1]
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            axes = self.value(node.inputs[1])
        if axes is None:
            return None
        gone = {int(a) % len(before.shape) for a in axes}
        return _reshaped(before, tuple(d for i, d in enumerate(before.shape) if i not in gone))

    def _unsqueeze(self, node: gs.Node, before: Static) -> Static | None:
        axes = self.value(node.inputs[1])
        if axes is None:
            return None
        rank = len(before.shape) + len(axes)
        ones = {int(a) % rank for a in axes}
        rest = iter(before.shape)
        return _reshaped(before, tuple(1 if i in ones else next(rest) for i in range(rank)))


def _reshaped(before: Static, shape: tuple[int, ...]) -> Static:
    return replace(before, shape=shape, steps=(*before.steps, ("Reshape", shape)))


_STEPS: Final[dict[str, Callable[[Constants, gs.Node, Static], Static | None]]] = {
    "Identity": Constants._identity,
    "Transpose": Constants._transpose,
    "Cast": Constants._cast,
    "Reshape": Constants._reshape,
    "Squeeze": Constants._squeeze,
    "Unsqueeze": Constants._unsqueeze,
}
VIEW_OPS: Final = tuple(_STEPS)
"""The ops a weight may stand behind."""
