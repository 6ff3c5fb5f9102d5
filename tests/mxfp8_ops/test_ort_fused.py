"""The fused nodes inside ONNX Runtime, every dtype the contract accepts, against the reference; and without kernels."""

from __future__ import annotations

import re

import numpy as np
import one_node
import onnx
import onnxruntime
import pytest
from compare import assert_within
from grids import looped, pairwise
from one_node import Feed, one_node_model
from onnx import helper
from test_fused_functions import (
    gemm_inputs,
    gemm_op,
    gemm_reference,
)

from mxfp8_ops import contract, numpy_nodes, ort
from mxfp8_ops.contract import FLOAT, FLOAT16, UINT8


def run(model: onnx.ModelProto, inputs: dict[str, Feed]) -> list[np.ndarray]:
    """Returns the outputs of a model by the kernels: its bodies are taken away."""
    del model.functions[:]
    return one_node.run(model, inputs, kernels=True)


@looped(
    "dtype, output, epilogue, gated, biased",
    [
        row
        for row in pairwise(
            dtype=[None, *contract.VALUES],
            output=contract.VALUES,
            epilogue=[*contract.EPILOGUES],
            gated=[False, True],
            biased=[False, True],
        )
        if not row[0] == row[1] == FLOAT16  # ONNX Runtime refuses it: see `weight_gemm_dtype`
    ],
)
def test_fused_gemms(dtype, output, epilogue, gated, biased):
    inputs = gemm_inputs((2, 5, 70), (7, 70), dtype, gated=gated, biased=biased)
    attributes = {"epilogue": epilogue, "output_dtype": output}
    model = one_node_model(gemm_op(inputs), inputs, {"Y": output}, 21, attributes)
    assert_within(run(model, inputs)[0], *gemm_reference(inputs, epilogue, contract.VALUE_NAMES[output]))


@looped("x_shape, b_shape", [((70,), (7, 70)), ((0, 40), (7, 40)), ((3, 0), (7, 0)), ((2, 1, 3, 33), (2, 5, 33))])
def test_fused_gemms_of_any_shape(x_shape, b_shape):
    inputs = gemm_inputs(x_shape, b_shape, None, gated=True, biased=True)
    model = one_node_model(gemm_op(inputs), inputs, {"Y": FLOAT}, 23, {"epilogue": "silu"})
    assert_within(run(model, inputs)[0], *gemm_reference(inputs, "silu", "float32"))


@looped("device", [None, "cuda", "cuda-copies"])
def test_kernels_are_of_the_processor_alone(device):
    """With a GPU in the session, ONNX Runtime takes a fused node apart, and runs its parts there."""
    inputs = gemm_inputs((3, 40), (5, 40), None, gated=False, biased=False)
    model = one_node_model("MXFP8FusedGemm", inputs, {"Y": FLOAT}, 23, {})
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if device is not None:
        options.add_session_config_entry("mxfp8.device", device)
    ort.register(options)
    del model.functions[:]  # without a body there is nothing to fall back on
    if device is None:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    else:
        with pytest.raises(Exception, match=r"MXFP8FusedGemm\(-?1\) is not a registered function/op"):
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


GEMM = gemm_inputs((3, 40), (5, 40), None, gated=True, biased=True)
ROW = np.zeros(7, np.float32)


@pytest.mark.parametrize(
    ("inputs", "changed", "attributes", "message"),
    [
        (
            GEMM,
            {},
            {"epilogue": "swish"},
            "epilogue 'swish'; expected none, relu, gelu, gelu_tanh or silu;",
        ),
        (GEMM, {"factor": ROW}, {}, "factor has shape (7,); expected (3, 5), that of the result; broadcast it first"),
        (GEMM, {"bias": ROW}, {}, "bias has shape (7,); expected (5,), one value per output column"),
    ],
)
def test_what_does_not_fit_is_named(inputs, changed, attributes, message):
    inputs = {**inputs, **{name: (array, FLOAT) for name, array in changed.items()}}
    model = one_node_model(gemm_op(inputs), inputs, {"Y": FLOAT}, 23, {})
    model.graph.node[0].attribute.extend(helper.make_attribute(*item) for item in attributes.items())
    with pytest.raises(Exception, match=re.escape(message)):
        run(model, inputs)


def test_a_chain_runs_as_a_whole():
    """The feed-forward part of a decoder's block."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    shapes = {"up": (96, 64), "gate": (96, 64), "down": (64, 96)}
    weights = {name: numpy_nodes.quantize(rng.standard_normal(s).astype(np.float32)) for name, s in shapes.items()}
    nodes = [
        node("MXFP8Quantize", "x", "e s"),
        node("MXFP8Gemm", "e s up up_s", "u"),
        node("MXFP8GatedGemm", "e s gate gate_s u", "h", epilogue="silu"),
        node("MXFP8Quantize", "h", "he hs"),
        node("MXFP8FusedGemm", "he hs down down_s", "y"),
    ]
    initializers = []
    for name, (elements, scales) in weights.items():
        initializers.append(raw_tensor(name, contract.FLOAT8E4M3FN, elements))
        initializers.append(raw_tensor(f"{name}_s", UINT8, scales))
    ports = [helper.make_tensor_value_info(name, FLOAT, ["tokens", 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "block", ports[:1], ports[1:], initializers)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(contract.DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    (got,) = ort.session(model.SerializeToString()).run(None, {"x": x})
    e, s = numpy_nodes.quantize(x)
    h = numpy_nodes.fused_gemm(e, s, *weights["gate"], factor=numpy_nodes.gemm(e, s, *weights["up"]), epilogue="silu")
    expected = numpy_nodes.gemm(*numpy_nodes.quantize(h), *weights["down"])
    # A last bit may round an element the other way: a sixteenth of it, of one of 96 terms.
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()


def node(op: str, inputs: str, outputs: str, **attributes: str) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(" "), outputs.split(" "), domain=contract.DOMAIN, **attributes)


def raw_tensor(name: str, dtype: int, codes: np.ndarray) -> onnx.TensorProto:
    return helper.make_tensor(name, dtype, codes.shape, codes.tobytes(), raw=True)
