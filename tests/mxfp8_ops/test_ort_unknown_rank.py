"""Activations whose rank ONNX Runtime does not know: the nodes take it at run time, in every element format.

Unless a node sets the dtype of an output, ONNX Runtime assumes the first of the contract, which for elements is E4M3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
from compare import assert_same, heavy_tailed
from grids import looped
from onnx import TensorProto, helper
from test_ort import cast, model, node, run

from mxfp8_ops import contract, formats, numpy_nodes, ort

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
FORMATS = {name: fmt.onnx_dtype for name, fmt in formats.ELEMENT_FORMATS.items()}
N, K = 40, 64
SHAPES = ((6, K), (2, 3, K), (1, 2, 3, K))
WEIGHTS = {"w": heavy_tailed((N, K), 1), "stack": heavy_tailed((3, N, K), 3)}
WEIGHTS |= {"experts": np.array([2]), "shape": np.int64([-1, K])}
Nodes = Sequence[onnx.NodeProto]

# --- what is done with r, to y ---------------------------------------------------------------------------------------


def quantized(name: str, code: int) -> onnx.NodeProto:
    return node("MXFP8Quantize", name, f"{name}_e {name}_s", output_dtype=code)


def product(op: str, code: int, more: str = "", **attributes: str) -> list[onnx.NodeProto]:
    return [quantized("w", code), node(op, f"e s w_e w_s{more}", "y", **attributes)]


def first(code: int) -> onnx.NodeProto:
    return node("MXFP8Quantize", "r", "e s", output_dtype=code)


def gated(code: int) -> list[onnx.NodeProto]:
    factor = node("MXFP8Gemm", "e s w_e w_s", "factor")
    gemm = node("MXFP8GatedGemm", "e s w_e w_s factor", "y", epilogue="silu")
    return [first(code), quantized("w", code), factor, gemm]


def grouped(code: int) -> list[onnx.NodeProto]:
    return [first(code), quantized("stack", code), node("MXFP8GroupedGemm", "e s stack_e stack_s experts", "y")]


CHAINS: dict[str, Callable[[int], Nodes]] = {
    "MXFP8Dequantize": lambda code: [first(code), node("MXFP8Dequantize", "e s", "y")],
    "MXFP8Gemm": lambda code: [first(code), *product("MXFP8Gemm", code)],
    "MXFP8FusedGemm": lambda code: [first(code), *product("MXFP8FusedGemm", code, epilogue="gelu")],
    "MXFP8GatedGemm": gated,
    "MXFP8GroupedGemm": grouped,
    "MXFP8WeightGemm": lambda code: [quantized("w", code), node("MXFP8WeightGemm", "r w_e w_s", "y")],
    "MXFP8FusedWeightGemm": lambda code: [
        quantized("w", code), node("MXFP8FusedWeightGemm", "r w_e w_s", "y", epilogue="relu")
    ],
}  # fmt: skip


# --- how its rank is lost --------------------------------------------------------------------------------------------


def value(name: str, dtype: int = FLOAT, shape: Sequence[int] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def reshaped(nodes: Nodes) -> Nodes:
    return [helper.make_node("Reshape", ["x", "to"], ["r"]), *nodes]


def loop_body(nodes: Nodes) -> Nodes:
    body = [helper.make_node("Identity", ["go"], ["on"]), *nodes]
    inputs = [value("i", INT64, []), value("go", BOOL, []), value("r")]
    graph = helper.make_graph(body, "body", inputs, [value("on", BOOL, []), value("y")])
    loop = helper.make_node("Loop", ["once", "", "start"], ["z"], body=graph)
    return [helper.make_node("Reshape", ["x", "to"], ["start"]), loop]


def branch(nodes: Nodes) -> Nodes:
    graphs = [helper.make_graph(list(nodes), name, [], [value("y")]) for name in ("this", "that")]
    choice = helper.make_node("If", ["yes"], ["z"], then_branch=graphs[0], else_branch=graphs[1])
    return [helper.make_node("Reshape", ["x", "to"], ["r"]), choice]


def after_branches(nodes: Nodes) -> Nodes:
    """The branches give different ranks."""
    this = helper.make_graph([helper.make_node("Reshape", ["x", "to"], ["t"])], "this", [], [value("t")])
    that = helper.make_graph([helper.make_node("Reshape", ["x", "shape"], ["u"])], "that", [], [value("u")])
    return [helper.make_node("If", ["yes"], ["r"], then_branch=this, else_branch=that), *nodes]


def results(way: Callable[[Nodes], Nodes], chain: Nodes, shape: Sequence[int], x: np.ndarray) -> np.ndarray:
    nodes = way(chain)
    name = nodes[-1].output[0]
    constants = {**WEIGHTS, "once": np.array(1), "yes": np.array(True)}
    graph = model(nodes, {"x": (FLOAT, [None, K]), "to": (INT64, ["rank"])}, {name: (FLOAT, None)}, **constants)
    return run(graph, x=x, to=np.array(shape))[0]


@pytest.mark.parametrize("way", [reshaped, loop_body, branch, after_branches])
@looped("op, fmt", [(op, fmt) for op in CHAINS for fmt in FORMATS])
def test_the_rank_is_taken_at_run_time(way, op, fmt):
    chain = CHAINS[op](FORMATS[fmt])
    x = heavy_tailed((6, K))
    for shape in SHAPES:
        known = model(chain, {"r": (FLOAT, [None] * len(shape))}, {"y": (FLOAT, None)}, **WEIGHTS)
        expected = run(known, r=x.reshape(shape))[0]
        assert_same(results(way, chain, shape, x), expected, f"{op} {fmt} {shape}")


@looped("fmt", FORMATS)
def test_elements_that_are_results_have_their_dtype(fmt):
    nodes = reshaped([first(FORMATS[fmt]), cast("e", "wide", FLOAT)])
    inputs = {"x": (FLOAT, [None, K]), "to": (INT64, ["rank"])}
    session = ort.session(model(nodes, inputs, {"e": (FORMATS[fmt], None), "wide": (FLOAT, None)}))
    x = heavy_tailed((6, K))
    wide = session.run(["wide"], {"x": x, "to": np.array([2, 3, K])})[0]
    codes = numpy_nodes.quantize(x.reshape(2, 3, K), element_format=fmt)[0]
    assert_same(wide, codes.view(formats.ELEMENT_FORMATS[fmt].numpy_name).astype(np.float32))


def test_every_node_with_elements_of_an_activation_is_tried():
    """MXFP8Quantize is in nearly every chain."""
    values = {"MXFP8Embedding", "MXFP8Attention"}  # of indices; of rank 3 always
    weights = {"MXFP8GatedWeightGemm", "MXFP8GroupedWeightGemm"}  # with no elements but the weight's
    assert set(CHAINS) == set(contract.OPS) - {"MXFP8Quantize"} - values - weights
