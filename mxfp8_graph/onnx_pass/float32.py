"""Changes the 16-bit values of a model to float32, with few casts. No node rounds to 16 bits any more.

input               -> Cast -> ...     inputs and outputs of the model keep their dtype
... -> Cast         -> output
large tensor        -> Cast -> ...     its bytes stay; ONNX Runtime casts them when it loads the model
Gather(table, ids)  -> Cast -> ...     so that a table takes no more memory than before
small tensor                           stored in float32
Cast from or to 16 bits                removed, where both sides are float32 now
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass import graph as g
from mxfp8_graph.onnx_pass.graph import INFERRED, dtype_of
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

HALVES: Final = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""The 16-bit floats."""

_DTYPES: Final = frozenset({"to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})
"""Attributes for the dtype that a node computes in or returns. Not activation_dtype: our kernels round to that."""


def to_float32(model: ir.Model) -> list[str]:
    """Changes 16-bit values to float32 in place, and returns a note, or [] if there are none.

    The data of large initializers is not read.

    Args:
        model: its dtypes are inferred already.

    Raises:
        ContractError: a node reinterprets the bits of values, or an input or output is a sequence of them.
    """
    values = {value for graph in model.graphs() for value in _values(graph)}
    if not any(dtype_of(value) in HALVES for value in values):
        return []
    functions = (function for function in model.functions.values() if function.domain != contract.DOMAIN)
    nodes = [*model.graph.all_nodes(), *(node for function in functions for node in function.all_nodes())]
    bits = [f"node {g.label(n)!r} (BitCast) reinterprets the bits of values" for n in nodes if n.op_type == "BitCast"]
    # A Cast takes a tensor, and so a sequence at an input or output could not keep its dtype.
    ends = (value for value in (*model.graph.inputs, *model.graph.outputs) if value.dtype in HALVES)
    sequences = [f"{value.name!r} is no tensor" for value in ends if not isinstance(value.type, ir.TensorType)]
    if obstacles := [*bits, *sequences]:
        expected, advice = "values that can be float32", "leave out runs_on (--for cpu)"
        raise ContractError(g.name_of(model), obstacles[0], expected=expected, advice=advice)
    for node in nodes:
        _retype(node)
    for value in values - _cast(model):
        if value.const_value is not None and value.const_value.dtype in HALVES:
            value.const_value = _in_float32(value.const_value)
        for declared in (value, value.meta.get(INFERRED, value)):
            if isinstance(declared.type, ir.TensorType) and declared.dtype in HALVES:
                declared.type = ir.TensorType(ir.DataType.FLOAT, denotation=declared.type.denotation)
    return ["computes in float32 instead of 16 bits, with casts at inputs, outputs, lookups and large tensors"]


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)]


def _cast(model: ir.Model) -> set[ir.Value]:
    """Adds casts behind inputs, large tensors and lookups, and before outputs; returns the values left in 16 bits."""
    graph, fresh = model.graph, g.fresh_names(model)
    large = (v for v in graph.initializers.values() if v.const_value and g.is_large(v.const_value))
    ends = dict.fromkeys((*graph.inputs, *large, *graph.outputs))
    kept = [value for value in ends if dtype_of(value) in HALVES and value.producer() is None]
    for node in [node for node in graph if g.is_op(node, "Cast") and not node.outputs[0].is_graph_output()]:
        (value,) = node.inputs
        if value is not None and {dtype_of(value), dtype_of(node.outputs[0])} <= {*HALVES, ir.DataType.FLOAT}:
            node.outputs[0].replace_all_uses_with(value)
            g.remove(node)

    def cast(value: ir.Value, name: str, dtype: int) -> ir.Value:
        result, to, shape = ir.Value(name=name), ir.DataType(dtype), g.shape_of(value)
        result.meta[INFERRED] = ir.Value(type=ir.TensorType(to), shape=None if shape is None else ir.Shape(shape))
        label, before = fresh(f"mxfp8_graph.float32.{value.name}"), value.producer()
        node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", to)], outputs=[result], name=label)
        graph.insert_before(graph[0], node) if before is None else before.append(node)
        return result

    # The list grows in the loop: rows of a table in 16 bits are in 16 bits too, until they are cast.
    for value in kept:
        lookups = [use for use in value.uses() if use[1] == 0 and use[0].graph is graph and g.is_op(use[0], "Gather")]
        kept += [node.outputs[0] for node, _ in lookups]
        if others := [use for use in value.uses() if use not in lookups]:
            new = cast(value, fresh(f"{value.name}_f32"), ir.DataType.FLOAT)
            for node, index in others:
                node.replace_input_with(index, new)
    for value in dict.fromkeys(value for value in graph.outputs if dtype_of(value) in HALVES and value not in kept):
        # The cast's result takes the name, type and shape of the output, as the caller knows it.
        name, value.name = str(value.name), fresh(f"{value.name}_f32")
        new = cast(value, name, dtype_of(value))
        new.type, new.shape, new.doc_string = value.type, value.shape, value.doc_string
        new.metadata_props.update(value.metadata_props)
        value.type = value.shape = value.doc_string = None  # these describe the output, which is the cast's result now
        graph.outputs[:] = [new if output is value else output for output in graph.outputs]
        kept.append(new)
    return {*kept}


def _retype(node: ir.Node) -> None:
    for name, attribute in [item for item in node.attributes.items() if not item[1].is_ref()]:
        if name in _DTYPES and attribute.type == ir.AttributeType.INT and attribute.value in HALVES:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT, doc_string=attribute.doc_string)
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALVES:
            tensor = _in_float32(attribute.as_tensor())
            node.attributes[name] = ir.AttrTensor(name, tensor, doc_string=attribute.doc_string)


def _in_float32(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)
