"""What TensorRT's ONNX parser asks of MXFP8 nodes (onnx-tensorrt, onnxOpImporters.cpp; TensorRT 10 to 11).

The parser was not run here: these are the checks of its source.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialects import TRT, TRT_DEQUANTIZE, TRT_QUANTIZE, TRT_STATIC_QUANTIZE
from mxfp8_graph.onnx_pass.graph import attribute, default, dtype_of, label
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE


def violations(proto: onnx.ModelProto) -> list[str]:
    """Returns what the parser would refuse, a line each."""
    model = ir.from_proto(proto)
    versions = model.opset_imports
    found = [] if versions.get(TRT) == 1 else ["the model does not import domain 'trt' at version 1"]
    if versions.get("", 0) < 13:
        found.append("the default axis is another one before opset 13")
    nodes = [node for graph in model.graphs() for node in graph]
    found += [f"{label(node)}: is of domain {node.domain!r}" for node in nodes if node.domain == contract.DOMAIN]
    return found + [f"{label(node)}: {what}" for node in nodes if node.domain == TRT for what in _of_node(node)]


def _of_node(node: ir.Node) -> Iterator[str]:
    if attribute(node, "block_size", BLOCK_SIZE) != BLOCK_SIZE:
        yield f"block_size is not {BLOCK_SIZE}"
    if node.op_type == TRT_QUANTIZE:
        if (len(node.inputs), len(node.outputs)) != (1, 2):
            yield f"{len(node.inputs)} inputs and {len(node.outputs)} outputs; expected 1 and 2"
        if node.inputs[0] is not None and dtype_of(node.inputs[0]) not in {0, *contract.VALUES}:
            yield "its input is not float32, float16 or bfloat16"
        if attribute(node, "output_dtype", contract.FLOAT8E4M3FN) != contract.FLOAT8E4M3FN:
            yield "output_dtype is not float8_e4m3fn"
    elif node.op_type == TRT_DEQUANTIZE:
        if attribute(node, "output_dtype", contract.FLOAT) not in contract.VALUES:
            yield "output_dtype is not float32, float16 or bfloat16"
        elements, scales = (None if value is None else default(value) for value in node.inputs[:2])
        if elements is not None:
            yield from _of_weight(attribute(node, "axis", 1), elements, scales)
    elif node.op_type != TRT_STATIC_QUANTIZE:
        yield f"{node.op_type} is no MXFP8 op"


def _of_weight(axis: int, elements: ir.TensorProtocol, scales: ir.TensorProtocol | None) -> Iterator[str]:
    if elements.dtype not in {contract.FLOAT8E4M3FN, contract.UINT8}:
        yield "its elements are not float8_e4m3fn"
    if scales is None or scales.dtype != contract.UINT8:
        yield "its scales are not stored uint8 E8M0 codes"
        return
    expected = list(elements.shape.numpy())
    expected[axis] //= BLOCK_SIZE
    if list(scales.shape.numpy()) != expected or elements.shape.numpy()[axis] % BLOCK_SIZE:
        yield f"scales {list(scales.shape.numpy())}; expected {expected}, in whole blocks along axis {axis}"
