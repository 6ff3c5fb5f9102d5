"""Gives every tensor of elements its float8 type: torch stores them as uint8, and the ONNX nodes take float8.

Starts from the nodes, which know their formats, and goes back through views to the origin of the elements: an
initializer, an input of the model, or MXFP8Quantize. No byte changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_export.translation import FORMATS
from mxfp8_ops import contract, formats
from mxfp8_ops.errors import ContractError

_VIEWS: Final = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})
"""Ops that take float8 since opset 21 and only move bytes; their first input is the tensor."""

_Use = tuple[ir.Node, int]


def retype(model: ir.Model) -> None:
    """Types the elements of `model` in place and removes the notes of `translation.py`.

    Raises:
        ContractError: an op other than the nodes and views produces or reads elements.
    """
    nodes = [node for node in model.graph.all_nodes() if node.domain == contract.DOMAIN]
    demands: dict[ir.Value, dict[str, list[_Use]]] = {}
    for node in nodes:
        ports = [
            index for index, row in enumerate(contract.OPS[node.op_type].inputs) if row.dtypes == contract.ELEMENTS
        ]
        # Removed, since the nodes' schemas do not have it.
        noted = node.attributes.pop(FORMATS, None)
        names = noted.as_string().split() if noted is not None else []
        for index, name in zip(ports, names, strict=True):
            _demand(demands, (node, index), name)
        if node.op_type == contract.QUANTIZE.name:
            node.outputs[0].dtype = ir.DataType(node.attributes["output_dtype"].as_int())
    for value, uses in demands.items():
        _give(value, uses)


def _demand(demands: dict[ir.Value, dict[str, list[_Use]]], use: _Use, name: str) -> None:
    """Notes that `use` needs elements of format `name`, and so does every view between it and their origin."""
    node, index = use
    value = node.inputs[index]
    assert value is not None  # elements are no optional input
    uses = demands.setdefault(value, {}).setdefault(name, [])
    # Two nodes may read elements through the same view.
    if use in uses:
        return
    uses.append(use)
    producer = value.producer()
    if producer is None:
        return
    if producer.domain == contract.DOMAIN:
        dtype = producer.attributes["output_dtype"].as_int()
        if producer.op_type == contract.QUANTIZE.name and dtype == formats.element_format(name).onnx_dtype:
            return
    elif producer.op_type in _VIEWS and producer.domain == "":
        _demand(demands, (producer, 0), name)
        return
    source = f"{producer.name!r} ({producer.op_type})"
    if producer.op_type.startswith("Gather"):
        what = f"reads experts that {source} picks while the model runs, and ONNX cannot gather float8"
        expected, advice = "experts in high precision", "exclude them in the recipe"
    else:
        what, advice = (
            f"reads {name} elements {value.name!r}, which come from {source}",
            "quantize after that op instead",
        )
        expected = "elements of that format from mxfp8.quantize or a buffer, through nothing but views"
    raise ContractError("to_onnx", f"node {node.name!r} {what}", expected=expected, advice=advice)


def _give(value: ir.Value, demands: dict[str, list[_Use]]) -> None:
    """Gives `value` the type that its uses demand; an initializer with several demanded types is copied for each.

    The exporter merges initializers of equal bytes, so one may hold elements of both formats, or elements and scales.
    """
    demanded = {use for uses in demands.values() for use in uses}
    others = [(node, index) for node, index in value.uses() if (node, index) not in demanded]
    # The usual case: one format, and no reader but mxfp8 nodes and views.
    if not others and len(demands) == 1:
        _set_type(value, next(iter(demands)))
    # Only an initializer can be copied; an input or a result has one type.
    elif value.const_value is not None and value.graph is not None and not value.is_graph_output():
        for name, uses in demands.items():
            twin = ir.Value(name=f"{value.name}_{name}", shape=value.shape, const_value=value.const_value)
            _set_type(twin, name)
            value.graph.initializers.add(twin)
            for node, index in uses:
                node.replace_input_with(index, twin)
        if not others:
            value.graph.initializers.pop(str(value.name))
    else:
        what = f"elements {value.name!r} are also read {_readers(others)}"
        expected = "one element format, and no reader but mxfp8 ops and views"
        raise ContractError("to_onnx", what, expected=expected, advice="dequantize them for other ops")


def _set_type(value: ir.Value, name: str) -> None:
    row = formats.element_format(name)
    value.dtype = ir.DataType(row.onnx_dtype)
    if value.const_value is not None:
        data = np.asarray(value.const_value.numpy()).view(np.dtype(row.numpy_name))
        value.const_value = ir.Tensor(data, name=value.name)


def _readers(uses: Iterable[_Use]) -> str:
    named = ", ".join(f"by {node.name!r} ({node.op_type})" for node, _ in uses)
    return named or "as another format"
