"""What TensorRT's ONNX parser asks of MXFP8 nodes (onnx-tensorrt, onnxOpImporters.cpp; TensorRT 10 to 11).

The parser was not run here: these are the checks of its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import helper

from mxfp8_graph.onnx_model.dialects import TRT, TRT_DEQUANTIZE, TRT_QUANTIZE, TRT_STATIC_QUANTIZE
from mxfp8_graph.onnx_model.walk import iter_graphs, node_label, stored_in
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE


def violations(model: onnx.ModelProto) -> list[str]:
    """Returns what the parser would refuse, a line each; dims of tensors suffice, their data is not read."""
    found = list(_imports(model))
    for graph in iter_graphs(model.graph):
        stored = stored_in(graph)
        types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
        for node in graph.node:
            if node.domain == contract.DOMAIN:
                found.append(f"{node_label(node)}: {node.op_type} is of domain {node.domain!r}")
            if node.domain == TRT:
                found += [f"{node_label(node)}: {what}" for what in _of_node(node, stored, types)]
    return found


def _imports(model: onnx.ModelProto) -> Iterator[str]:
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions.get(TRT) != 1:
        yield "the model does not import domain 'trt' at version 1"
    if versions.get("", versions.get("ai.onnx", 0)) < 13:
        yield "the default axis is another one before opset 13"


def _of_node(node: onnx.NodeProto, stored: dict[str, onnx.TensorProto], types: dict[str, int]) -> Iterator[str]:
    block = attribute(node, "block_size", BLOCK_SIZE)
    if block != BLOCK_SIZE:
        yield f"block_size is {block}, and only {BLOCK_SIZE} is supported"
    if node.op_type == TRT_QUANTIZE:
        if len(node.input) != 1:
            yield f"one input expected, {len(node.input)} given"
        if types.get(node.input[0], contract.FLOAT) not in contract.VALUES:
            yield "its input is not float32, float16 or bfloat16"
        if len(node.output) != 2:
            yield f"two outputs expected, {len(node.output)} given"
        if attribute(node, "output_dtype", contract.FLOAT8E4M3FN) != contract.FLOAT8E4M3FN:
            yield "output_dtype is not float8_e4m3fn"
    elif node.op_type == TRT_DEQUANTIZE:
        if attribute(node, "output_dtype", contract.FLOAT) not in contract.VALUES:
            yield "output_dtype is not float32, float16 or bfloat16"
        elements, scales = (stored.get(name) for name in node.input[:2])
        if elements is not None:
            yield from _of_weight(node, elements, scales)
    elif node.op_type != TRT_STATIC_QUANTIZE:
        yield f"{node.op_type} is no MXFP8 op"


def _of_weight(node: onnx.NodeProto, elements: onnx.TensorProto, scales: onnx.TensorProto | None) -> Iterator[str]:
    dims = list(elements.dims)
    if elements.data_type not in {contract.FLOAT8E4M3FN, contract.UINT8}:
        yield "its elements are not float8_e4m3fn"
    if scales is None or scales.data_type != contract.UINT8:
        yield "its scales are not stored uint8 E8M0 codes"
        return
    axis = attribute(node, "axis", 1)
    if not -len(dims) <= axis < len(dims):
        yield f"axis {axis} is out of range for {dims}"
        return
    if len(scales.dims) != len(dims):
        yield f"scales {list(scales.dims)} have another rank than elements {dims}"
        return
    blocked = [at for at, (n, s) in enumerate(zip(dims, scales.dims, strict=True)) if n != s]
    if len(blocked) != 1:
        yield f"exactly one axis may have blocks: elements {dims}, scales {list(scales.dims)}"
    elif dims[blocked[0]] != BLOCK_SIZE * scales.dims[blocked[0]]:
        yield f"{dims[blocked[0]]} elements are no {scales.dims[blocked[0]]} whole blocks"
    elif blocked[0] != axis % len(dims):
        yield f"axis is {axis}, and axis {blocked[0]} has the blocks"


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Returns the value of an attribute, or `default`."""
    return next((helper.get_attribute_value(each) for each in node.attribute if each.name == name), default)
