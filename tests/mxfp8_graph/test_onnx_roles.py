"""What a matmul is for, read off the graph: output projection, router, attention scores or values, or none of these."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from grids import looped
from models import attention_model, choose, language_model, model, node, read_by, steps, text_model, weight

import mxfp8_graph
from mxfp8_graph import Recipe, Rule

F32 = np.float32
ANY = Recipe(name="any", min_dim=0, rules=(Rule(op="MatMul"),))
X, YES = {"x": (F32, ["m", 64])}, {"yes": (np.bool_, [])}
WIDE, NARROW = (F32, ["m", 96]), (F32, ["m", 64])
CONSTANTS: dict[str, Any] = {
    "b": weight(96), "shape": [-1, 4, 24], "start": [0, 0], "end": [1, 2], "five": [5], "w": weight(64, 96),
    "w2": weight(64, 96), "square": weight(64, 64), "c": np.array(8, F32), "zero": np.array(0, F32), "three": [2, 5, 7],
    "experts": weight(96, 64, 64), "matrix": [64, 64], "one": [1],
}  # fmt: skip


def roles(text: str | list[onnx.NodeProto], inputs: Any, outputs: Any) -> dict[str, str]:
    """Returns the roles by name in a model of these nodes, which take what they need of inputs and `CONSTANTS`."""
    nodes = steps(text) if isinstance(text, str) else text
    used = read_by(nodes)
    stored = {name: np.asarray(array) for name, array in CONSTANTS.items() if name in used}
    return roles_of(model(nodes, {k: v for k, v in inputs.items() if k in used}, outputs, stored))


def roles_of(proto: onnx.ModelProto) -> dict[str, str]:
    _, report = mxfp8_graph.rewrite(proto, ANY, dry_run=True)
    return {site.decision.site.name: site.decision.site.role for site in report.sites}


HEAD, LINEAR = "output_projection", "linear"


PRESENTED: dict[str, tuple[str, Any, Any]] = {
    "": (HEAD, WIDE, "h"),
    "Add h b>s; LogSoftmax s>y": (HEAD, WIDE, "y"),
    "Softmax h>y": (HEAD, WIDE, "y"),
    "Sigmoid h>y": (HEAD, WIDE, "y"),
    "Div h b>s; Mul s b>t; Sub t b>y": (HEAD, WIDE, "y"),
    "Div h b>s; Tanh s>t; Mul t b>y": (HEAD, WIDE, "y"),
    "Identity h>y": (HEAD, WIDE, "y"),
    "Transpose h>t; Transpose t>y": (HEAD, WIDE, "y"),
    "Reshape h shape>r; Slice r start end>s; Cast s>y|to=10": (HEAD, (np.float16, ["a", "b", 24]), "y"),
    "ArgMax h>y|axis=-1 keepdims=0": (HEAD, (np.int64, ["m"]), "y"),
    "Softmax h>p; TopK p five>y i|axis=-1": (HEAD, (F32, ["m", 5]), "y"),
    "Add h h>y": (HEAD, WIDE, "y"),
    "Mul h h>y": (LINEAR, WIDE, "y"),
    "Relu h>y": (LINEAR, WIDE, "y"),
    "Tanh h>t; Neg t>y": (LINEAR, WIDE, "y"),  # not scaled up again, so no soft cap
}
"""Nodes between MatMul(x, w) -> h and the output, and the role that h has."""


@looped("after", PRESENTED)
def test_a_matmul_is_an_output_projection_behind_nodes_that_only_present_its_result(after: str) -> None:
    role, kind, last = PRESENTED[after]
    assert roles(f"linear:MatMul x w>h{'; ' if after else ''}{after}", X, {last: kind}) == {"linear": role}


def test_a_language_model_has_embeddings_linears_and_an_output_projection() -> None:
    assert roles_of(language_model()) == {
        "Gather_tokens": "embedding",
        "Gather_places": "embedding",
        "ffn.up": LINEAR,
        "ffn.down": LINEAR,
        "lm_head": HEAD,
    }


def test_keys_that_a_matmul_reads_and_the_model_returns_are_no_output_projection() -> None:
    nodes = "k_proj:MatMul x square>k; Transpose k>kt; scores:MatMul x kt>s; Softmax s>p; values:MatMul p k>y"
    actual = roles(nodes, X, {"y": NARROW, "k": NARROW})
    assert actual == {"k_proj": LINEAR, "scores": "attention_scores", "values": "attention_values"}
    nodes = "k_proj:MatMul x square>k0; Concat past k0>k|axis=0; Transpose k>kt; scores:MatMul x kt>s; Neg s>y"
    inputs, outputs = {**X, "past": (F32, ["p", 64])}, {"y": (F32, ["m", "t"]), "k": (F32, ["t", 64])}
    assert roles(nodes, inputs, outputs)["k_proj"] == LINEAR


def test_matmuls_inside_branches_have_the_roles_of_matmuls_outside() -> None:
    heads = [choose("head:MatMul x w>t", "head2:MatMul x w2>e"), node("Softmax", "h", "y")]
    assert roles(heads, {**X, **YES}, {"y": WIDE}) == {"head": HEAD, "head2": HEAD}
    nodes = [choose("one:MatMul x square>t", "Identity x>e"), node("MatMul", "h square", "y", "two")]
    assert roles(nodes, {**X, **YES}, {"y": NARROW, "h": NARROW}) == {"one": LINEAR, "two": HEAD}


@looped("gate", ["Softmax h>p; TopK p one>best i|axis=-1", "ArgMax h>i|axis=-1 keepdims=0"])
def test_a_gate_of_the_best_experts_is_a_router(gate: str) -> None:
    expert = "Gather experts i>e; Reshape e matrix>expert; expert:MatMul x expert>a; Neg a>y"
    one = (F32, [1, 64])
    assert roles(f"gate:MatMul x w>h; {gate}; {expert}", {"x": one}, {"y": one})["gate"] == "router"


def test_by_default_a_router_is_kept_with_the_reason() -> None:
    nodes = "gate:MatMul x w>h; TopK h one>best i; Mul x best>s; linear:MatMul s v>z; Relu z>y"
    proto = text_model(nodes, y=("m", 64), v=weight(64, 64), one=[1])
    _, report = mxfp8_graph.rewrite(proto)
    assert [(s.decision.site.name, s.decision.reason) for s in report.kept] == [
        ("gate", "router: a TopK or ArgMax chooses by its result; set routers: true to quantize it")
    ]
    assert not mxfp8_graph.rewrite(proto, Recipe(name="gates too", routers=True))[1].kept


SCORED = {
    "q": (F32, [2, 5, 64]), "k": (F32, [2, 64, 7]), "v": (F32, [2, 7, 64]), "mask": (F32, [5, 7]),
    "keep": (np.bool_, [5, 7]), "s": (F32, [2, 5, 7]),
}  # fmt: skip
VALUES, BOTH = {"values": "attention_values"}, {"scores": "attention_scores", "values": "attention_values"}


BETWEEN = {
    "nothing": "Identity s>t",
    "a scale and an additive mask": "Mul s c>u; Add u mask>t",
    "a boolean mask": "Div s c>u; Where keep u c>t",
    "a soft cap": "Div s c>u; Tanh u>x; Mul x c>t",
    "casts": "Cast s>u|to=10; Cast u>t|to=1",
    "a clip": "Clip s c>t",
}
AFTER = {
    "Dropout": "Dropout p>d",
    "casts": "Cast p>u|to=10; Cast u>d|to=1",
    "Where": "Where keep p zero>d",
    "Reshape": "Reshape p three>d",
}


@looped("between", BETWEEN)
def test_a_product_in_front_of_a_softmax_has_the_role_of_scores(between: str) -> None:
    nodes = f"scores:MatMul q k>s; {BETWEEN[between]}; Softmax t>p; values:MatMul p v>a; Neg a>y"
    assert roles(nodes, SCORED, {"y": (F32, [2, 5, 64])}) == BOTH


@looped("between", AFTER)
def test_a_product_behind_a_softmax_has_the_role_of_values(between: str) -> None:
    nodes = f"Softmax s>p; {AFTER[between]}; values:MatMul d v>a; Neg a>y"
    assert roles(nodes, SCORED, {"y": (F32, [2, 5, 64])}) == VALUES


def test_products_and_linears_around_a_softmax_that_are_no_attention() -> None:
    inputs = {"a": (F32, [5, 64]), "b2": (F32, [64, 7]), "x": (F32, [64, 64])}
    assert roles("product:MatMul a b2>h; Neg h>y", inputs, {"y": (F32, [5, 7])}) == {"product": "product"}
    router = "router:MatMul x square>h; Softmax h>p; mix:MatMul p x>y"  # a linear in front of the softmax
    assert roles(router, inputs, {"y": (F32, [64, 64])}) == {"router": LINEAR, "mix": "attention_values"}


def test_an_old_softmax_that_onnx_converts_is_still_one() -> None:
    """Below opset 13, and of unknown rank: onnx's converter writes Flatten, Softmax, Reshape."""
    nodes = steps(
        "scores:MatMul q k>s; Softmax s>p|axis=3; values:MatMul p v>a; Neg a>y; linear:MatMul y square>h; Neg h>z"
    )
    any_four = (F32, ["a", "b", "c", "d"])
    proto = model(nodes, dict.fromkeys("qkv", any_four), {"z": any_four}, {"square": weight(64, 64)}, opset=12)
    proto.ir_version = 7
    for end in (*proto.graph.input, *proto.graph.output):
        end.type.tensor_type.ClearField("shape")
    converted, report = mxfp8_graph.rewrite(proto)
    assert "Flatten" in {n.op_type for n in converted.graph.node}
    assert {site.decision.site.name: site.decision.site.role for site in report.sites} == {**BOTH, "linear": LINEAR}


def test_a_recipe_chooses_which_products_are_quantized() -> None:
    scores, values = Recipe(name="scores", attention_scores=True), Recipe(name="values", attention_values=True)
    for recipe, names in (("mxfp8", set()), (scores, {"scores"}), (values, {"values"}), ("all", {"scores", "values"})):
        _, report = mxfp8_graph.rewrite(attention_model(), recipe)
        assert {site.decision.site.name for site in report.rewritten} == {"q", "k", "v", "o"} | names
