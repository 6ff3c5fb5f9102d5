"""Activations and gates behind gemms become part of them, other nodes stay; what is recorded and reported of that."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
from fused_models import MICROSOFT, OPS, activated, both_ways, check_same, gated, kinds_fused
from grids import looped, pairwise
from models import chain_model, choose, language_model, node, steps, text_model, weight
from oracle import kinds

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.policy.recipe import recorded
from mxfp8_ops.onnx_functions import settings_of

pytestmark = pytest.mark.usefixtures("runtime")

ROOT_2 = 2**0.5
ROOT = (2 / np.pi) ** 0.5

GELU = {
    "x / root, the half last": (
        "Div h root>a; Erf a>b1; Add b1 one>c; Mul h c>d; Mul d half>y",
        {"root": ROOT_2, "one": 1, "half": 0.5},
    ),
    "x * inverse, the half first": (
        "Mul h inverse>a; Erf a>b1; Add one b1>c; Mul half h>d; Mul c d>y",
        {"inverse": 1 / ROOT_2, "one": 1, "half": 0.5},
    ),
    "the half on the sum": (
        "Div h root>a; Erf a>b1; Add b1 one>c; Mul c half>d; Mul h d>y",
        {"root": ROOT_2, "one": [1], "half": [0.5]},
    ),
}
GELU_TANH = {
    "cube by Pow": (
        "Pow h three>a; Mul a k>b1; Add h b1>c; Mul c root>d; Tanh d>e; Add e one>f; Mul h half>g; Mul g f>y",
        {"three": 3, "k": 0.044715, "root": ROOT, "one": 1, "half": 0.5},
    ),
    "cube by products": (
        "Mul h h>s; Mul s h>a; Mul k a>b1; Add h b1>c; Mul c root>d; Tanh d>e; Add one e>f; Mul f half>g; Mul h g>y",
        {"k": 0.044715, "root": ROOT, "one": 1, "half": 0.5},
    ),
    "x times a polynomial": (
        "Mul h h>s; Mul s k>a; Add a root>c; Mul c h>d; Tanh d>e; Mul h half>g; Mul g e>f; Add f g>y",
        {"k": 0.044715 * ROOT, "root": ROOT, "half": 0.5},
    ),
}


def epilogue_of(model: onnx.ModelProto) -> Any:
    (gemm,) = (n for n in model.graph.node if n.name == "linear")
    return settings_of(gemm).get("epilogue")


@looped("epilogue, recipe", pairwise(epilogue=list(OPS), recipe=["mxfp8", "mxfp8-bf16", "mxfp8-weight-only"]))
def test_an_activation_is_part_of_the_gemm(epilogue: str, recipe: str) -> None:
    proto = activated(*OPS[epilogue])
    fused, plain, report = both_ways(proto, recipe)
    gemm = "MXFP8FusedGemm" if recipe == "mxfp8" else "MXFP8FusedWeightGemm"
    assert kinds(fused) == {**({"MXFP8Quantize": 1} if recipe == "mxfp8" else {}), gemm: 1}
    assert epilogue_of(fused) == epilogue
    assert kinds_fused(report) == [f"gemm + {epilogue}"]
    check_same(proto, fused, plain)


@looped("epilogue, form", [*(("gelu", form) for form in GELU), *(("gelu_tanh", form) for form in GELU_TANH)])
def test_a_decomposed_gelu_is_one(epilogue: str, form: str) -> None:
    text, numbers = (GELU if epilogue == "gelu" else GELU_TANH)[form]
    proto = activated(*steps(text), **numbers)
    fused, plain, _ = both_ways(proto)
    assert (epilogue_of(fused), len(fused.graph.node)) == (epilogue, 2)
    assert {t.name for t in fused.graph.initializer} == {"w_mxfp8", "w_mxfp8_scales", "b"}
    check_same(proto, fused, plain)


@looped(
    "op, attributes, epilogue",
    [("Gelu", {}, "gelu"), ("FastGelu", {}, "gelu_tanh"), ("QuickGelu", {"alpha": 1.0}, "silu")],
)
def test_an_activation_op_of_onnx_runtime_is_part_of_the_gemm(
    op: str, attributes: dict[str, Any], epilogue: str
) -> None:
    proto = activated(node(op, "h", "y", domain=MICROSOFT, **attributes))
    fused, plain, _ = both_ways(proto)
    assert epilogue_of(fused) == epilogue
    check_same(proto, fused, plain)


def test_a_gelu_whose_constants_are_rounded_to_float16_is_one() -> None:
    text, numbers = GELU_TANH["cube by Pow"]
    fused, _, _ = both_ways(activated(*steps(text), dtype=np.float16, **numbers))
    assert epilogue_of(fused) == "gelu_tanh"


def test_the_fused_gemm_has_the_name_and_the_texts_of_the_gemm() -> None:
    proto = activated(node("Relu", "h", "y"))
    proto.graph.node[0].metadata_props.add(key="k", value="v")
    proto.graph.node[0].doc_string = "documented"
    fused, _, report = both_ways(proto)
    (gemm,) = (n for n in fused.graph.node if n.name == "linear")
    assert [(p.key, p.value) for p in gemm.metadata_props] == [("k", "v")]
    assert gemm.doc_string == "documented"
    assert "linear" in report.sites[0].nodes
    assert set(report.sites[0].nodes) <= {n.name for n in fused.graph.node}
    assert [fusion.to_dict() for fusion in report.fusions] == [
        {"kind": "gemm + relu", "node": "linear", "replaced": ["Relu_y"]}
    ]


NEAR_MISSES = {
    "the sums are an output": activated(node("Relu", "h", "y"), outputs=("y", "h")),
    "the sums have another reader": activated(*steps("Relu h>r; Neg h>s; Add r s>y")),
    "a step is an output": activated(*steps("Sigmoid h>s; Mul h s>y"), outputs=("y", "s")),
    "another slope": activated(*steps("Mul h slope>t; Sigmoid t>s; Mul h s>y"), slope=1.702),
    "another root": activated(*steps(GELU["the half on the sum"][0]), root=1.5, one=1, half=0.5),
    "another function": activated(node("Tanh", "h", "y")),
    "a gelu of ONNX Runtime that is not exact": activated(node("QuickGelu", "h", "y", domain=MICROSOFT)),
    "the constant has a dimension more": activated(*steps("Mul h one>t; Relu t>y"), one=[[[1.0]]], rank=3),
    "a Cast is between": activated(*steps("Cast h>c|to=11; Relu c>r; Cast r>y|to=1")),
}


@looped("case", NEAR_MISSES)
def test_nodes_that_are_no_activation_of_a_gemm_stay(case: str) -> None:
    fused, plain, report = both_ways(NEAR_MISSES[case])
    assert report.fusions == ()
    assert fused.graph == plain.graph


def test_a_gemm_that_onnx_runtime_may_run_in_float32_stays() -> None:
    _, plain, report = both_ways(activated(node("Relu", "h", "y"), dtype=np.float16), "mxfp8-weight-only")
    assert kinds(plain)["Cast"] == 1
    assert report.fusions == ()


@looped("product, recipe", [("s u", "mxfp8"), ("u s", "mxfp8-weight-only")])
def test_a_gate_is_part_of_the_gemm(product: str, recipe: str) -> None:
    proto = gated(product)
    fused, plain, report = both_ways(proto, recipe)
    op = "MXFP8{}Gemm" if recipe == "mxfp8" else "MXFP8{}WeightGemm"
    quantize = {"MXFP8Quantize": 1} if recipe == "mxfp8" else {}
    assert kinds(fused) == {**quantize, op.format(""): 1, op.format("Gated"): 1}
    assert kinds_fused(report) == ["gemm + silu", "gemm + silu + gate"]
    check_same(proto, fused, plain)


def test_a_gate_of_a_gemm_with_a_bias() -> None:
    proto = gated()
    proto.graph.node[0].output[0] = "h0"
    proto.graph.node.insert(1, node("Add", "h0 b", "h"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight(96, seed=3), "b"))
    fused, plain, _ = both_ways(proto)
    (gate,) = (n for n in fused.graph.node if n.name == "gate")
    assert gate.input[-2:] == ["u", "b"]
    check_same(proto, fused, plain)


def test_a_gate_that_may_be_repeated_or_run_in_float32_stays() -> None:
    for proto in (gated(up="z", inputs={"x": ["batch", 64], "z": [None, 64]}), gated(dtype=np.float16)):
        assert kinds_fused(both_ways(proto)[2]) == ["gemm + silu"]


@looped("up, kinds", [("x", ["gemm + silu", "gemm + silu + gate"]), ("z", ["gemm + silu"])])
def test_a_gate_of_unknown_rank_is_fused_if_both_gemms_have_one_activation(up: str, kinds: list[str]) -> None:
    proto = gated(up=up, **({"inputs": {"x": ["batch", 64], "z": ["batch", 64]}} if up == "z" else {}))
    for value in list(proto.graph.input):
        proto.graph.node.insert(0, node("Reshape", f"{value.name}0 shape", value.name))
        value.name += "0"
    proto.graph.input.append(onnx.helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, ["rank"]))
    assert kinds_fused(both_ways(proto)[2]) == kinds


def test_the_report_says_why_an_activation_or_a_gate_stays() -> None:
    cases = {
        "the input of its Relu is needed elsewhere too": NEAR_MISSES["the sums are an output"],
        "the shapes of its two factors differ, or one is unknown": gated(
            up="z", inputs={"x": ["batch", 64], "z": [None, 64]}
        ),
        "its gemm is in float16": gated(dtype=np.float16),
    }
    for reason, proto in cases.items():
        _, _, report = both_ways(proto)
        assert [each.reason for each in report.unfused] == [reason]
        assert reason in report.to_html()  # and in the text with -v
    assert both_ways(gated())[2].unfused == ()


# --- What is recorded of fusions, and in which graphs there are any ---


def record_of(proto: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def test_the_record_of_a_file_says_whether_nodes_were_fused() -> None:
    proto, _ = mxfp8_graph.rewrite(language_model(), Recipe(fuse=False))
    record = record_of(proto)["mxfp8_graph.recipe"]
    assert json.loads(record)["fuse"] is False
    assert recorded(record) == Recipe(fuse=False)
    assert {f.name for f in proto.functions} == {"MXFP8Gemm", "MXFP8Quantize"}
    proto, _ = mxfp8_graph.rewrite(chain_model())
    assert recorded(record_of(proto)["mxfp8_graph.recipe"]) == Recipe(name="mxfp8")
    assert {f.name for f in proto.functions} == {"MXFP8FusedGemm", "MXFP8Gemm", "MXFP8Quantize"}


def test_a_rewritten_model_that_differs_in_fusion_has_a_note() -> None:
    packed, _ = mxfp8_graph.rewrite(chain_model(), Recipe(name="mxfp8", fuse=False))
    again, report = mxfp8_graph.rewrite(packed)
    assert again is packed
    assert report.already_rewritten
    assert report.notes == ("it was rewritten without fusion; rewrite the original to change that",)
    packed, _ = mxfp8_graph.rewrite(chain_model())
    assert mxfp8_graph.rewrite(packed)[1].notes == ()
    (note,) = mxfp8_graph.rewrite(packed, Recipe(name="mxfp8", fuse=False))[1].notes
    assert note.startswith("it was rewritten with fusion")


def test_a_report_names_what_is_fused() -> None:
    for dry_run in (True, False):
        _, report = mxfp8_graph.rewrite(chain_model(), dry_run=dry_run)
        assert kinds_fused(report) == ["gemm + relu"] * 2
        assert ("fused", "2 gemm + relu") in report.facts()
    assert "layers.0.relu" in report.to_html()


def branches(text: str) -> onnx.ModelProto:
    """Returns y = relu(x @ v) plus a branch, of the same text in both."""
    nodes = [*steps("outer:MatMul x v>o; Relu o>p"), choose(text, text, "y0", yes="c"), *steps("Add y0 p>y")]
    weights = {"w": weight(64, 64), "v": weight(64, 64, seed=1)}
    return text_model(nodes, y=("m", 64), inputs={"c": (np.bool_, [])}, **weights)


def test_gemms_in_branches_are_fused() -> None:
    fused, report = mxfp8_graph.rewrite(branches("inner:MatMul x w>h; Relu h>r"))
    assert kinds_fused(report) == ["gemm + relu"] * 3
    (choice,) = (n for n in fused.graph.node if n.op_type == "If")
    assert all(kinds(a.g) == {"MXFP8Quantize": 1, "MXFP8FusedGemm": 1} for a in choice.attribute)


def test_a_sum_that_a_branch_reads_is_not_fused() -> None:
    _, report = mxfp8_graph.rewrite(branches("Relu o>r"))
    assert report.fusions == ()


def test_a_chain_gives_the_same_with_and_without_fusion() -> None:
    proto = chain_model((64, 128, 96, 64))
    fused, plain, report = both_ways(proto)
    assert kinds_fused(report) == ["gemm + relu"] * 3
    check_same(proto, fused, plain, limit=0.02)  # elements in between may be rounded to the other side
