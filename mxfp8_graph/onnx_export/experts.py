"""Experts that are picked at run time: ONNX cannot gather float8, so grouped nodes pick them.

    MXFP8Gemm(A, Gather(B, i), Gather(B_scales, i), bias)  ->  Add(MXFP8GroupedGemm(A, B, B_scales, i), bias)

and MXFP8WeightGemm alike.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from mxfp8_ops import contract

_GROUPED: Final = {contract.GEMM.name: contract.GROUPED_GEMM, contract.WEIGHT_GEMM.name: contract.GROUPED_WEIGHT_GEMM}


def pick_in_nodes(model: ir.Model) -> None:
    """Replaces gemms of gathered weights by grouped gemms, in place."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            if node.domain == contract.DOMAIN and node.op_type in _GROUPED:
                _pick(node, graph)


def _pick(gemm: ir.Node, graph: ir.Graph) -> None:
    op = contract.OPS[gemm.op_type]
    at = op.packed_at
    assert at is not None  # both are gemms
    gathers = [value.producer() if value is not None else None for value in gemm.inputs[at : at + 2]]
    elements, scales = gathers
    if elements is None or scales is None or not all(_gathers_matrices(each) for each in (elements, scales)):
        return
    # Elements and scales have to be of the same experts.
    if elements.inputs[1] is not scales.inputs[1]:
        return
    bias = gemm.inputs[at + 2] if len(gemm.inputs) > at + 2 else None
    gemm.op_type = _GROUPED[gemm.op_type].name
    gemm.resize_inputs(at + 3)
    for index, value in enumerate((elements.inputs[0], scales.inputs[0], _int64(elements, graph))):
        gemm.replace_input_with(at + index, value)
    if bias is not None:
        _add(bias, gemm, graph)
    for gather in (elements, scales):
        # Another gemm may read the same gathered weight.
        if not gather.outputs[0].uses() and not gather.outputs[0].is_graph_output():
            gather_graph = gather.graph
            assert gather_graph is not None  # it was not removed before
            gather_graph.remove(gather, safe=True)


def _gathers_matrices(node: ir.Node | None) -> bool:
    if node is None or node.op_type != "Gather" or node.domain:
        return False
    axis, stack = node.attributes.get("axis"), node.inputs[0]
    first = axis is None or axis.as_int() == 0
    return first and stack is not None and stack.shape is not None and len(stack.shape) == 3


def _int64(gather: ir.Node, graph: ir.Graph) -> ir.Value | None:
    index = gather.inputs[1]
    if index is None or index.dtype == ir.DataType.INT64:
        return index
    cast = ir.node("Cast", [index], {"to": int(ir.DataType.INT64)})
    gather.prepend(cast)
    return cast.outputs[0]


def _add(bias: ir.Value, gemm: ir.Node, graph: ir.Graph) -> None:
    """Adds a float32 bias to the result of `gemm`, and rounds the sum to the dtype that the result had."""
    # A gemm rounds once, after the bias. The grouped node has no bias, so its result stays float32 until the sum.
    wanted = gemm.attributes["output_dtype"].as_int()
    gemm.attributes["output_dtype"] = ir.AttrInt64("output_dtype", contract.FLOAT)
    product = gemm.outputs[0]
    users = list(product.uses())
    total = ir.node("Add", [product, bias])
    gemm.append(total)
    result = total.outputs[0]
    if wanted != contract.FLOAT:
        cast = ir.node("Cast", [result], {"to": wanted})
        total.append(cast)
        result = cast.outputs[0]
    result.shape, result.dtype = product.shape, ir.DataType(wanted)
    product.dtype = ir.DataType.FLOAT
    for user, index in users:
        user.replace_input_with(index, result)
    for index, output in enumerate(graph.outputs):
        if output is product:
            result.name, product.name = product.name, f"{product.name}_product"
            graph.outputs[index] = result
