"""The function bodies as parts of a model, in stock ONNX Runtime; their results are in test_bodies.py."""

from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from compare import assert_same, random_values
from one_node import one_node_model, run
from onnx import TensorProto, helper

from mxfp8_ops import contract, numpy_nodes
from mxfp8_ops.contract import FLOAT, FLOAT8E4M3FN, FLOAT16, UINT8
from mxfp8_ops.errors import ContractError
from mxfp8_ops.onnx_functions import functions

OPSETS = pytest.mark.parametrize("opset", [21, 23, 25, 26])
BOTH_WAYS = pytest.mark.parametrize("opset", [21, 26])


@pytest.mark.parametrize(
    ("op", "attributes", "text"),
    [
        ("MXFP8Quantize", {"scale_rounding": "up"}, "scale_rounding: 'up'; expected one of ceil, floor, even"),
        ("MXFP8Quantize", {"output_dtype": TensorProto.FLOAT8E4M3FNUZ}, "output_dtype: 18; expected one of 17, 19, 3"),
        ("MXFP8FusedGemm", {"epilogue": "swish"}, "epilogue: 'swish'; expected one of .*; correct the name"),
    ],
)
def test_a_body_refuses_an_illegal_attribute(op: str, attributes: dict[str, Any], text: str) -> None:
    inputs = {port.name: (random_values(0, 2, 64), FLOAT) for port in contract.OPS[op].inputs}
    with pytest.raises(ContractError, match=rf"node 'one' \({op}\): {text}"):
        one_node_model(op, inputs, {port.name: UINT8 for port in contract.OPS[op].outputs}, 21, attributes)


@BOTH_WAYS
def test_attributes_left_out_take_the_defaults_of_the_contract(opset: int) -> None:
    x = random_values(0, 3, 70)
    inputs = {"X": (x, FLOAT)}
    model = one_node_model("MXFP8Quantize", inputs, {"e": FLOAT8E4M3FN, "s": UINT8}, opset, attributes={})
    for codes, expected in zip(run(model, inputs), numpy_nodes.quantize(x), strict=True):
        assert_same(codes, expected)


@BOTH_WAYS
@pytest.mark.parametrize(
    ("op", "index", "text"),
    [
        *(
            ("MXFP8Embedding", i, rf"out of data bounds, idx={i} must be within the inclusive range \[-7,6\]")
            for i in (7, -8)
        ),
        *(("MXFP8GroupedWeightGemm", i, "out of data bounds") for i in (8, -9, 2**40)),
    ],
)
def test_an_index_that_names_no_entry_is_an_error(op: str, index: int, text: str, opset: int) -> None:
    shape = (7, 45) if op == "MXFP8Embedding" else (7, 3, 45)
    elements, scales = numpy_nodes.quantize(random_values(0, *shape))
    at, indices = contract.OPS[op].indices_at, (np.array([index]), TensorProto.INT64)
    b = {"B": (elements, FLOAT8E4M3FN), "B_scales": (scales, UINT8)}
    inputs = {"indices": indices, **b} if at == 0 else {"X": (random_values(1, 2, 45), FLOAT), **b, "experts": indices}
    model = one_node_model(op, inputs, {"Y": FLOAT}, opset, {}, constants=("B", "B_scales"))
    with pytest.raises(Exception, match=text):
        run(model, inputs)


# --- The functions as parts of a model ---------------------------------------------------------------------------

BIAS = 100 * random_values(2, 7)


def chain_model(opset: int) -> onnx.ModelProto:
    """Returns X -> MXFP8Quantize -> two MXFP8Gemm on one weight, with and without a bias."""
    attributes = contract.QUANTIZE.attributes
    operands = ["elements", "scales", "W", "W_scales"]
    nodes = [
        helper.make_node("MXFP8Quantize", ["X"], operands[:2], domain=contract.DOMAIN, **attributes),
        helper.make_node("MXFP8Gemm", operands, ["Y"], domain=contract.DOMAIN, output_dtype=FLOAT),
        helper.make_node("MXFP8Gemm", [*operands, "bias"], ["Z"], domain=contract.DOMAIN, output_dtype=FLOAT16),
    ]
    weight, scales = numpy_nodes.quantize(random_values(1, 7, 70))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("X", FLOAT, ["batch", 70])],
        [
            helper.make_tensor_value_info("Y", FLOAT, ["batch", 7]),
            helper.make_tensor_value_info("Z", FLOAT16, ["batch", 7]),
        ],
        [
            helper.make_tensor("W", FLOAT8E4M3FN, weight.shape, weight.tobytes(), raw=True),
            helper.make_tensor("W_scales", UINT8, scales.shape, scales.tobytes(), raw=True),
            helper.make_tensor("bias", FLOAT, [7], BIAS.tobytes(), raw=True),
        ],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(functions(model))
    return model


@OPSETS
def test_the_checker_and_the_shape_inference_of_onnx_see_through_the_functions(opset: int) -> None:
    model = chain_model(opset)
    onnx.checker.check_model(model, full_check=True)
    for output in model.graph.output:  # forget what the body has to tell
        output.type.tensor_type.ClearField("elem_type")
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    infos = {info.name: info.type.tensor_type for info in [*inferred.graph.value_info, *inferred.graph.output]}
    seen = {
        name: (info.elem_type, [dim.dim_param or dim.dim_value for dim in info.shape.dim])
        for name, info in infos.items()
    }
    assert seen["elements"] == (FLOAT8E4M3FN, ["batch", 70])
    assert seen["scales"][0] == UINT8
    assert len(seen["scales"][1]) == 2
    assert seen["Y"] == (FLOAT, ["batch", 7])
    assert seen["Z"] == (FLOAT16, ["batch", 7])


@BOTH_WAYS
def test_a_body_is_made_for_the_opset_and_the_signature_is_the_contract(opset: int) -> None:
    for function in chain_model(opset).functions:
        op = contract.OPS[function.name]
        assert [(i.domain, i.version) for i in function.opset_import] == [("", opset)]
        assert list(function.input) == [port.name for port in op.inputs]
        assert list(function.output) == [port.name for port in op.outputs]
        assert [a.name for a in function.attribute_proto] == list(op.attributes)


def test_what_cannot_be_made_is_refused() -> None:
    model = chain_model(21)
    model.opset_import[0].version = 20
    with pytest.raises(ContractError, match=r"functions: opset 20; expected at least 21; convert the model up"):
        functions(model)
    model = chain_model(21)
    model.graph.node[1].op_type = "MXFP4Gemm"
    with pytest.raises(ContractError, match=r"MXFP4Gemm of domain 'mxfp8'; expected one of MXFP8Quantize, .*;"):
        functions(model)
