"""Activations whose rank ONNX Runtime does not know: the nodes take it at run time, in every element format.

Unless a node sets the dtype of an output, ONNX Runtime assumes the first of the contract, which for elements is E4M3.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from compare import assert_same, heavy_tailed
from grids import looped
from onnx import TensorProto, helper
from ort_models import cast, model, node, run

from mxfp8_ops import formats, numpy_nodes, ort

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
FORMATS = {name: fmt.onnx_dtype for name, fmt in formats.ELEMENT_FORMATS.items()}
N, K = 40, 64
WEIGHTS = {"w": heavy_tailed((N, K), 1), "stack": heavy_tailed((3, N, K), 3)}
WEIGHTS |= {"experts": np.array([2]), "shape": np.int64([-1, K]), "once": np.array(1), "yes": np.array(True)}
Nodes = Sequence[onnx.NodeProto]

# --- what is done with r, to y ---------------------------------------------------------------------------------------

CHAINS: dict[str, list[tuple[str, str, str, dict[str, str]]]] = {
    "Dequantize": [("Dequantize", "e s", "y", {})],
    "Gemm": [("Gemm", "e s w_e w_s", "y", {})],
    "FusedGemm": [("FusedGemm", "e s w_e w_s", "y", {"epilogue": "gelu"})],
    "GatedGemm": [
        ("Gemm", "e s w_e w_s", "factor", {}), ("GatedGemm", "e s w_e w_s factor", "y", {"epilogue": "silu"}),
    ],
    "GroupedGemm": [("GroupedGemm", "e s stack_e stack_s experts", "y", {})],
    "WeightGemm": [("WeightGemm", "r w_e w_s", "y", {})],
    "FusedWeightGemm": [("FusedWeightGemm", "r w_e w_s", "y", {"epilogue": "relu"})],
}  # fmt: skip


def chain(name: str, fmt: str) -> list[onnx.NodeProto]:
    """Returns the nodes that quantize what is read in a format, then those of `CHAINS`."""
    read = " ".join(inputs for _, inputs, _, _ in CHAINS[name]).split()
    sources = {"e": ("r", "e s"), "w_e": ("w", "w_e w_s"), "stack_e": ("stack", "stack_e stack_s")}
    nodes = [node("MXFP8Quantize", *sources[name], output_dtype=FORMATS[fmt]) for name in sources if name in read]
    return nodes + [node(f"MXFP8{op}", *ports, **attributes) for op, *ports, attributes in CHAINS[name]]


# --- how its rank is lost --------------------------------------------------------------------------------------------


def value(name: str, dtype: int = FLOAT, shape: Sequence[int] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def reshape(target: str, shape: str = "to") -> onnx.NodeProto:
    return helper.make_node("Reshape", ["x", shape], [target])


def subgraph(name: str, nodes: Nodes, output: str = "y") -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [value(output)])


def reshaped(nodes: Nodes) -> Nodes:
    return [reshape("r"), *nodes]


def loop_body(nodes: Nodes) -> Nodes:
    body = subgraph("body", [helper.make_node("Identity", ["go"], ["on"]), *nodes])
    body.input.extend([value("i", INT64, []), value("go", BOOL, []), value("r")])
    body.output.insert(0, value("on", BOOL, []))
    return [reshape("start"), helper.make_node("Loop", ["once", "", "start"], ["z"], body=body)]


def branch(nodes: Nodes) -> Nodes:
    graphs = {f"{name}_branch": subgraph(name, nodes) for name in ("then", "else")}
    return [reshape("r"), helper.make_node("If", ["yes"], ["z"], **graphs)]


def after_branches_of_different_ranks(nodes: Nodes) -> Nodes:
    graphs = {"then_branch": subgraph("this", [reshape("t")], "t")}
    graphs["else_branch"] = subgraph("that", [reshape("u", "shape")], "u")
    return [helper.make_node("If", ["yes"], ["r"], **graphs), *nodes]


@functools.cache
def with_known_rank(name: str, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    known = model(chain(name, fmt), {"r": (FLOAT, [None] * len(shape))}, {"y": (FLOAT, None)}, **WEIGHTS)
    return run(known, r=heavy_tailed((6, K)).reshape(shape))[0]


@pytest.mark.parametrize("way", [reshaped, loop_body, branch, after_branches_of_different_ranks])
@looped("name, fmt", itertools.product(CHAINS, FORMATS))
def test_the_rank_is_taken_at_run_time(way, name, fmt):
    nodes, inputs = way(chain(name, fmt)), {"x": (FLOAT, [None, K]), "to": (INT64, ["rank"])}
    session = ort.session(model(nodes, inputs, {nodes[-1].output[0]: (FLOAT, None)}, **WEIGHTS))
    for shape in ((6, K), (2, 3, K), (1, 2, 3, K)):
        got = session.run(None, {"x": heavy_tailed((6, K)), "to": np.array(shape)})[0]
        assert_same(got, with_known_rank(name, fmt, shape), f"{shape}")


@looped("fmt", FORMATS)
def test_elements_that_are_results_have_their_dtype(fmt):
    quantize = node("MXFP8Quantize", "r", "e s", output_dtype=FORMATS[fmt])
    inputs = {"x": (FLOAT, [None, K]), "to": (INT64, ["rank"])}
    outputs = {"e": (FORMATS[fmt], None), "wide": (FLOAT, None)}
    session = ort.session(model(reshaped([quantize, cast("e", "wide", FLOAT)]), inputs, outputs))
    x = heavy_tailed((6, K))
    wide = session.run(["wide"], {"x": x, "to": np.array([2, 3, K])})[0]
    codes = numpy_nodes.quantize(x.reshape(2, 3, K), element_format=fmt)[0]
    assert_same(wide, codes.view(formats.ELEMENT_FORMATS[fmt].numpy_name).astype(np.float32))
