"""The fusion step: when it runs, what is recorded of it, and in which graphs."""

from __future__ import annotations

import json

import numpy as np
import onnx
from builders import chain_model, language_model, model, node, weight
from fused_models import both_ways, check_same, kinds_fused
from oracle import kinds
from rich.console import Console

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.policy.recipe import recorded

F32 = np.float32


def record_of(proto: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def test_the_record_of_a_file_says_whether_nodes_were_fused() -> None:
    """Versions without fusion wrote just what is written without it."""
    proto, _ = mxfp8_graph.rewrite(language_model(), Recipe(fuse=False))
    record = record_of(proto)["mxfp8_graph.recipe"]
    assert "fuse" not in json.loads(record)
    assert recorded(record) == Recipe(fuse=False)
    assert {f.name for f in proto.functions} == {"MXFP8Gemm", "MXFP8Quantize"}
    proto, _ = mxfp8_graph.rewrite(chain_model())
    assert recorded(record_of(proto)["mxfp8_graph.recipe"]) == Recipe(name="mxfp8")
    assert {f.name for f in proto.functions} == {"MXFP8FusedGemm", "MXFP8Gemm", "MXFP8Quantize"}


def test_a_model_that_is_rewritten_already_is_told_what_differs() -> None:
    packed, _ = mxfp8_graph.rewrite(chain_model(), Recipe(name="mxfp8", fuse=False))
    again, report = mxfp8_graph.rewrite(packed)
    assert again is packed
    assert report.already_rewritten
    assert report.notes == ("it was rewritten without fusion; rewrite the original to change that",)
    terminal = Console(width=120)
    with terminal.capture() as shown:
        terminal.print(report.to_text())
    assert "it was rewritten without fusion" in shown.get()
    packed, _ = mxfp8_graph.rewrite(chain_model())
    assert mxfp8_graph.rewrite(packed)[1].notes == ()
    (note,) = mxfp8_graph.rewrite(packed, Recipe(name="mxfp8", fuse=False))[1].notes
    assert note.startswith("it was rewritten with fusion")


def test_a_report_names_what_is_fused() -> None:
    for dry_run in (True, False):
        _, report = mxfp8_graph.rewrite(chain_model(), dry_run=dry_run)
        assert kinds_fused(report) == ["gemm + relu"] * 2
        assert ("fused", "2 gemm + relu") in report.facts()
    assert "Fused nodes" in report.to_html()
    assert "layers.0.relu" in report.to_html()


def branches(shared: bool) -> onnx.ModelProto:
    """Returns y = relu(x @ w) in both branches of an If; with `shared`, a branch reads sums of the outer graph."""
    inner = [node("MatMul", "x w", "h", "inner"), node("Relu", "h", "r")]
    if shared:
        inner = [node("Relu", "o", "r")]
    then, other = (
        onnx.helper.make_graph(inner, name, [], [onnx.helper.make_tensor_value_info("r", 1, [None, 64])])
        for name in ("then", "else")
    )
    choice = onnx.helper.make_node("If", ["c"], ["y0"], "choice", then_branch=then, else_branch=other)
    nodes = [node("MatMul", "x v", "o", "outer"), node("Relu", "o", "p"), choice, node("Add", "y0 p", "y")]
    weights = {"w": weight(64, 64), "v": weight(64, 64, seed=1)}
    return model(nodes, {"x": (F32, ["m", 64]), "c": (np.bool_, [])}, {"y": (F32, ["m", 64])}, weights)


def test_subgraphs_are_fused_too() -> None:
    fused, report = mxfp8_graph.rewrite(branches(shared=False))
    assert kinds_fused(report) == ["gemm + relu"] * 3
    (choice,) = (n for n in fused.graph.node if n.op_type == "If")
    assert all(kinds(a.g) == {"MXFP8Quantize": 1, "MXFP8FusedGemm": 1} for a in choice.attribute)


def test_what_a_subgraph_reads_is_not_fused_away() -> None:
    _, report = mxfp8_graph.rewrite(branches(shared=True))
    assert report.fusions == ()


def test_a_chain_agrees_with_and_without_fusion() -> None:
    proto = chain_model((64, 128, 96, 64))
    fused, plain, report = both_ways(proto)
    assert kinds_fused(report) == ["gemm + relu"] * 3
    check_same(proto, fused, plain, limit=0.02)  # elements in between may be rounded to the other side
