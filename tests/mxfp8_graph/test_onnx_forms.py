"""Add a matmul form: one row of `FORMS` is all that a further op needs to be found, planned and replaced."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from builders import model, node, value, weight
from onnx import helper
from oracle import expect, kinds, normal, relu, rewrite, run

from mxfp8_graph.onnx_pass import matmul_forms
from mxfp8_graph.onnx_pass.form import Form
from mxfp8_graph.onnx_pass.static_operands import StaticOperands

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


def einsum_form(einsum: gs.Node, statics: StaticOperands) -> Form | None:
    """Reads the one equation of these tests, x @ w.T."""
    a, b = einsum.inputs
    return Form(a=a, b=b, b_transposed=False) if einsum.attrs["equation"] == "mk,nk->mn" else None


def einsum_model(equation: str = "mk,nk->mn") -> onnx.ModelProto:
    nodes = [node("Einsum", "x w", "h", "linear", equation=equation), node("Add", "h b", "hb"), node("Relu", "hb", "y")]
    weights = {"w": weight(96, 64), "b": weight(96, seed=1)}
    return model(nodes, {"x": (F32, ["batch", 64])}, {"y": (F32, ["batch", 96])}, weights)


@pytest.fixture
def einsum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matmul_forms.FORMS, "Einsum", einsum_form)


@pytest.mark.usefixtures("einsum")
def test_an_op_of_the_table_is_found_planned_and_replaced() -> None:
    rewritten, report = rewrite(einsum_model())
    site = report.sites[0].decision.site
    assert (site.name, site.op, site.role, site.m, site.n, site.k) == ("linear", "Einsum", "linear", "batch", 96, 64)
    assert site.has_bias
    assert site.blocker is None
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Relu": 1}
    x = normal(3, 64)
    expect(x, weight(96, 64), weight(96, seed=1)).then(relu).check(run(rewritten, {"x": x})[0])


@pytest.mark.usefixtures("einsum")
def test_a_function_that_holds_it_is_inlined() -> None:
    body = [node("Einsum", "a w", "r", "linear", equation="mk,nk->mn")]
    function = helper.make_function("local", "Linear", ["a", "w"], ["r"], body, [helper.make_opsetid("", 21)])
    proto = helper.make_model(
        helper.make_graph(
            [node("Linear", "x w", "h", domain="local"), node("Relu", "h", "y")],
            "g",
            [value("x", F32, [3, 64])],
            [value("y", F32, [3, 96])],
            [onnx.numpy_helper.from_array(weight(96, 64), "w")],
        ),
        functions=[function],
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("local", 1)],
    )
    rewritten, report = rewrite(proto)
    assert "inlined local functions: Linear" in report.notes
    x = normal(3, 64)
    expect(x, weight(96, 64)).then(relu).check(run(rewritten, {"x": x})[0])


@pytest.mark.usefixtures("einsum")
def test_a_form_may_leave_a_node_alone() -> None:
    proto = einsum_model()
    proto.graph.node.insert(0, node("Einsum", "x x", "other", equation="mk,nk->mn"))
    proto.graph.node[0].attribute[0].s = b"mk,mk->mk"
    _, report = rewrite(proto)
    assert [entry.decision.site.name for entry in report.sites] == ["linear"]


def test_an_op_that_is_not_in_the_table_is_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(matmul_forms.FORMS, "Einsum")
    proto = einsum_model()
    proto.graph.node.append(node("MatMul", "y v", "z", "second"))
    proto.graph.node.append(node("Neg", "z", "z2"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight(96, 64), "v"))
    proto.graph.output.append(value("z2", F32, ["batch", 64]))
    _, report = rewrite(proto)
    assert [entry.decision.site.name for entry in report.sites] == ["second"]
