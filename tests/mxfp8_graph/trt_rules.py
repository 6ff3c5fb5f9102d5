"""What TensorRT's ONNX parser asks of MXFP8 nodes (onnx-tensorrt, onnxOpImporters.cpp; TensorRT 10 to 11).

The parser was not run here: these are the checks of its source.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialects import TRT, TRT_DEQUANTIZE, TRT_QUANTIZE, TRT_STATIC_QUANTIZE
from mxfp8_graph.onnx_pass.graph import attribute, default, dtype_of, label
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE


def violations(model: ir.Model) -> list[str]:
    """Returns what the parser would refuse, a line each; dims of tensors suffice, their data is not read."""
    found = list(_imports(model.opset_imports))
    for node in (node for graph in model.graphs() for node in graph):
        if node.domain == contract.DOMAIN:
            found.append(f"{label(node)}: {node.op_type} is of domain {node.domain!r}")
        if node.domain == TRT:
            found += [f"{label(node)}: {what}" for what in _of_node(node)]
    return found


def _imports(versions: dict[str, int]) -> Iterator[str]:
    if versions.get(TRT) != 1:
        yield "the model does not import domain 'trt' at version 1"
    if versions.get("", versions.get("ai.onnx", 0)) < 13:
        yield "the default axis is another one before opset 13"


def _of_node(node: ir.Node) -> Iterator[str]:
    block = attribute(node, "block_size", BLOCK_SIZE)
    if block != BLOCK_SIZE:
        yield f"block_size is {block}, and only {BLOCK_SIZE} is supported"
    if node.op_type == TRT_QUANTIZE:
        if len(node.inputs) != 1:
            yield f"one input expected, {len(node.inputs)} given"
        if node.inputs[0] is not None and dtype_of(node.inputs[0]) not in {0, *contract.VALUES}:
            yield "its input is not float32, float16 or bfloat16"
        if len(node.outputs) != 2:
            yield f"two outputs expected, {len(node.outputs)} given"
        if attribute(node, "output_dtype", contract.FLOAT8E4M3FN) != contract.FLOAT8E4M3FN:
            yield "output_dtype is not float8_e4m3fn"
    elif node.op_type == TRT_DEQUANTIZE:
        if attribute(node, "output_dtype", contract.FLOAT) not in contract.VALUES:
            yield "output_dtype is not float32, float16 or bfloat16"
        elements, scales = (None if value is None else default(value) for value in node.inputs[:2])
        if elements is not None:
            yield from _of_weight(node, elements, scales)
    elif node.op_type != TRT_STATIC_QUANTIZE:
        yield f"{node.op_type} is no MXFP8 op"


def _of_weight(node: ir.Node, elements: ir.TensorProtocol, scales: ir.TensorProtocol | None) -> Iterator[str]:
    dims = list(elements.shape.numpy())
    if elements.dtype not in {contract.FLOAT8E4M3FN, contract.UINT8}:
        yield "its elements are not float8_e4m3fn"
    if scales is None or scales.dtype != contract.UINT8:
        yield "its scales are not stored uint8 E8M0 codes"
        return
    axis, scale_dims = attribute(node, "axis", 1), list(scales.shape.numpy())
    if not -len(dims) <= axis < len(dims):
        yield f"axis {axis} is out of range for {dims}"
        return
    if len(scale_dims) != len(dims):
        yield f"scales {scale_dims} have another rank than elements {dims}"
        return
    blocked = [at for at, (n, s) in enumerate(zip(dims, scale_dims, strict=True)) if n != s]
    if len(blocked) != 1:
        yield f"exactly one axis may have blocks: elements {dims}, scales {scale_dims}"
    elif dims[blocked[0]] != BLOCK_SIZE * scale_dims[blocked[0]]:
        yield f"{dims[blocked[0]]} elements are no {scale_dims[blocked[0]]} whole blocks"
    elif blocked[0] != axis % len(dims):
        yield f"axis is {axis}, and axis {blocked[0]} has the blocks"
