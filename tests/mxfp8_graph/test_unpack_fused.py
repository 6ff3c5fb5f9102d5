"""Packed weights of fused gemms."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

import mxfp8_graph
from mxfp8_ops import contract, numpy_nodes, onnx_functions

# --- Fused gemms ---

FUSED = [name for name, op in contract.OPS.items() if op.is_gemm and "epilogue" in op.attributes]
SHAPES = {"X": ["rows", 40], "A": ["rows", 40], "A_scales": ["rows", 2], "factor": ["rows", 5]}


def one_gemm(name: str, codes: tuple[np.ndarray, np.ndarray]) -> onnx.ModelProto:
    """Returns a model of a node whose other inputs are the model's."""
    op = contract.OPS[name]
    names = [port.name for port in op.inputs if not port.optional]
    stored = [
        helper.make_tensor(f"w/{port}", op.inputs[op.at(port)].dtypes[0], array.shape, array.tobytes(), raw=True)
        for port, array in zip(("B", "B_scales"), codes, strict=True)
    ]
    inputs = [
        helper.make_tensor_value_info(port.name, port.dtypes[0], SHAPES[port.name])
        for port in op.inputs
        if port.name in names and port.name not in {"B", "B_scales"}
    ]
    given = [f"w/{port}" if port in {"B", "B_scales"} else port for port in names]
    made = [port.name for port in op.outputs]
    node = helper.make_node(name, given, made, domain=contract.DOMAIN, **op.attributes)
    output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["rows", 5])
    graph = helper.make_graph([node], "gemm", inputs, [output], stored)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(onnx_functions.functions(model))
    return model


def test_unpack_finds_the_weights_of_fused_gemms() -> None:
    assert len(FUSED) == 4
    codes = numpy_nodes.quantize(np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32))
    for name in FUSED:
        (found,) = mxfp8_graph.unpack(one_gemm(name, codes)).values()
        assert found.weight_only is contract.OPS[name].weight_only, name
        np.testing.assert_array_equal(found.dequantize(), numpy_nodes.dequantize(*codes))
