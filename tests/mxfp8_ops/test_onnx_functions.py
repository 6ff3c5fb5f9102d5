"""The function bodies, run by stock ONNX Runtime with no library, against the reference numerics.

Their results are in test_bodies.py and test_backends.py.
"""

from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from compare import assert_same, assert_within, random_values
from one_node import one_node_model, run
from onnx import TensorProto, helper

from mxfp8_ops import contract, numpy_nodes
from mxfp8_ops.contract import FLOAT, FLOAT8E4M3FN, FLOAT16, UINT8
from mxfp8_ops.errors import ContractError
from mxfp8_ops.onnx_functions import functions

OPSETS = pytest.mark.parametrize("opset", [21, 23, 25, 26])
BOTH_WAYS = pytest.mark.parametrize("opset", [21, 26])


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"scale_rounding": "up"}, "scale_rounding: 'up'; expected one of ceil, floor, even"),
        ({"output_dtype": TensorProto.FLOAT8E4M3FNUZ}, "output_dtype: 18; expected one of 17, 19, 3"),
    ],
)
def test_an_illegal_attribute_is_an_error_and_no_default(attributes: dict[str, Any], text: str) -> None:
    inputs = {"X": (random_values(0, 2, 64), FLOAT)}
    with pytest.raises(ContractError, match=rf"node 'one' \(MXFP8Quantize\): {text}"):
        one_node_model("MXFP8Quantize", inputs, {"e": FLOAT8E4M3FN, "s": UINT8}, 21, attributes)


@BOTH_WAYS
def test_attributes_left_out_take_the_defaults_of_the_contract(opset: int) -> None:
    x = random_values(0, 3, 70)
    inputs = {"X": (x, FLOAT)}
    model = one_node_model("MXFP8Quantize", inputs, {"e": FLOAT8E4M3FN, "s": UINT8}, opset, attributes={})
    for codes, expected in zip(run(model, inputs), numpy_nodes.quantize(x), strict=True):
        assert_same(codes, expected)


# --- The gemms ---------------------------------------------------------------------------------------------------


def gemm_bias(n: int) -> np.ndarray:
    return 100 * random_values(2, n)


@BOTH_WAYS
def test_a_poisoned_weight_block_makes_its_column_nan(opset: int) -> None:
    weight = random_values(1, 7, 64)
    weight[3, 40] = np.inf
    x, b = random_values(0, 5, 64), numpy_nodes.quantize(weight)
    inputs = {"X": (x, FLOAT), "B": (b[0], FLOAT8E4M3FN), "B_scales": (b[1], UINT8)}
    (y,) = run(one_node_model("MXFP8WeightGemm", inputs, {"Y": FLOAT}, opset, {"output_dtype": FLOAT}), inputs)
    assert np.isnan(y).all(0).tolist() == [n == 3 for n in range(7)]
    assert np.isnan(y).sum() == 5


# --- MXFP8Embedding ----------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("wrong", [7, -8])
def test_an_index_that_names_no_row_is_an_error_that_names_it(wrong: int, opset: int) -> None:
    b = numpy_nodes.quantize(random_values(0, 7, 45))
    inputs = {
        "indices": (np.array([0, wrong]), TensorProto.INT64),
        "B": (b[0], FLOAT8E4M3FN),
        "B_scales": (b[1], UINT8),
    }
    model = one_node_model("MXFP8Embedding", inputs, {"Y": FLOAT}, opset, {}, constants=("B", "B_scales"))
    with pytest.raises(
        Exception, match=rf"out of data bounds, idx={wrong} must be within the inclusive range \[-7,6\]"
    ):
        run(model, inputs)


# --- The functions as parts of a model ---------------------------------------------------------------------------


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
            helper.make_tensor("bias", FLOAT, [7], gemm_bias(7).tobytes(), raw=True),
        ],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(functions(model))
    return model


@OPSETS
def test_a_whole_model_runs(opset: int) -> None:
    x, bias = random_values(0, 5, 70), gemm_bias(7)
    a, b = numpy_nodes.quantize(x), numpy_nodes.quantize(random_values(1, 7, 70))
    y, z = run(chain_model(opset), {"X": (x, FLOAT)})
    values = numpy_nodes.dequantize(*a), numpy_nodes.dequantize(*b)
    assert_within(y, numpy_nodes.gemm(*a, *b), numpy_nodes.gemm_error_bound(*values))
    assert_within(z, numpy_nodes.gemm(*a, *b, bias), numpy_nodes.gemm_error_bound(*values, "float16", bias))


@OPSETS
def test_the_onnx_checker_accepts_the_model(opset: int) -> None:
    onnx.checker.check_model(chain_model(opset), full_check=True)


@OPSETS
def test_shape_inference_sees_through_the_functions(opset: int) -> None:
    model = chain_model(opset)
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
