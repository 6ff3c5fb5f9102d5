"""Helpers of all steps for an `ir.Model`: types of values, constants, subgraphs, removal of unused nodes.

The model keeps the shapes and dtypes that the file declares. The inferred ones are in `Value.meta`, where `dtype_of`
and `shape_of` read them. So a saved model declares no more than the original.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.naming import reserve_name
from mxfp8_ops import contract
from mxfp8_ops.case import Input

STANDARD: Final = frozenset({"", "ai.onnx"})
"""How the default operator domain is written."""

MICROSOFT: Final = "com.microsoft"
"""The domain of ONNX Runtime's own ops."""

NAME_SCOPES: Final = "pkg.torch.onnx.name_scopes"
"""Key of the metadata of a node in which torch's exporter records the modules that the node came from."""

Dim = int | str | None
"""A size, the name of a size, or None if nothing is known."""

INLINE_BYTES: Final = 4096
"""Larger tensors are no sizes, axes or scalars: steps read their values only to pack them."""

INFERRED: Final = "inferred"
"""Key of `Value.meta`: the inferred type and shape, as a Value of its own."""

OVERRIDABLE: Final = "overridable"
"""Key of `Value.meta`: whether a caller may replace this initializer."""


def name_of(model: ir.Model) -> str:
    """Returns the name of a model in messages: its path, or "model"."""
    return str(model.meta.get("name", "model"))


def opset_of(model: ir.Model) -> int:
    """Returns the version of the default operator domain; 0 if the model does not import it."""
    return next((version for domain, version in model.opset_imports.items() if domain in STANDARD), 0)


def module_of(name_scopes: str) -> str:
    """Returns the module path in an entry NAME_SCOPES, such as "model.layers.0.mlp"; "" if it has none."""
    names = re.findall(r"'([^']*)'", name_scopes)  # the repr of a list: outermost module first, then the fx node
    return names[-2] if len(names) >= 2 else ""


def initializers_of(model: ir.Model) -> Iterator[ir.Value]:
    """Yields the initializers of the graph and of every subgraph."""
    return (value for graph in model.graphs() for value in graph.initializers.values())


def fresh_names(model: ir.Model) -> Callable[[str], str]:
    """Returns a function from a wanted name to one like it that no value or node of the model has yet."""
    taken: set[str] = set()
    for graph in model.graphs():
        taken.update(str(value.name) for value in (*graph.inputs, *graph.initializers.values(), *graph.outputs))
        for node in graph:
            taken.add(str(node.name))
            taken.update(str(value.name) for value in (*node.inputs, *node.outputs) if value is not None)
    return lambda wanted: reserve_name(wanted, taken)


def subgraphs_of(node: ir.Node) -> Iterator[ir.Graph]:
    """Yields the graphs in the attributes of a control-flow node."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def is_op(node: ir.Node | None, *ops: str) -> bool:
    """Whether there is a node, and its op is one of `ops` of the standard domain."""
    return node is not None and node.domain in STANDARD and node.op_type in ops


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Returns the value of an attribute of a node, or `default` if the node does not have it."""
    entry = node.attributes.get(name)
    return default if entry is None else entry.value


def settings_of(attributes: Mapping[str, Any]) -> list[ir.Attr]:
    """Returns the attributes of a new node, sorted by name."""
    return ir.convenience.convert_attributes(dict(sorted(attributes.items())))


def dtype_of(value: ir.Value) -> int:
    """Returns the onnx.TensorProto.DataType of a value; 0 if it is unknown or no tensor's."""
    if value.const_value is not None and not is_overridable(value):
        return int(value.const_value.dtype)
    inferred = value.meta.get(INFERRED, value)
    return int(inferred.dtype) if isinstance(inferred.type, ir.TensorType) else 0


def shape_of(value: ir.Value) -> tuple[Dim, ...] | None:
    """Returns the shape of a value: a size, a name or None for each axis; None if even the rank is unknown."""
    # A caller may replace the default of an overridable initializer by a tensor of another shape.
    if value.const_value is not None and not is_overridable(value):
        return tuple(value.const_value.shape.numpy())
    shape = value.meta.get(INFERRED, value).shape
    return None if shape is None else tuple(dim if isinstance(dim, int) else dim.value for dim in shape)


def facts(value: ir.Value) -> Input:
    """Returns dtype and sizes of a value, and whether it is stored, for the function body of a node that reads it."""
    shape = shape_of(value)
    sizes = None if shape is None else [dim if isinstance(dim, int) else None for dim in shape]
    return Input.from_shape(dtype_of(value), sizes, constant=stored(value) is not None)


def facts_of(model: ir.Model) -> dict[str, Input]:
    """Returns the `facts` of each computed value that a node of ours reads, by name."""
    nodes = (node for node in model.graph.all_nodes() if node.domain == contract.DOMAIN)
    values = (value for node in nodes for value in node.inputs if value is not None)
    return {str(value.name): facts(value) for value in values if stored(value) is None}


def is_overridable(value: ir.Value) -> bool:
    """Whether a value is an initializer that a caller may replace."""
    return bool(value.meta.get(OVERRIDABLE))


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor is too large for its values to go to onnx's passes, or to be read as a constant."""
    if isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)):  # the latter packs a weight whenever it is read
        return True
    return bool(tensor.dtype != ir.DataType.STRING and tensor.nbytes > INLINE_BYTES)


def stored(value: ir.Value) -> ir.TensorProtocol | None:
    """Returns the tensor of an initializer or of a Constant node; None if a caller can replace it, and for strings."""
    if value.is_initializer():
        tensor = None if is_overridable(value) else value.const_value
    else:
        node = value.producer()
        tensor = _tensor_of(node) if node is not None and is_op(node, "Constant") else None
    return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor


def default(value: ir.Value) -> ir.TensorProtocol | None:
    """Returns the tensor of a value as `stored` does; for an initializer that a caller may replace, its default."""
    return stored(value) if value.const_value is None else value.const_value


def _tensor_of(constant: ir.Node) -> ir.TensorProtocol | None:
    # Not `ir.convenience.get_const_tensor`: it renames the tensor in the attribute.
    for name, attribute in constant.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name in {"value_int", "value_ints"}:
            return ir.tensor(attribute.value, ir.DataType.INT64)
        if name in {"value_float", "value_floats"}:
            return ir.tensor(attribute.value, ir.DataType.FLOAT)
    return None


def constant(value: ir.Value) -> npt.NDArray[Any] | None:
    """Returns the value of a small constant; None if it has no constant value, or a large one (above 4 KiB)."""
    tensor = stored(value)
    return None if tensor is None or is_large(tensor) else tensor.numpy()


def remove_unused(model: ir.Model, values: Iterable[ir.Value], removable: Callable[[ir.Node], bool]) -> None:
    """Removes those of `values` that nothing uses, and in turn the values that only their producers used.

    Other unused nodes of the original stay.

    Args:
        model: edited in place.
        values: values of any graph of the model.
        removable: whether a node may go away.
    """
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        node, graph = value.producer(), value.graph
        if value.uses() or value.is_graph_output() or graph is None:
            continue
        if node is None:
            if value.is_initializer() and not is_overridable(value):
                graph.initializers.pop(str(value.name))
                if value.is_graph_input():  # a model before IR version 4 lists initializers as inputs
                    graph.inputs.remove(value)
        elif removable(node) and not any(output.uses() or output.is_graph_output() for output in node.outputs):
            waiting += remove(node)


def remove(node: ir.Node) -> list[ir.Value]:
    """Removes a node whose outputs nothing uses; returns the values that it and its subgraphs read."""
    read = [value for value in node.inputs if value is not None]
    graph = node.graph
    for inner in subgraphs_of(node):
        for below in reversed(inner):  # so that the values outside lose these uses
            read += remove(below)
    if isinstance(graph, (ir.Graph, ir.Function)):
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
        graph.remove(node)
    return read


def label(node: ir.Node) -> str:
    """Returns the name of a node in messages: its own, or else its first output or its op."""
    return node.name or next((output.name for output in node.outputs if output.name), node.op_type)


def made_by(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """Returns the node that computes a value, if its op is one of `ops` of the standard domain."""
    node = None if value is None else value.producer()
    return node if is_op(node, *ops) else None


def scalar(value: ir.Value | None) -> float | None:
    """Returns the number of a constant with one element, of any rank; None for other values."""
    array = None if value is None else constant(value)
    return None if array is None or array.size != 1 else float(array.reshape(-1)[0])


def only_used_by(value: ir.Value, nodes: Container[ir.Node]) -> bool:
    """Whether only `nodes` use a value, so that it may go away with them."""
    return not value.is_graph_output() and all(use.node in nodes for use in value.uses())


def with_inner(node: ir.Node) -> Iterator[ir.Node]:
    """Returns a node and the nodes of its subgraphs."""
    return itertools.chain([node], *(inner.all_nodes() for inner in subgraphs_of(node)))
