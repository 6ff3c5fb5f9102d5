"""Nodes that no other dialect has are taken apart on the way there, and are what they were on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_models
import fused_models
import models as b
import numpy as np
import onnx
import oracle
import pytest
from dialect_models import codes_of
from expert_models import experts
from grids import looped

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.running.inputs import make_inputs
from mxfp8_graph.running.runner import open_runnable
from mxfp8_ops.errors import ContractError

WEIGHT_ONLY = Recipe(name="weight only", activations="unchanged")


def feeds_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return make_inputs(open_runnable(proto)[0])


def check_outputs(back: onnx.ModelProto, there: onnx.ModelProto, **limits: float) -> None:
    feeds = feeds_of(there)
    for one, other in zip(oracle.run(there, feeds), oracle.run(back, feeds), strict=True):
        np.testing.assert_allclose(other, one, **limits)


def gated() -> onnx.ModelProto:
    text = "MatMul x g>a; Sigmoid a>s; Mul a s>silu; MatMul x u>up; Mul silu up>h; MatMul h d>y0; Neg y0>y"
    weights = {"g": b.weight(64, 96), "u": b.weight(64, 96, seed=1), "d": b.weight(96, 64, seed=2)}
    shape = (np.float32, ["m", 64])
    return b.model(b.steps(text), {"x": shape}, {"y": shape}, weights)


def with_table() -> onnx.ModelProto:
    weights = {"table": b.weight(50, 64), "w": b.weight(64, 96, seed=1)}
    ends = {"ids": (np.int64, ["m"])}, {"y": (np.float32, ["m", 96])}
    return b.model(b.steps("Gather table ids>x; MatMul x w>h; Relu h>y"), *ends, weights)


def picked() -> onnx.ModelProto:
    gather = b.steps("Gather stack i>w; Transpose w>wt|perm=[0,2,1]; linear:MatMul x wt>h")
    return experts(gather, x=[5, 1, 70], index=[5])


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], Any]] = {
    "MXFP8Attention": (attention_models.attention, "mxfp8"),
    "MXFP8Attention with a cache": (attention_models.decoder, "mxfp8"),
    "MXFP8Attention, causal": (lambda: attention_models.standard(is_causal=1), "mxfp8-weight-only"),
    "MXFP8Attention with a mask of bool": (lambda: attention_models.standard("q k v bool_mask"), "mxfp8"),
    "MXFP8GatedGemm": (gated, "mxfp8"),
    "MXFP8GatedWeightGemm": (gated, "mxfp8-bf16"),
    "MXFP8FusedGemm": (lambda: fused_models.activated(b.node("Gelu", "h", "y")), "mxfp8"),
    "MXFP8Embedding": (with_table, Recipe(embeddings=True)),
    "MXFP8FusedWeightGemm of partial blocks": (lambda: b.chain_model((70, 96, 64)), "mxfp8-weight-only"),
    "MXFP8GroupedGemm": (picked, "mxfp8"),
    "MXFP8GroupedWeightGemm": (picked, WEIGHT_ONLY),
}


@looped("what", MODELS)
def test_a_node_comes_back(what: str) -> None:
    build, recipe = MODELS[what]
    before, _ = mxfp8_graph.rewrite(build(), recipe)
    op = what.replace(",", "").split()[0]
    assert op in oracle.kinds(before)
    for to in ("standard", "trt"):
        if to == "trt" and ("partial" in what or "Grouped" in what):
            with pytest.raises(ContractError, match=r"convert to (qdq or )?standard"):
                mxfp8_graph.convert(before, to)
            return
        there, _ = mxfp8_graph.convert(before, to)
        assert op not in oracle.kinds(there)
        back, _ = mxfp8_graph.convert(there, "mxfp8")
        assert oracle.kinds(back) == oracle.kinds(before)
        nodes = ([n.SerializeToString() for n in m.graph.node if n.op_type == op] for m in (before, back))
        assert next(nodes) == next(nodes)
        assert codes_of(back) == codes_of(before)
        check_outputs(back, before, rtol=0)


# --- What a mark does not say ----------------------------------------------------------------------------------------


def test_what_a_tool_has_changed_stays_apart() -> None:
    before, _ = mxfp8_graph.rewrite(attention_models.attention())
    there, _ = mxfp8_graph.convert(before, "standard")
    at, softmax = next((i, n) for i, n in enumerate(there.graph.node) if n.op_type == "Softmax")
    there.graph.node.insert(at, b.node("Identity", softmax.input[0], "in_between"))
    there.graph.node[at + 1].input[0] = "in_between"
    back, _ = mxfp8_graph.convert(there, "mxfp8")
    kinds = oracle.kinds(back)
    assert "MXFP8Attention" not in kinds
    assert kinds["MXFP8Gemm"] == oracle.kinds(before)["MXFP8Gemm"]
    assert not any("body_of" in entry.key for n in back.graph.node for entry in n.metadata_props)
    check_outputs(back, there, rtol=1e-4, atol=1e-5)


@looped(
    "op, old, new",
    [
        ("MXFP8Quantize", "", "[1, 2"),
        ("MXFP8Quantize", "", '{"name": "a", "case": {"scale": 1.0}, "absent": {}}'),
        ("MXFP8Quantize", '"absent": {}', '"absent": {"X": ["x", 1]}'),
        ("MXFP8Quantize", '"output_dtype": 17', '"output_dtype": 3'),
        ("MXFP8Quantize", '"X": [1,', '"X": ["1",'),
        ("MXFP8FusedGemm", '"relu"', '"rel"'),
    ],
)
def test_a_mark_that_is_wrong_counts_for_nothing(op: str, old: str, new: str) -> None:
    there, _ = mxfp8_graph.convert(mxfp8_graph.rewrite(b.chain_model())[0], "standard")
    props = [entry for node in there.graph.node for entry in node.metadata_props]
    marks = [entry for entry in props if entry.key.endswith(f"body_of.{op}")]
    assert any(old in mark.value for mark in marks), [mark.value for mark in marks]
    for mark in marks:
        mark.value = mark.value.replace(old, new) if old else new
    back, _ = mxfp8_graph.convert(there, "mxfp8")
    assert op not in oracle.kinds(back)
    check_outputs(back, there, rtol=1e-4, atol=1e-5)
