"""Gives a model float32 values in the place of 16-bit ones, with few casts.

    input               -> Cast -> ...     inputs and outputs of the model keep their dtype
    ... -> Cast         -> output
    large tensor        -> Cast -> ...     its bytes stay; ONNX Runtime casts them when it loads the model
    Gather(table, ids)  -> Cast -> ...     so that a table takes no more memory than before
    small tensor                           stored in float32
    Cast from or to 16 bits                gone, where it has nothing to do any more

Values between nodes have more precision than before: nothing rounds them to 16 bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import (
    INFERRED,
    dtype_of,
    fresh_names,
    graphs_of,
    is_large,
    is_op,
    label,
    name_of,
    remove,
    shape_of,
    with_inner,
)
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

HALVES: Final = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""The 16-bit floats."""

CAST: Final = "mxfp8_graph.float32."
"""How the names of the casts that are added begin."""

DTYPES: Final = frozenset({"to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})
"""Attributes that say which dtype a node computes in or gives. Not activation_dtype: our kernels round to that."""


def holds(model: ir.Model, *dtypes: ir.DataType) -> bool:
    """Whether a value between nodes, an input or a stored tensor has one of these dtypes, as far as they are known."""
    graphs = list(graphs_of(model.graph))
    values = (value for graph in graphs for value in (*graph.inputs, *graph.initializers.values()))
    outputs = (value for graph in graphs for node in graph for value in node.outputs)
    return any(dtype_of(value) in dtypes for some in (values, outputs) for value in some)


def to_float32(model: ir.Model) -> list[str]:
    """Gives a model float32 values in place; data of large initializers is not read. Returns a note if it changes.

    Args:
        model: with the dtypes that onnx infers.

    Raises:
        ContractError: a node reinterprets the bits of values, which would be others.
    """
    if not holds(model, *HALVES):
        return []
    functions = [function for function in model.functions.values() if function.domain != contract.DOMAIN]
    nodes = [node for outer in (model.graph, *functions) for top in outer for node in with_inner(top)]
    if node := next((node for node in nodes if node.op_type == "BitCast"), None):
        what = f"node {label(node)!r} (BitCast) reinterprets the bits of values"
        expected, advice = "no such node, to compute in float32", "leave out runs_on (--for cpu)"
        raise ContractError(name_of(model), what, expected=expected, advice=advice)
    for node in nodes:
        _retype(node)
    kept, casts = _cast(model)
    for graph in graphs_of(model.graph):
        outputs = (output for node in graph for output in node.outputs)
        for value in {*graph.inputs, *graph.initializers.values(), *outputs} - kept:
            if value.const_value is not None and value.const_value.dtype in HALVES:
                value.const_value = _in_float32(value.const_value)
            for declared in (value, value.meta.get(INFERRED, value)):
                if isinstance(declared.type, ir.TensorType) and declared.dtype in HALVES:
                    declared.type = ir.TensorType(ir.DataType.FLOAT, denotation=declared.type.denotation)
    return [f"computes in float32 instead of 16 bits; {casts} casts at inputs, outputs, lookups and stored tensors"]


def _cast(model: ir.Model) -> tuple[set[ir.Value], int]:
    """Puts casts behind what keeps its dtype and in front of the results; returns (values of 16 bits, casts)."""
    graph, fresh = model.graph, fresh_names(model)
    idle = [node for node in graph if is_op(node, "Cast") and _is_idle(node)]
    kept = [
        v for v in graph.initializers.values() if v.is_graph_output() or (v.const_value and is_large(v.const_value))
    ]
    halves = {value for value in (*graph.inputs, *kept) if dtype_of(value) in HALVES}
    given = sorted(halves, key=lambda value: str(value.name))
    results = [value for value in dict.fromkeys(graph.outputs) if value.producer() and dtype_of(value) in HALVES]
    names = {value: fresh(f"{value.name}_f32") for value in (*given, *results)}

    def cast(value: ir.Value, name: str, dtype: int = ir.DataType.FLOAT) -> ir.Node:
        to, shape = ir.DataType(dtype), shape_of(value)
        result = ir.Value(name=name)
        result.meta[INFERRED] = ir.Value(type=ir.TensorType(to), shape=None if shape is None else ir.Shape(shape))
        settings = [ir.AttrInt64("to", to)]
        return ir.Node("", "Cast", [value], settings, outputs=[result], name=fresh(f"{CAST}{value.name}"))

    for value in results:
        name, value.name = str(value.name), names[value]
        last = cast(value, name, dtype_of(value))
        _declare_instead(last.outputs[0], value)
        graph.outputs[:] = [last.outputs[0] if output is value else output for output in graph.outputs]
        graph.append(last)
        halves.add(last.outputs[0])
    first: list[ir.Node] = []
    for value in given:
        uses = tuple(value.uses())
        widened = cast(value, names[value])
        for node, index in uses:
            if index == 0 and node.graph is graph and node.op_type == "Gather":
                rows = node.outputs[0]
                name, rows.name = str(rows.name), fresh(f"{value.name}_rows")
                read = tuple(rows.uses())
                whole = cast(rows, name)
                _declare_instead(whole.outputs[0], rows)
                for reader, at in read:
                    reader.replace_input_with(at, whole.outputs[0])
                node.append(whole)
                halves.add(rows)
            else:
                node.replace_input_with(index, widened.outputs[0])
        first.append(widened)
    for node in idle:
        (same,) = node.inputs
        assert same is not None  # the model was validated
        node.outputs[0].replace_all_uses_with(same)
        remove(node)
    for node in reversed(first):
        if not node.outputs[0].uses():
            node.replace_input_with(0, None)
        else:
            graph.insert_before(graph[0], node)
    return halves, sum(str(node.name).startswith(CAST) for node in graph)


def _is_idle(cast: ir.Node) -> bool:
    """Whether a Cast has nothing to do in float32, and gives no result of the model."""
    result = cast.outputs[0]
    dtypes = {dtype_of(value) for value in (*cast.inputs, result) if value is not None}
    return dtypes <= {*HALVES, ir.DataType.FLOAT} and not result.is_graph_output()


def _declare_instead(new: ir.Value, old: ir.Value) -> None:
    """Gives one value what the model declares of another."""
    new.type, new.shape, new.doc_string = old.type, old.shape, old.doc_string
    new.metadata_props.update(old.metadata_props)
    old.type = old.shape = old.doc_string = None
    old.metadata_props.clear()


def _retype(node: ir.Node) -> None:
    for name, attribute in tuple(node.attributes.items()):
        if attribute.is_ref():
            continue
        if name in DTYPES and attribute.type == ir.AttributeType.INT and attribute.value in HALVES:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT, doc_string=attribute.doc_string)
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALVES:
            tensor = _in_float32(attribute.as_tensor())
            node.attributes[name] = ir.AttrTensor(name, tensor, doc_string=attribute.doc_string)


def _in_float32(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)
