"""Models of one node of ours, run by its function body in stock ONNX Runtime or by our kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from releases import release

from mxfp8_ops import contract, numerics, ort
from mxfp8_ops.contract import BFLOAT16, ELEMENTS, UINT8
from mxfp8_ops.onnx_functions import functions

NUMPY = {code: numerics.value_dtype(name) for code, name in contract.VALUE_NAMES.items()}
NUMPY |= dict.fromkeys([UINT8, *ELEMENTS], np.dtype(np.uint8))

TYPED_BY_HAND = {BFLOAT16: np.uint16} | dict.fromkeys(ELEMENTS, np.uint8)
"""The dtypes that ONNX Runtime takes only as raw integers with the type beside them."""

OPSETS = (21, 23, 26) if release("onnxruntime") >= (1, 24) else (21,)
"""Opsets of the default domain that tests of bodies run at; older releases know none of the others."""

Feed = tuple[np.ndarray, int]
"""An array and its ONNX dtype."""


def one_node_model(
    op_type: str,
    inputs: Mapping[str, Feed],
    outputs: Mapping[str, int],
    opset: int,
    attributes: Mapping[str, Any],
    *,
    constants: Sequence[str] = (),
    bodies: bool = True,
) -> onnx.ModelProto:
    """Returns a model of one node and its function, if it is to have one.

    Inputs named in `constants` become initializers.
    """
    node = helper.make_node(op_type, list(inputs), list(outputs), "one", domain=contract.DOMAIN, **attributes)
    fed = {name: feed for name, feed in inputs.items() if name not in constants}
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, dtype, [f"{name}_{i}" for i in range(array.ndim)])
            for name, (array, dtype) in fed.items()
        ],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()],
        [helper.make_tensor(name, inputs[name][1], inputs[name][0].shape, inputs[name][0].tobytes(), raw=True)
         for name in constants],
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(functions(model) if bodies else [])
    return model


def run(
    model: onnx.ModelProto, inputs: Mapping[str, Feed], *, kernels: bool = False, optimized: bool = True
) -> list[np.ndarray]:
    """Returns the outputs of `model` in stock ONNX Runtime or with our kernels, float8 ones as uint8."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if kernels:
        ort.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {name.name: to_ort(*inputs[name.name]) for name in session.get_inputs()}
    outputs = {o.name: o.type.tensor_type.elem_type for o in model.graph.output}
    values = session.run_with_ort_values(list(outputs), feeds)
    return [from_ort(value, dtype) for value, dtype in zip(values, outputs.values(), strict=True)]


def to_ort(array: np.ndarray, dtype: int) -> onnxruntime.OrtValue:
    if dtype not in TYPED_BY_HAND:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(TYPED_BY_HAND[dtype]), dtype)


def from_ort(value: onnxruntime.OrtValue, dtype: int) -> np.ndarray:
    """Returns a copy of the memory of `value`: OrtValue.numpy() refuses float8_e5m2 and bfloat16."""
    size = int(np.prod(value.shape())) * NUMPY[dtype].itemsize
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(raw, NUMPY[dtype]).reshape(value.shape())
