"""Models of our nodes for ONNX Runtime, which have no function bodies."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mxfp8_ops import contract, ort

FLOAT, UINT8, E4M3 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.FLOAT8E4M3FN


def node(op: str, inputs: str, outputs: str, **attributes) -> onnx.NodeProto:
    """A node of ours called after its first output; inputs and outputs are separated by spaces."""
    return helper.make_node(
        op,
        inputs.split(),
        outputs.split(),
        domain=contract.DOMAIN,
        name=f"the_{outputs.split(maxsplit=1)[0]}",
        **attributes,
    )


def cast(source: str, target: str, dtype: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], to=dtype)


def model(nodes, inputs, outputs, **initializers) -> bytes:
    """A model. Inputs and outputs map names to (dtype, shape); bfloat16 and float8 reach NumPy through Cast nodes."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    opsets = [helper.make_opsetid("", contract.MIN_OPSET), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def run(model_bytes: bytes, **feeds: np.ndarray) -> list[np.ndarray]:
    return ort.session(model_bytes).run(None, feeds)


def weight_only(x_shape, **initializers: np.ndarray) -> bytes:
    return model(
        [node("MXFP8Quantize", "b", "be bs"), node("MXFP8WeightGemm", "x be bs", "y")],
        {"x": (FLOAT, x_shape)},
        {"y": (FLOAT, None)},
        **initializers,
    )


def check_fault(op: str, attributes: dict[str, Any], operands: dict[str, np.ndarray], message: str) -> None:
    """Fails unless a node ends with the error. Its model has no shapes; elements and scales are cast from float32."""
    nodes, inputs, feeds = [], {}, {}
    for name, value in operands.items():
        dtype = {"e": E4M3, "be": E4M3, "s": UINT8, "bs": UINT8}.get(name)
        fed = f"{name}_in" if dtype else name
        nodes += [cast(fed, name, dtype)] if dtype else []
        feeds[fed] = value
        inputs[fed] = (FLOAT if value.dtype == np.float32 else TensorProto.INT64, [None] * value.ndim)
    y = "y s" if op == "Quantize" else "y"
    nodes.append(node(f"MXFP8{op}", " ".join(operands), y, **attributes))
    graph = model(nodes, inputs, {"s": (UINT8, None)} if op == "Quantize" else {"y": (FLOAT, None)})
    with pytest.raises(Exception, match=f"MXFP8{op} 'the_y': {message}"):
        run(graph, **feeds)
