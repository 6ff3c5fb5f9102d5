"""The values that an integer input may take: indices that are inside of every table it indexes.

Follows each integer input forward through ops that only move values around (Cast, Reshape, Slice, Where, ...) or shift
them by a constant (Add, Sub), into subgraphs and local functions, to the ops that index a table with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import onnx
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper

from mxfp8_graph.onnx_model import onnx_calls
from mxfp8_graph.onnx_model.tensor_data import is_external
from mxfp8_graph.onnx_model.walk import iter_graphs, stored_in, subgraphs
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

_MOVES: Final = {
    **dict.fromkeys(
        ["Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Transpose", "Slice", "Tile"], (0,)
    ),
    **dict.fromkeys(["Split", "Compress", "Pad", "Clip", "Gather", "GatherElements", "GatherND"], (0,)),
    **dict.fromkeys(["Concat", "Min", "Max"]),
    "Where": (1, 2),
}
"""Op -> the inputs whose values its outputs have; None stands for all inputs."""

_TABLES: Final = {
    "Gather": ((0, 1, "axis"),),
    "GatherElements": ((0, 1, "axis"),),
    "ScatterElements": ((0, 1, "axis"),),
    "GatherBlockQuantized": ((0, 1, "gather_axis"),),
    contract.EMBEDDING.name: ((1, 0, None),),
    contract.GROUPED_GEMM.name: ((2, 4, None),),
    contract.GROUPED_WEIGHT_GEMM.name: ((1, 3, None),),
    "EmbedLayerNormalization": ((2, 0, None), (3, 7, None), (4, 1, None)),
}
"""Op -> (input that is the table, input that indexes it, attribute that says along which axis)."""

_MOST_INDEX: Final = 2**62
"""Largest index that is considered; sums with it stay far below 2^63."""

_MOST_ORIGINS: Final = 1000
"""Origins of one value beyond which it is not followed: each sum of sums may double their number."""

Origins = dict[str, set[tuple[str, int]]]
"""Value name -> pairs of (graph input that it comes from, number that was added to it)."""


def index_ranges(model: ModelProto, where: str = "model") -> dict[str, range]:
    """Returns, for each integer input that indexes tables, the values that stay inside the smallest of them.

    The data of large initializers may be absent.

    Raises:
        ContractError: onnx cannot read the model, which errors call `where`.
    """
    # Lengths of tables come from inferred shapes, since a table may be computed from an initializer.
    model = onnx_calls.infer_shapes(_inlined(model), where, [])
    walk = _Walk(model)
    for name in (i.name for i in model.graph.input if _is_integer(i.type.tensor_type.elem_type)):
        walk.origins[name] = {(name, 0)}
    walk.graph(model.graph)
    return walk.ranges


class _Walk:
    """One pass over the nodes in order, subgraphs where they stand."""

    def __init__(self, model: ModelProto) -> None:
        self.origins: Origins = {}
        self.ranges: dict[str, range] = {}
        self.shapes = dict(_shapes(model))
        self.constants = dict(_small_constants(model))

    def graph(self, graph: GraphProto) -> None:
        for node in graph.node:
            for table, index, axis in _TABLES.get(node.op_type, ()):
                if index < len(node.input) and table < len(node.input):
                    self._bound(node.input[index], self._length(node, table, axis))
            # OneHot's depth is a value and not the length of a table.
            if node.op_type == "OneHot" and len(node.input) > 1:
                depth = self.constants.get(node.input[1])
                if depth is not None:
                    self._bound(node.input[0], depth)
            self._follow(node)

    def _follow(self, node: NodeProto) -> None:
        if node.op_type in _MOVES:
            at = _MOVES[node.op_type]
            moved = node.input if at is None else [node.input[i] for i in at if i < len(node.input)]
            self._join(moved, node.output)
        elif node.op_type in {"Add", "Sub"} and len(node.input) == 2:
            sign = 1 if node.op_type == "Add" else -1
            left, right = node.input
            if (constant := self.constants.get(right)) is not None:
                self._join([left], node.output, sign * constant)
            elif node.op_type == "Add" and (constant := self.constants.get(left)) is not None:
                self._join([right], node.output, constant)
        for _, inner in subgraphs(node):
            # Loop has (trip count, condition) before the carried values on both sides, Scan and If have nothing.
            skip_outputs = 1 if node.op_type == "Loop" else 0
            for outer, own in zip(node.input, inner.input, strict=False):
                self._join([outer], [own.name])
            self.graph(inner)
            for own, result in zip(inner.output[skip_outputs:], node.output, strict=False):
                self._join([own.name], [result])

    def _join(self, sources: Iterable[str], targets: Iterable[str], shift: int = 0) -> None:
        origins = {(name, by + shift) for source in sources for name, by in self.origins.get(source, ())}
        if 0 < len(origins) <= _MOST_ORIGINS:
            for target in targets:
                self.origins.setdefault(target, set()).update(origins)

    def _bound(self, indices: str, length: int) -> None:
        for name, shift in self.origins.get(indices, ()):
            # An index shifted by a constant has to stay inside of [0, length).
            low, high = max(0, -shift), length - shift
            bounds = self.ranges.get(name, range(low, high))
            # The intersection over all tables: one id goes to each of them.
            low, high = max(bounds.start, low), min(bounds.stop, high)
            if high > _MOST_INDEX:
                continue
            # Never empty: tables that contradict each other would leave no value to try.
            self.ranges[name] = range(low, max(high, low + 1))

    def _length(self, node: NodeProto, table: int, axis_name: str | None) -> int:
        """Returns how many entries the table has; 1 if that is unknown, since index 0 is always inside."""
        shape = self.shapes.get(node.input[table], ())
        axis = next((a.i for a in node.attribute if a.name == axis_name), 0)
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        return size if size is not None else 1


def _inlined(model: ModelProto) -> ModelProto:
    """Returns a copy with local functions inlined, if onnx can do that; ours have no tables."""
    copy = ModelProto()
    copy.CopyFrom(model)
    foreign = [function for function in copy.functions if function.domain != contract.DOMAIN]
    del copy.functions[:]
    copy.functions.extend(foreign)
    if not foreign:
        return copy
    try:
        return onnx_calls.inline(copy, [(function.domain, function.name) for function in foreign], "model")
    # A model that cannot be inlined still has ranges for what its main graph indexes.
    except ContractError:
        return copy


def _shapes(model: ModelProto) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    for graph in iter_graphs(model.graph):
        for value in (*graph.value_info, *graph.input):
            tensor = value.type.tensor_type
            if tensor.HasField("shape"):
                yield value.name, tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
        for initializer in graph.initializer:
            yield initializer.name, tuple(initializer.dims)


def _small_constants(model: ModelProto) -> Iterator[tuple[str, int]]:
    """Yields the integer constants that have one value."""
    for graph in iter_graphs(model.graph):
        for name, tensor in stored_in(graph).items():
            if math.prod(tensor.dims) == 1 and not is_external(tensor) and _is_integer(tensor.data_type):
                yield name, int(numpy_helper.to_array(tensor).item())


def _is_integer(dtype: int) -> bool:
    proto = onnx.TensorProto
    return dtype in {proto.INT8, proto.INT16, proto.INT32, proto.INT64, proto.UINT8, proto.UINT16, proto.UINT32}
