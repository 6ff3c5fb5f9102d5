"""What a matmul is for, read off the graph: output projection, router, attention scores or values, or none of these."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from builders import attention_model, language_model, model, node, value, weight
from onnx import helper

import mxfp8_graph
from mxfp8_graph import Recipe, Rule

F32 = np.float32
ANY = Recipe(name="any", min_dim=0, rules=(Rule(op="MatMul"),))


def roles(proto: onnx.ModelProto) -> dict[str, str]:
    _, report = mxfp8_graph.rewrite(proto, ANY, dry_run=True)
    return {site.decision.site.name: site.decision.site.role for site in report.sites}


def behind(*ops: onnx.NodeProto, y: Any = ("m", 96), dtype: Any = F32, **weights: np.ndarray) -> str:
    """Returns the role of MatMul(x, w) -> h -> ops -> y."""
    last = ops[-1].output[0] if ops else "h"
    nodes = [node("MatMul", "x w", "h", "linear"), *ops]
    proto = model(nodes, {"x": (F32, ["m", 64])}, {last: (dtype, y)}, {"w": weight(64, 96), **weights})
    return roles(proto)["linear"]


class TestOutputProjections:
    PASSIVE: ClassVar = {
        "nothing": [],
        "bias": [node("Add", "h b", "y")],
        "bias and log-softmax": [node("Add", "h b", "s"), node("LogSoftmax", "s", "y")],
        "softmax": [node("Softmax", "h", "y")],
        "sigmoid": [node("Sigmoid", "h", "y")],
        "scale": [node("Mul", "h b", "y")],
        "two scales and an offset": [node("Div", "h b", "s"), node("Mul", "s b", "t"), node("Sub", "t b", "y")],
        "soft cap": [node("Div", "h b", "s"), node("Tanh", "s", "t"), node("Mul", "t b", "y")],
        "identity": [node("Identity", "h", "y")],
        "transpose twice": [node("Transpose", "h", "t"), node("Transpose", "t", "y")],
    }

    @pytest.mark.parametrize("name", PASSIVE)
    def test_what_only_presents_the_result_leaves_it_an_output_projection(self, name):
        assert behind(*self.PASSIVE[name], b=weight(96)) == "output_projection"

    def test_reshape_slice_and_cast(self):
        ops = [
            node("Reshape", "h shape", "r"),
            node("Slice", "r start end", "s"),
            node("Cast", "s", "y", to=onnx.TensorProto.FLOAT16),
        ]
        shape = {"shape": np.array([-1, 4, 24]), "start": np.array([0, 0]), "end": np.array([1, 2])}
        assert behind(*ops, y=("a", "b", 24), dtype=np.float16, **shape) == "output_projection"

    @pytest.mark.parametrize("op", ["Relu", "Tanh", "Gelu", "Neg", "Abs"])
    def test_an_activation_makes_it_a_linear(self, op):
        assert behind(node(op, "h", "y")) == "linear"

    def test_a_label_chosen_from_it_leaves_it_an_output_projection(self):
        assert behind(node("ArgMax", "h", "y", axis=-1, keepdims=0), y=("m",), dtype=np.int64) == "output_projection"

    def test_the_best_of_it_leave_it_an_output_projection(self):
        ops = [node("Softmax", "h", "p"), node("TopK", "p five", "y i", axis=-1)]
        assert behind(*ops, y=("m", 5), five=np.array([5])) == "output_projection"

    @pytest.mark.parametrize(("op", "role"), [("Mul", "linear"), ("Add", "output_projection")])
    def test_its_square_makes_it_a_linear_and_its_double_does_not(self, op, role):
        assert behind(node(op, "h h", "y")) == role

    @pytest.mark.parametrize("after", [[node("Neg", "t", "y")], [node("Mul", "t t", "y")]], ids=["used", "squared"])
    def test_a_tanh_that_is_not_scaled_up_again_is_no_soft_cap(self, after):
        assert behind(node("Tanh", "h", "t"), *after) == "linear"

    def test_a_run_time_addend_makes_it_a_linear(self):
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h x", "y")]
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, {"w": weight(64, 64)})
        assert roles(proto) == {"linear": "linear"}

    def test_a_language_model(self):
        found = roles(language_model())
        assert found == {
            "Gather_tokens": "embedding",
            "Gather_places": "embedding",
            "ffn.up": "linear",
            "ffn.down": "linear",
            "lm_head": "output_projection",
        }

    def test_a_result_that_is_returned_and_used_by_a_matmul_is_no_projection(self):
        """As the keys and values of a decoder that returns its cache."""
        nodes = [
            node("MatMul", "x wk", "k", "k_proj"),
            node("Transpose", "k", "kt"),
            node("MatMul", "x kt", "s", "scores"),
            node("Softmax", "s", "p"),
            node("MatMul", "p k", "y", "values"),
        ]
        outputs = {"y": (F32, ["m", 64]), "k": (F32, ["m", 64])}
        proto = model(nodes, {"x": (F32, ["m", 64])}, outputs, {"wk": weight(64, 64)})
        assert roles(proto) == {"k_proj": "linear", "scores": "attention_scores", "values": "attention_values"}

    def test_a_cache_that_is_concatenated_to_the_past(self):
        nodes = [
            node("MatMul", "x wk", "k0", "k_proj"),
            node("Concat", "past k0", "k", axis=0),
            node("Transpose", "k", "kt"),
            node("MatMul", "x kt", "s", "scores"),
            node("Neg", "s", "y"),
        ]
        inputs = {"x": (F32, ["m", 64]), "past": (F32, ["p", 64])}
        outputs = {"y": (F32, ["m", "t"]), "k": (F32, ["t", 64])}
        proto = model(nodes, inputs, outputs, {"wk": weight(64, 64)})
        assert roles(proto)["k_proj"] == "linear"

    def test_a_head_inside_a_branch(self):
        then = helper.make_graph([node("MatMul", "x w", "t", "head")], "b", [], [value("t", F32, ["m", 96])])
        other = helper.make_graph([node("MatMul", "x v", "e", "head2")], "b", [], [value("e", F32, ["m", 96])])
        choose = helper.make_node("If", ["yes"], ["h"], "if", then_branch=then, else_branch=other)
        weights = {"w": weight(64, 96), "v": weight(64, 96)}
        inputs = {"x": (F32, ["m", 64]), "yes": (np.bool_, [])}
        proto = model([choose, node("Softmax", "h", "y")], inputs, {"y": (F32, ["m", 96])}, weights)
        assert roles(proto) == {"head": "output_projection", "head2": "output_projection"}

    def test_a_linear_inside_a_branch_whose_result_a_matmul_uses(self):
        then = helper.make_graph([node("MatMul", "x w", "t", "one")], "b", [], [value("t", F32, ["m", 64])])
        other = helper.make_graph([node("Identity", "x", "e")], "b", [], [value("e", F32, ["m", 64])])
        choose = helper.make_node("If", ["yes"], ["h"], "if", then_branch=then, else_branch=other)
        nodes = [choose, node("MatMul", "h w", "y", "two")]
        inputs = {"x": (F32, ["m", 64]), "yes": (np.bool_, [])}
        proto = model(nodes, inputs, {"y": (F32, ["m", 64]), "h": (F32, ["m", 64])}, {"w": weight(64, 64)})
        assert roles(proto) == {"one": "linear", "two": "output_projection"}

    def test_by_default_it_is_kept_with_the_reason(self):
        _, report = mxfp8_graph.rewrite(language_model())
        kept = {site.decision.site.name: site.decision.reason for site in report.kept}
        embedding = "embedding: ids pick its rows; set embeddings: true to quantize it"
        assert kept == {
            "Gather_tokens": embedding,
            "Gather_places": embedding,
            "lm_head": "output projection: its result is a graph output; set output_projections: true to quantize it",
        }


def mixture(*gate: onnx.NodeProto, chosen: str) -> str:
    """Returns the role of the matmul in x @ w -> h -> gate -> `chosen`, by which one expert's matrix is gathered."""
    nodes = [
        node("MatMul", "x w", "h", "gate"),
        *gate,
        node("Gather", f"experts {chosen}", "e"),
        node("Reshape", "e square", "expert"),
        node("MatMul", "x expert", "a", "expert"),
        node("Neg", "a", "y"),
    ]
    weights = {"w": weight(64, 96), "experts": weight(96, 64, 64), "square": np.array([64, 64]), "one": np.array([1])}
    used = {k: v for k, v in weights.items() if any(k in n.input for n in nodes)}
    return roles(model(nodes, {"x": (F32, [1, 64])}, {"y": (F32, [1, 64])}, used))["gate"]


class TestRouters:
    def test_a_gate_of_the_best_experts(self):
        assert mixture(node("Softmax", "h", "p"), node("TopK", "p one", "best i", axis=-1), chosen="i") == "router"

    def test_a_gate_of_the_best_expert(self):
        assert mixture(node("ArgMax", "h", "i", axis=-1, keepdims=0), chosen="i") == "router"

    def test_by_default_it_is_kept_with_the_reason(self):
        nodes = [
            node("MatMul", "x w", "h", "gate"),
            node("TopK", "h one", "best i"),
            node("Mul", "x best", "s"),
            node("MatMul", "s v", "z", "linear"),
            node("Relu", "z", "y"),
        ]
        weights = {"w": weight(64, 96), "v": weight(64, 64), "one": np.array([1])}
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, weights)
        _, report = mxfp8_graph.rewrite(proto)
        assert [(s.decision.site.name, s.decision.reason) for s in report.kept] == [
            ("gate", "router: a TopK or ArgMax chooses by its result; set routers: true to quantize it")
        ]
        _, report = mxfp8_graph.rewrite(proto, Recipe(name="gates too", routers=True))
        assert not report.kept


def product(between: list[onnx.NodeProto], **weights: np.ndarray) -> dict[str, str]:
    """Returns the roles in q @ k -> s -> between -> t -> softmax -> p, p @ v."""
    nodes = [
        node("MatMul", "q k", "s", "scores"),
        *between,
        node("Softmax", "t", "p"),
        node("MatMul", "p v", "a", "values"),
        node("Neg", "a", "y"),
    ]
    inputs = {
        "q": (F32, [2, 5, 64]), "k": (F32, [2, 64, 7]), "v": (F32, [2, 7, 64]), "mask": (F32, [5, 7]),
        "keep": (np.bool_, [5, 7]),
    }  # fmt: skip
    return roles(model(nodes, inputs, {"y": (F32, [2, 5, 64])}, weights))


class TestAttention:
    BETWEEN: ClassVar = {
        "nothing": [node("Identity", "s", "t")],
        "scale": [node("Div", "s c", "t")],
        "scale and additive mask": [node("Mul", "s c", "u"), node("Add", "u mask", "t")],
        "mask first": [node("Add", "mask s", "t")],
        "boolean mask": [node("Div", "s c", "u"), node("Where", "keep u c", "t")],
        "soft cap": [node("Div", "s c", "u"), node("Tanh", "u", "w"), node("Mul", "w c", "t")],
        "cast": [node("Cast", "s", "u", to=10), node("Cast", "u", "t", to=1)],
        "clip": [node("Clip", "s c", "t")],
    }

    @pytest.mark.parametrize("name", BETWEEN)
    def test_scores_are_found_through(self, name):
        weights = {"c": np.array(8, F32)} if any("c" in n.input for n in self.BETWEEN[name]) else {}
        assert product(self.BETWEEN[name], **weights) == {"scores": "attention_scores", "values": "attention_values"}

    DEEP: ClassVar = {
        "deep": [node("Mul", f"{i} c", f"{i + 1}") for i in range(2000)],
        "diamonds": [
            n for i in range(60) for n in (node("Mul", f"{i} c", f"{i}_"), node("Mul", f"{i} {i}_", f"{i + 1}"))
        ],
    }

    @pytest.mark.parametrize("name", DEEP)
    def test_products_are_found_at_any_depth(self, name):
        """Each node is looked at once: the diamonds have 2^60 paths."""
        nodes = self.DEEP[name]
        last = nodes[-1].output[0]
        ends = [node("Identity", "s", "0"), *nodes, node("Identity", last, "t")]
        c = {"c": np.array(1, F32)}
        assert product(ends, **c) == {"scores": "attention_scores", "values": "attention_values"}
        ends = [node("Softmax", "s", "0"), *nodes, node("MatMul", f"{last} v", "a", "values"), node("Neg", "a", "y")]
        inputs = {"s": (F32, [2, 5, 7]), "v": (F32, [2, 7, 64])}
        assert roles(model(ends, inputs, {"y": (F32, [2, 5, 64])}, c)) == {"values": "attention_values"}

    @pytest.mark.parametrize(
        "after",
        [
            [node("Dropout", "p", "d")],
            [node("Cast", "p", "u", to=10), node("Cast", "u", "d", to=1)],
            [node("Where", "keep p zero", "d")],
            [node("Reshape", "p shape", "d")],
        ],
        ids=lambda nodes: nodes[0].op_type,
    )
    def test_values_are_found_through(self, after):
        nodes = [node("Softmax", "s", "p"), *after, node("MatMul", "d v", "a", "values"), node("Neg", "a", "y")]
        inputs = {"s": (F32, [2, 5, 7]), "v": (F32, [2, 7, 64]), "keep": (np.bool_, [5, 7])}
        weights = {"zero": np.array(0, F32), "shape": np.array([2, 5, 7])}
        used = {k: v for k, v in weights.items() if any(k in n.input for n in after)}
        assert roles(model(nodes, inputs, {"y": (F32, [2, 5, 64])}, used)) == {"values": "attention_values"}

    def test_an_old_softmax_that_onnx_converts_is_still_one(self):
        """Below opset 13, and of unknown rank: onnx's converter writes Flatten, Softmax, Reshape."""
        nodes = [
            node("MatMul", "q k", "s", "scores"),
            node("Softmax", "s", "p", axis=3),
            node("MatMul", "p v", "a", "values"),
            node("Neg", "a", "y"),
        ]
        graph = helper.make_graph(
            [*nodes, node("MatMul", "y w", "h", "linear"), node("Neg", "h", "z")],
            "old",
            [value(name, F32, None) for name in "qkv"],
            [value("z", F32, None)],
            [onnx.numpy_helper.from_array(weight(64, 64), "w")],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=7)
        converted, report = mxfp8_graph.rewrite(proto)
        assert "Flatten" in {n.op_type for n in converted.graph.node}
        found = {site.decision.site.name: site.decision.site.role for site in report.sites}
        assert found == {"scores": "attention_scores", "values": "attention_values", "linear": "linear"}

    def test_a_plain_product_is_neither(self):
        nodes = [node("MatMul", "a b", "h", "product"), node("Neg", "h", "y")]
        inputs = {"a": (F32, [5, 64]), "b": (F32, [64, 7])}
        assert roles(model(nodes, inputs, {"y": (F32, [5, 7])})) == {"product": "product"}

    def test_linears_before_the_softmax_are_not_scores(self):
        """A router: x @ w -> softmax."""
        nodes = [node("MatMul", "x w", "h", "router"), node("Softmax", "h", "p"), node("MatMul", "p x", "y", "mix")]
        proto = model(nodes, {"x": (F32, [64, 64])}, {"y": (F32, [64, 64])}, {"w": weight(64, 64)})
        assert roles(proto) == {"router": "linear", "mix": "attention_values"}

    @pytest.mark.parametrize(
        ("recipe", "quantized"),
        [
            ("mxfp8", set()),
            (Recipe(name="scores", attention_scores=True), {"scores"}),
            (Recipe(name="values", attention_values=True), {"values"}),
            ("all", {"scores", "values"}),
        ],
        ids=["mxfp8", "scores", "values", "all"],
    )
    def test_a_recipe_chooses_which_products_are_quantized(self, recipe, quantized):
        _, report = mxfp8_graph.rewrite(attention_model(), recipe)
        assert {site.decision.site.name for site in report.rewritten} == {"q", "k", "v", "o"} | quantized

    def test_by_default_both_are_kept_with_the_reason(self):
        _, report = mxfp8_graph.rewrite(attention_model())
        assert {site.decision.site.name: site.decision.reason for site in report.kept} == {
            "scores": "attention scores (Q @ K^T), fused, rounded to bfloat16; "
            "set attention_scores: true to quantize it",
            "values": "attention values (softmax @ V), fused, rounded to bfloat16; "
            "set attention_values: true to quantize it",
        }
