"""Types of values, and how deep a model may be nested: whatever walks one, here and in onnx, calls itself per level."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import onnx

from mxfp8_graph.onnx_model.validate.places import Place
from mxfp8_graph.onnx_model.walk import subgraphs

MOST_LEVELS: Final = 33
"""Graphs inside graphs; protobuf reads no more from a file (100 messages inside each other, 3 for each graph)."""

MOST_TYPE_LEVELS: Final = 16
"""Sequences of sequences of ..."""

_DTYPES: Final = frozenset(onnx.TensorProto.DataType.values())
"""The undefined one among them: exporters use it for what they do not know."""

MOST_DIMS: Final = 32
"""Dimensions of a stored tensor: NumPy before 2.0 has no more."""


def check_nesting(model: onnx.ModelProto, place: Place) -> None:
    """Raises ContractError if graphs or types are nested too deep. Calls itself for nothing."""
    stack = [(model.graph.node, 1), *((function.node, 1) for function in model.functions)]
    values: list[Iterable[onnx.ValueInfoProto]] = list(_values(model.graph))
    while stack:
        nodes, level = stack.pop()
        if level > MOST_LEVELS:
            raise place.error(
                f"subgraphs inside subgraphs, more than {MOST_LEVELS} levels", "fewer", "flatten the model"
            )
        for node in nodes:
            if node.attribute:
                for _, inner in subgraphs(node):
                    stack.append((inner.node, level + 1))
                    values += _values(inner)
    for infos in values:
        for info in infos:
            _check_type(info, place)


def _values(graph: onnx.GraphProto) -> Iterator[Iterable[onnx.ValueInfoProto]]:
    yield from (graph.input, graph.output, graph.value_info)


def _check_type(info: onnx.ValueInfoProto, place: Place) -> None:
    kind, level = info.type, 0
    while (which := kind.WhichOneof("value")) in {"sequence_type", "optional_type", "map_type"}:
        level += 1
        if level > MOST_TYPE_LEVELS:
            what = f"value {info.name!r}: types inside types, more than {MOST_TYPE_LEVELS} levels"
            raise place.error(what, "fewer")
        inner = getattr(kind, which)
        kind = inner.value_type if which == "map_type" else inner.elem_type
    if which not in {"tensor_type", "sparse_tensor_type"}:
        return
    tensor = getattr(kind, which)
    if tensor.elem_type not in _DTYPES:
        what = f"value {info.name!r} has unknown dtype {tensor.elem_type}"
        raise place.error(what, "one of onnx.TensorProto.DataType")
    if not all(isinstance(dim.dim_param, str) for dim in tensor.shape.dim):
        raise place.error(f"a dimension of value {info.name!r} has a name that is not UTF-8", "text")
