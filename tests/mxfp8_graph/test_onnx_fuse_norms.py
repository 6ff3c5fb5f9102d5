"""Normalizations in front of a quantization, and sums in front of those, become one node; near misses stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from builders import node, steps, weight
from fused_models import F32, MICROSOFT, both_ways, check_same, graph_model, kinds_fused, normalized
from grids import looped
from oracle import kinds

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops.onnx_functions import settings_of

pytestmark = pytest.mark.usefixtures("runtime")

SCALE = np.linspace(0.5, 1.5, 64)
BIAS = np.linspace(-1, 1, 64)
LAST = np.array([-1])
RMS = "Pow x two>p; ReduceMean p last>m0; Add m0 e>v; Sqrt v>r; "
RMS_NUMBERS = {"two": 2, "e": 1e-6, "last": LAST, "scale": SCALE}

FORMS: dict[str, tuple[str, list[onnx.NodeProto], dict[str, Any]]] = {
    "LayerNormalization": (
        "layer", steps("LayerNormalization x scale bias>n|epsilon=1e-6"), {"scale": SCALE, "bias": BIAS},
    ),
    "without a bias": ("layer", steps("LayerNormalization x scale>n|axis=1"), {"scale": SCALE}),
    "RMSNormalization": ("rms", steps("RMSNormalization x scale>n|epsilon=1e-6"), {"scale": SCALE}),
    "Reciprocal": ("rms", steps(RMS + "Reciprocal r>i; Mul x i>c; Mul scale c>n"), RMS_NUMBERS),
    "one by the root": ("rms", steps(RMS + "Div one r>i; Mul i x>c; Mul c scale>n"), {**RMS_NUMBERS, "one": 1}),
    "Div": ("rms", steps(RMS + "Div x r>c; Mul c scale>n"), RMS_NUMBERS),
    "a power": (
        "rms",
        steps("Mul x x>p; ReduceMean p last>m0; Add e m0>v; Pow v power>i; Mul x i>c; Mul c scale>n"),
        {"power": -0.5, "e": 1e-6, "last": LAST, "scale": SCALE},
    ),
    "decomposed LayerNorm": (
        "layer",
        steps(
            "ReduceMean x last>a; Sub x a>d; Pow d two>p; ReduceMean p last>m0; Add m0 e>v; Sqrt v>r; Div d r>c; "
            "Mul c scale>s; Add s bias>n"
        ),
        {**RMS_NUMBERS, "bias": BIAS},
    ),
}  # fmt: skip


def fused_node(model: onnx.ModelProto) -> onnx.NodeProto:
    (found,) = (n for n in model.graph.node if "Norm" in n.op_type)
    return found


@looped("form", FORMS)
def test_a_norm_is_part_of_the_quantization(form: str) -> None:
    kind, nodes, arrays = FORMS[form]
    proto = normalized(*nodes, **arrays)
    fused, plain, report = both_ways(proto)
    assert kinds(fused) == {"MXFP8NormQuantize": 1, "MXFP8Gemm": 1, "Neg": 1}
    assert kinds_fused(report) == [f"{kind} norm + quantize"]
    assert settings_of(fused_node(fused))["norm"] == kind
    assert list(fused_node(fused).output)[2:] == [""]
    vectors = {"scale", "bias"} & arrays.keys()
    assert {t.name for t in fused.graph.initializer} == {"w_mxfp8", "w_mxfp8_scales", *vectors}
    check_same(proto, fused, plain, limit=2e-3)  # an element may be rounded to the other side


def test_epsilon_is_that_of_the_model() -> None:
    fused, _, _ = both_ways(normalized(node("LayerNormalization", "x scale", "n", epsilon=0.25), scale=SCALE))
    assert settings_of(fused_node(fused))["epsilon"] == 0.25


def test_the_rms_norm_of_onnx_runtime() -> None:
    """Its domain is that of ONNX, which does not know it and so cannot check it."""
    proto = normalized(node("SimplifiedLayerNormalization", "x scale", "n"), scale=SCALE)
    fused, _ = mxfp8_graph.rewrite(proto)
    plain, _ = mxfp8_graph.rewrite(proto, Recipe(fuse=False))
    assert settings_of(fused_node(fused))["norm"] == "rms"
    check_same(proto, fused, plain, limit=2e-3)


def test_a_model_in_float16_with_its_casts() -> None:
    text = RMS.replace(" x ", " x32 ") + "Reciprocal r>i; Mul x32 i>c; Cast c>c16|to=10; Mul scale c16>n"
    nodes = steps("Cast x>x32|to=1; " + text)
    proto = normalized(*nodes, dtype=np.float16, **RMS_NUMBERS)
    for name in ("two", "e"):
        tensor = next(t for t in proto.graph.initializer if t.name == name)
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(F32), name))
    fused, plain, _ = both_ways(proto)
    assert kinds(fused) == {"Cast": 1, "MXFP8NormQuantize": 1, "MXFP8Gemm": 1, "Neg": 1}  # of the scale
    check_same(proto, fused, plain, limit=1e-2)


def sum_model(*after: onnx.NodeProto, outputs: tuple[str, ...] = ("y",), z: Any = ("batch", 64)) -> onnx.ModelProto:
    """Returns y = -(norm(x + z) @ w)."""
    weights = {"w": weight(64, 96), "scale": SCALE.astype(F32), "bias": BIAS.astype(F32)}
    text = "sum:Add x z>t; norm:LayerNormalization t scale bias>n; linear:MatMul n w>m; Neg m>y"
    return graph_model([*steps(text), *after], weights, outputs=outputs, inputs={"x": ["batch", 64], "z": z})


def test_a_sum_is_part_of_the_norm() -> None:
    proto = sum_model()
    fused, plain, report = both_ways(proto)
    assert kinds(fused) == {"MXFP8AddNormQuantize": 1, "MXFP8Gemm": 1, "Neg": 1}
    assert list(fused_node(fused).input) == ["x", "z", "scale", "bias"]
    assert report.fusions[0].replaced == ("norm", "sum")
    check_same(proto, fused, plain, limit=2e-3)


@looped("outputs, wanted", [(("y", "t"), ["", "t"]), (("y", "n"), ["n", ""]), (("y", "n", "t"), ["n", "t"])])
def test_what_others_read_is_an_output(outputs: tuple[str, ...], wanted: list[str]) -> None:
    proto = sum_model(outputs=outputs)
    fused, plain, _ = both_ways(proto)
    assert list(fused_node(fused).output)[2:] == wanted
    check_same(proto, fused, plain, limit=2e-3)


def test_a_reader_in_front_of_the_quantization_comes_behind_it() -> None:
    proto = sum_model(outputs=("y", "o"))
    proto.graph.node.insert(1, node("Neg", "t", "o"))
    fused, plain, _ = both_ways(proto)
    onnx.checker.check_model(fused)
    check_same(proto, fused, plain, limit=2e-3)


def test_a_sum_that_repeats_one_side_stays() -> None:
    proto = sum_model(z=(1, 64))
    fused, plain, _ = both_ways(proto)
    assert kinds(fused) == {"Add": 1, "MXFP8NormQuantize": 1, "MXFP8Gemm": 1, "Neg": 1}
    check_same(proto, fused, plain, limit=2e-3)


@looped("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_a_sum_and_norm_of_onnx_runtime(op: str) -> None:
    proto = sum_model(outputs=("y", "t"))
    proto.graph.node[1].CopyFrom(node(op, "x z scale", "n   t".replace("   ", " mean deviation "), domain=MICROSOFT))
    proto.graph.node[1].output[1] = proto.graph.node[1].output[2] = ""
    proto.graph.node.pop(0)
    fused, plain, _ = both_ways(proto)
    assert kinds(fused) == {"MXFP8AddNormQuantize": 1, "MXFP8Gemm": 1, "Neg": 1}
    check_same(proto, fused, plain, limit=2e-3)


def test_two_formats_of_one_norm() -> None:
    """The second quantization reads the normalized values that the first gives."""
    proto = normalized(node("LayerNormalization", "x scale", "n"), node("MatMul", "n w2", "k"), scale=SCALE)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight(64, 96, seed=5), "w2"))
    proto.graph.node.append(node("Neg", "k", "y2"))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("y2", 1, [None, None]))
    fused, plain, _ = both_ways(proto)
    assert kinds(fused) == {"MXFP8NormQuantize": 1, "MXFP8Gemm": 2, "Neg": 2}
    check_same(proto, fused, plain, limit=2e-3)


ROW_FORMS = ("LayerNormalization", "without a bias", "RMSNormalization", "Div", "decomposed LayerNorm")


@looped("form, rank", [(form, rank) for form in ROW_FORMS for rank in (2, 3)])
def test_a_scale_of_one_row_is_one_of_a_vector(form: str, rank: int) -> None:
    """[1, D] and [1, 1, D] broadcast to the values that [D] does."""
    kind, nodes, arrays = FORMS[form]
    rows = {name: array.reshape(*[1] * (rank - 1), 64) for name, array in arrays.items() if name in {"scale", "bias"}}
    weights = {name: np.asarray(array, None if name == "last" else F32) for name, array in {**arrays, **rows}.items()}
    spec = {"rank": rank, "opset": 23, "inputs": {"x": ["batch", *[4] * (rank - 2), 64]}}
    nodes = [*nodes, node("MatMul", "n w", "m", "linear"), node("Neg", "m", "y")]
    if form == "without a bias":
        nodes = [node("LayerNormalization", "x scale", "n", axis=-1), *nodes[1:]]
    proto = graph_model(nodes, {"w": weight(64, 96), **weights}, **spec)
    fused, plain, report = both_ways(proto)
    assert kinds_fused(report) == [f"{kind} norm + quantize"]
    check_same(proto, fused, plain, limit=2e-3)


def test_a_bias_may_have_another_rank_than_the_scale() -> None:
    row = BIAS.reshape(1, 64)
    proto = normalized(*FORMS["decomposed LayerNorm"][1], **{**RMS_NUMBERS, "bias": row})
    fused, plain, report = both_ways(proto)
    assert kinds_fused(report) == ["layer norm + quantize"]
    check_same(proto, fused, plain, limit=2e-3)


NEAR_MISSES: dict[str, onnx.ModelProto] = {
    "another axis": normalized(*steps("LayerNormalization x scale>n|axis=0"), scale=np.broadcast_to(SCALE, (5, 64))),
    "the mean is read": normalized(*steps("LayerNormalization x scale>n mean"), scale=SCALE, outputs=("y", "mean")),
    "a scale that is computed": normalized(*steps("Abs s0>scale; LayerNormalization x scale>n"), s0=SCALE),
    "a scale of one number": normalized(*steps("RMSNormalization x scale>n"), scale=np.ones(1)),
    "a scale that adds a dimension": graph_model(
        [*FORMS["Div"][1], node("MatMul", "n w", "m", "linear"), node("Neg", "m", "y")],
        {
            "w": weight(64, 96),
            "scale": SCALE.reshape(1, 1, 64).astype(F32),
            "last": LAST,
            "two": np.array(2, F32),
            "e": np.array(1e-6, F32),
        },
        rank=3,
    ),
    "an epsilon that is computed": normalized(
        *steps("Abs e0>e"), *FORMS["Div"][1], e0=1e-6, two=2, last=LAST, scale=SCALE
    ),
    "a mean over rows": normalized(*FORMS["Div"][1], **{**RMS_NUMBERS, "last": np.array([0])}),
    "another power": normalized(*FORMS["Div"][1], **{**RMS_NUMBERS, "two": 4}),
    "a step is an output": normalized(*FORMS["Div"][1], **RMS_NUMBERS, outputs=("y", "c")),
    "a bias that is computed": normalized(
        *steps("Abs b0>bias; LayerNormalization x scale bias>n"), scale=SCALE, b0=BIAS
    ),
}


@looped("case", NEAR_MISSES)
def test_what_is_no_norm_of_rows_stays(case: str) -> None:
    fused, plain, report = both_ways(NEAR_MISSES[case])
    assert report.fusions == ()
    assert fused.graph == plain.graph


def test_weight_only_gemms_leave_norms_alone() -> None:
    _, nodes, arrays = FORMS["LayerNormalization"]
    _, _, report = both_ways(normalized(*nodes, **arrays), "mxfp8-bf16")
    assert report.fusions == ()
