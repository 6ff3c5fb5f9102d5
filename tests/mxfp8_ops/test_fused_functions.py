"""The bodies of the fused nodes, run by stock ONNX Runtime with no library; their results are in test_bodies.py."""

import numpy as np
import onnx
import pytest
from compare import random_values
from grids import looped
from one_node import NUMPY, Feed, one_node_model, run
from test_onnx_functions import OPSETS, gemm_bias

from mxfp8_ops import contract, numpy_nodes
from mxfp8_ops.contract import FLOAT, FLOAT16, UINT8
from mxfp8_ops.errors import ContractError

E4M3 = contract.FLOAT8E4M3FN


def gemm_inputs(
    x_shape: tuple[int, ...], b_shape: tuple[int, ...], dtype: int | None, *, gated: bool, biased: bool
) -> dict[str, Feed]:
    """Returns the inputs of a fused gemm; with a dtype of X, of one whose weight alone is quantized."""
    x = np.float32(0.1) * random_values(0, *x_shape)
    b, b_scales = numpy_nodes.quantize(random_values(1, *b_shape))
    if dtype is None:
        a, a_scales = numpy_nodes.quantize(x)
        inputs = {"A": (a, E4M3), "A_scales": (a_scales, UINT8)}
    else:
        inputs = {"X": (x.astype(NUMPY[dtype]), dtype)}
    inputs |= {"B": (b, E4M3), "B_scales": (b_scales, UINT8)}
    if gated:
        shape = (x @ np.swapaxes(np.zeros(b_shape), -1, -2)).shape
        factor = FLOAT if dtype is None else dtype
        inputs["factor"] = ((np.float32(0.1) * random_values(2, *shape)).astype(NUMPY[factor]), factor)
    return inputs | ({"bias": (gemm_bias(b_shape[-2]), FLOAT)} if biased else {})


def gemm_op(inputs: dict[str, Feed]) -> str:
    kind = "Gated" if "factor" in inputs else "Fused"
    return f"MXFP8{kind}{'Weight' if 'X' in inputs else ''}Gemm"


def gemm_reference(inputs: dict[str, Feed], epilogue: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the result and how far one of `dtype` may be from it."""
    given = {name: array for name, (array, _) in inputs.items()}
    b = given["B"], given["B_scales"]
    x = given["X"] if "X" in given else numpy_nodes.dequantize(given["A"], given["A_scales"])
    optional = {"bias": given.get("bias"), "factor": given.get("factor"), "epilogue": epilogue}
    expected = numpy_nodes.fused_weight_gemm(x, *b, **optional)
    return expected, numpy_nodes.fused_gemm_error_bound(x, numpy_nodes.dequantize(*b), dtype, **optional)


@looped("epilogue", contract.EPILOGUES)
def test_bad_values_surface(epilogue: str) -> None:
    x = np.zeros((5, 32), np.float32)
    x[:, 0] = [np.nan, np.inf, -np.inf, 300, -300]
    b, b_scales = numpy_nodes.quantize(np.eye(1, 32, dtype=np.float32))
    inputs = {"X": (x, FLOAT), "B": (b, E4M3), "B_scales": (b_scales, UINT8)}
    model = one_node_model("MXFP8FusedWeightGemm", inputs, {"Y": FLOAT}, 23, {"epilogue": epilogue})
    got, expected = run(model, inputs)[0][:, 0], numpy_nodes.fused_weight_gemm(x, b, b_scales, epilogue=epilogue)[:, 0]
    bad = ~np.isfinite(expected)
    assert np.isfinite(got).tolist() == (~bad).tolist(), (got, expected)
    np.testing.assert_allclose(got[~bad], expected[~bad], rtol=0, atol=1e-5)


def test_an_unknown_epilogue_has_no_body() -> None:
    inputs = gemm_inputs((3, 70), (7, 70), None, gated=False, biased=False)
    with pytest.raises(
        ContractError,
        match=r"node 'one' \(MXFP8FusedGemm\): epilogue: 'swish'; expected one of .*; correct the name",
    ):
        one_node_model(gemm_op(inputs), inputs, {"Y": FLOAT}, 23, {"epilogue": "swish"})


# --- The functions as parts of a model -----------------------------------------------------------------------------


def test_the_nodes_inside_come_with_their_bodies() -> None:
    inputs = gemm_inputs((3, 70), (7, 70), None, gated=False, biased=False)
    model = one_node_model(gemm_op(inputs), inputs, {"Y": FLOAT}, 23, {})
    assert [function.name for function in model.functions] == ["MXFP8Gemm", "MXFP8FusedGemm"]


@OPSETS
def test_onnx_s_checker_and_shape_inference_see_through_the_nesting(opset: int) -> None:
    inputs = gemm_inputs((2, 5, 70), (7, 70), None, gated=True, biased=False)
    model = one_node_model(
        gemm_op(inputs), inputs, {"Y": FLOAT16}, opset, {"epilogue": "silu", "output_dtype": FLOAT16}
    )
    model.graph.output[0].type.CopyFrom(onnx.helper.make_tensor_type_proto(FLOAT16, ["batch", 5, 7]))
    onnx.checker.check_model(model, full_check=True)
    model.graph.output[0].type.tensor_type.ClearField("elem_type")
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    assert inferred.graph.output[0].type.tensor_type.elem_type == FLOAT16
