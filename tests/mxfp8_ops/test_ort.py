"""The nodes inside ONNX Runtime: results, shapes, places and errors.

test_ort_device.py runs these tests on a GPU too. The results of every node are in test_bodies.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from compare import assert_same, assert_within, heavy_tailed
from grids import looped, pairwise
from onnx import TensorProto, helper
from ort_models import E4M3, FLOAT, UINT8, cast, check_fault, model, node, run, weight_only

from mxfp8_ops import contract, formats, numerics, numpy_nodes, ort

FORMATS = {fmt.onnx_dtype: name for name, fmt in formats.ELEMENT_FORMATS.items()}


# --- results ---------------------------------------------------------------------------------------------------------


GEMMS = pairwise(x=[*FORMATS, *contract.VALUES], b=FORMATS, y=contract.VALUES, with_bias=[False, True])
INT8 = TensorProto.INT8
MIXED = [case for case in GEMMS if case[0] in FORMATS and (case[0] == INT8) != (case[1] == INT8)]
"""INT8 with float8, which no GPU multiplies."""


def check_gemm(x_dtype, b_format, y_dtype, with_bias):
    x, b, bias = (
        heavy_tailed((2, 5, 2048), 1),
        heavy_tailed((33, 2048), 2),
        heavy_tailed((33,), 3) if with_bias else None,
    )
    qb = numpy_nodes.quantize(b, element_format=FORMATS[b_format])
    if x_dtype in FORMATS:
        first, op = node("MXFP8Quantize", "x", "xe xs", output_dtype=x_dtype), ("MXFP8Gemm", "xe xs")
        qx = numpy_nodes.quantize(x, element_format=FORMATS[x_dtype])
        seen = numpy_nodes.dequantize(*qx, element_format=FORMATS[x_dtype])
    else:
        first, op = cast("x", "typed", x_dtype), ("MXFP8WeightGemm", "typed")
        seen = x.astype(numerics.VALUE_DTYPES[contract.VALUE_NAMES[x_dtype]])
    nodes = [
        first,
        node("MXFP8Quantize", "b", "be bs", output_dtype=b_format),
        node(op[0], f"{op[1]} be bs" + " bias" * with_bias, "y", output_dtype=y_dtype),
        cast("y", "wide", FLOAT),
    ]
    constants = {"b": b} if bias is None else {"b": b, "bias": bias}
    graph = model(nodes, {"x": (FLOAT, ["n", None, 2048])}, {"wide": (FLOAT, None)}, **constants)
    weight = numpy_nodes.dequantize(*qb, element_format=FORMATS[b_format])
    bound = numpy_nodes.gemm_error_bound(seen, weight, contract.VALUE_NAMES[y_dtype], bias)
    assert_within(run(graph, x=x)[0], numpy_nodes.weight_gemm(seen, *qb, bias, b_format=FORMATS[b_format]), bound)


@looped("x_dtype, b_format, y_dtype, with_bias", [case for case in GEMMS if case not in MIXED])
def test_gemms_of_elements_and_of_values_are_within_the_bound(x_dtype, b_format, y_dtype, with_bias):
    check_gemm(x_dtype, b_format, y_dtype, with_bias)


@looped("x_dtype, b_format, y_dtype, with_bias", MIXED)
def test_gemms_of_int8_with_float8_are_within_the_bound(x_dtype, b_format, y_dtype, with_bias):
    check_gemm(x_dtype, b_format, y_dtype, with_bias)


@looped("shape, v, d", [((), 1, 33), ((0,), 3, 32), ((2, 0), 3, 5), ((2, 1, 2), 3, 33)])
def test_indices_of_an_embedding_have_any_shape(shape, v, d):
    b, ids = heavy_tailed((v, d)), np.random.default_rng(0).integers(-v, v, shape)
    nodes = [node("MXFP8Quantize", "b", "be bs"), node("MXFP8Embedding", "ids be bs", "y")]
    for dims in ([None] * len(shape), None):
        graph = model(nodes, {"ids": (TensorProto.INT64, dims)}, {"y": (FLOAT, None)}, b=b)
        assert_same(run(graph, ids=ids)[0], numpy_nodes.embedding(ids, *numpy_nodes.quantize(b)))


@looped("x_shape", [(64,), (3, 64), (2, 3, 64), (0, 64), (5, 1, 3, 64)])
def test_leading_dimensions_broadcast_as_in_numpy(x_shape):
    for b_shape in ((7, 64), (2, 7, 64), (5, 2, 7, 64)):
        x, qb = heavy_tailed(x_shape, 1), numpy_nodes.quantize(heavy_tailed(b_shape, 2))
        (y,) = run(weight_only([None] * x.ndim, b=heavy_tailed(b_shape, 2)), x=x)
        bound = numpy_nodes.gemm_error_bound(x, numpy_nodes.dequantize(*qb))
        assert_within(y, numpy_nodes.weight_gemm(x, *qb), bound)


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_one_session_serves_every_batch_size():
    session = ort.session(weight_only(["batch", 64], b=heavy_tailed((7, 64))))
    for rows in (1, 17, 0, 300):
        assert session.run(None, {"x": heavy_tailed((rows, 64))})[0].shape == (rows, 7)


def test_output_shapes_and_symbols_are_inferred():
    graph = model(
        [node("MXFP8Quantize", "x", "e s"), node("MXFP8Quantize", "b", "be bs"), node("MXFP8Gemm", "e s be bs", "y")],
        {"x": (FLOAT, ["batch", 10, 70])},
        {"s": (UINT8, None), "y": (FLOAT, None)},
        b=heavy_tailed((7, 70)),
    )
    session = ort.session(graph)
    assert {output.name: output.shape for output in session.get_outputs()} == {
        "s": ["batch", 10, 3],
        "y": ["batch", 10, 7],
    }


def test_an_unnamed_dimension_stays_unknown():
    """Read literally as -1, it would break this Reshape."""
    nodes = [
        node("MXFP8Quantize", "b", "be bs"),
        node("MXFP8WeightGemm", "x be bs", "y"),
        helper.make_node("Reshape", ["y", "flat"], ["z"]),
    ]
    graph = model(
        nodes, {"x": (FLOAT, [None, None, 64])}, {"z": (FLOAT, None)}, b=heavy_tailed((7, 64)), flat=np.int64([-1])
    )
    assert run(graph, x=heavy_tailed((2, 3, 64)))[0].shape == (42,)


# --- where nodes may stand, and how they run -------------------------------------------------------------------------


def test_subnormals_survive_a_session_that_flushes_them():
    x = np.full((3, 64), 3 * 2.0**-130, np.float32)
    graph = model([node("MXFP8Quantize", "x", "e s")], {"x": (FLOAT, [3, 64])}, {"e": (E4M3, None), "s": (UINT8, None)})
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    elements, _ = ort.session(graph, session_options=options).run(None, {"x": x})
    assert_same(elements.view(np.uint8), numpy_nodes.quantize(x)[0])


@looped("dtype", [FLOAT, TensorProto.FLOAT16])
def test_a_wrongly_declared_rank_is_not_believed(dtype):
    """ONNX Runtime runs such a model where the nodes are function bodies."""
    nodes = [
        helper.make_node("Reshape", ["typed", "shape"], ["r"]),  # of any rank, by inference
        node("MXFP8Quantize", "r", "e s", axis=1),
        node("MXFP8Dequantize", "e s", "y", axis=1),
    ]
    graph = onnx.load_from_string(
        model([cast("x", "typed", dtype), *nodes], {"x": (FLOAT, [192]), "shape": (7, ["rank"])}, {"y": (FLOAT, None)})
    )
    graph.graph.value_info.append(helper.make_tensor_value_info("r", dtype, [192]))
    x = heavy_tailed((192,)).astype(np.float16 if dtype != FLOAT else np.float32)
    expected = numpy_nodes.dequantize(*numpy_nodes.quantize(x.reshape(3, 64)))
    got = run(graph.SerializeToString(), x=x.astype(np.float32), shape=np.array([3, 64]))[0]
    assert_same(got, expected)


def test_a_wrongly_declared_rank_in_a_scan_body_is_not_believed():
    body = helper.make_graph(
        [node("MXFP8Quantize", "row", "e s", axis=1), node("MXFP8Dequantize", "e s", "back", axis=1)],
        "body",
        [helper.make_tensor_value_info("row", FLOAT, [64])],
        [helper.make_tensor_value_info("back", FLOAT, ["a", "b"])],
    )
    scan = helper.make_node("Scan", ["r"], ["y"], body=body, num_scan_inputs=1)
    reshape = helper.make_node("Reshape", ["x", "shape"], ["r"])
    graph = model([reshape, scan], {"x": (FLOAT, [384]), "shape": (7, ["rank"])}, {"y": (FLOAT, None)})
    x = heavy_tailed((384,))
    got = run(graph, x=x, shape=np.array([2, 3, 64]))[0]
    assert_same(got, numpy_nodes.dequantize(*numpy_nodes.quantize(x.reshape(2, 3, 64))))


# --- messages --------------------------------------------------------------------------------------------------------


X = np.ones((3, 64), np.float32)
FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray], str]] = {
    # the op, its attributes, its operands, the error
    "block_size": ("Quantize", {"block_size": 16}, {"x": X}, "block_size 16; expected 32; "),
    "scale_rounding": ("Quantize", {"scale_rounding": "up"}, {"x": X},
                       "scale_rounding 'up'; expected ceil, floor or even; "),
    "dtype of elements": ("Quantize", {"output_dtype": 1}, {"x": X}, "output_dtype 1; expected 17 .*, 19 .* or 3"),
    "dtype of values": ("Dequantize", {"output_dtype": 11}, {"e": X, "s": X[:, :2]},
                        "output_dtype 11; expected 1 .*, 10 .* or 16"),
    "dtype of activations": ("WeightGemm", {"activation_dtype": 10}, {"x": X, "be": X, "bs": X[:, :2]},
                             r"activation_dtype 10; expected 1 \(float\) or 16 \(bfloat16\)"),
    "axis": ("Quantize", {"axis": 1}, {"x": X[0]}, "axis 1 of a 1-D tensor; expected -1 <= axis < 1"),
    "scales": ("Dequantize", {}, {"e": X, "s": X[:, :1]}, r"scales has shape \(3, 1\); expected \(3, 2\)"),
    "K": ("WeightGemm", {}, {"x": X[:, :32], "be": X, "bs": X[:, :2]},
          r"operands \(3, 32\) and \(3, 64\); expected \[..., M, K\] and \[..., N, K\] with the same K"),
    "scales of B": ("WeightGemm", {}, {"x": X, "be": X, "bs": X[:, :1]}, r"B_scales has shape \(3, 1\)"),
    "leading dimensions": ("WeightGemm", {}, {"x": np.ones((2, 3, 64), np.float32),
                                              "be": np.ones((5, 7, 64), np.float32),
                                              "bs": np.ones((5, 7, 2), np.float32)},
                           r"operands \(2, 3, 64\) and \(5, 7, 64\); expected leading dimensions that broadcast"),
    "bias": ("WeightGemm", {}, {"x": X, "be": X, "bs": X[:, :2], "bias": X[0, :6]},
             r"bias has shape \(6,\); expected \(3,\), one value per output column"),
    "index above": ("Embedding", {}, {"ids": np.array([[0], [3]]), "be": X, "bs": X[:, :2]},
                    r"index 3 at \(1, 0\); expected -3 to 2, for a table of 3 rows; pass ids"),
    "index below": ("Embedding", {}, {"ids": np.array([0, -4]), "be": X, "bs": X[:, :2]}, r"index -4 at \(1,\)"),
    "index beyond int32": ("Embedding", {}, {"ids": np.array([2**40]), "be": X, "bs": X[:, :2]}, "index 1099511627776"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_names_what_does_not_fit(fault: str) -> None:
    check_fault(*FAULTS[fault])


def test_a_narrow_output_of_an_input_without_rank_is_refused():
    nodes = [node("MXFP8Quantize", "b", "be bs"), node("MXFP8WeightGemm", "x be bs", "y", output_dtype=10)]
    graph = model([*nodes, cast("y", "z", 1)], {"x": (FLOAT, None)}, {"z": (FLOAT, None)}, b=heavy_tailed((7, 64)))
    with pytest.raises(Exception, match="'the_y': output_dtype 10 on an input of unknown rank; expected"):
        ort.session(graph)
