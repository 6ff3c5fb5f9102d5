"""Models below opset 21 are converted up: same results, same names, same documentation; or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from builders import chain_model, model, node, steps, value, weight
from grids import looped
from onnx import helper
from oracle import check_well_formed, expect, kinds, normal, run

import mxfp8_graph
from mxfp8_ops.errors import ContractError

F32 = np.float32


def opset_of(proto: onnx.ModelProto) -> int:
    (version,) = [entry.version for entry in proto.opset_import if entry.domain == ""]
    return version


def linear(*more: onnx.NodeProto, opset: int, y: Any = ("m", 96), **weights: np.ndarray) -> onnx.ModelProto:
    """x @ w -> h -> more -> y."""
    nodes = [node("MatMul", "x w", "h", "linear"), *more]
    return model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, y)}, {"w": weight(64, 96), **weights}, opset=opset)


X, NEGATED = normal(3, 64), expect(normal(3, 64), weight(64, 96).T).then(np.negative)


@looped("opset", [7, 8, 9, 11, 13, 15, 17, 18, 19, 20])
def test_a_lower_opset_becomes_21(opset):
    rewritten, report = mxfp8_graph.rewrite(linear(node("Neg", "h", "y"), opset=opset))
    check_well_formed(rewritten)
    assert opset_of(rewritten) == 21
    assert report.notes == (f"converted opset {opset} to 21",)
    NEGATED.check(run(rewritten, {"x": X})[0])


@looped("opset", [21, 22, 23, 24, 25, 26])
def test_opset_21_and_above_stays(opset):
    rewritten, report = mxfp8_graph.rewrite(linear(node("Neg", "h", "y"), opset=opset))
    onnx.checker.check_model(rewritten, full_check=True)
    assert opset_of(rewritten) == opset
    assert {e.version for f in rewritten.functions for e in f.opset_import if e.domain == ""} == {opset}
    assert report.notes == ()
    NEGATED.check(run(rewritten, {"x": X})[0])


def test_ops_that_changed_are_converted():
    nodes = steps(
        "MatMul x w>h; Squeeze h>s|axes=[0]; Unsqueeze s>u|axes=[0,1]; Clip u>c|min=-1.0 max=1.0; Softmax c>p|axis=1; "
        "ReduceSum p>y|axes=[0] keepdims=0"
    )
    proto = model(nodes, {"x": (F32, [1, 5, 64])}, {"y": (F32, [1, 5, 96])}, {"w": weight(64, 96)}, opset=10)
    rewritten, _ = mxfp8_graph.rewrite(proto)
    check_well_formed(rewritten)
    x = normal(1, 5, 64)
    h = np.clip(expect(x, weight(64, 96).T).y, -1, 1).reshape(1, -1)  # Softmax over all axes from 1 on
    p = np.exp(h) / np.exp(h).sum()
    np.testing.assert_allclose(run(rewritten, {"x": x})[0], p.reshape(1, 5, 96), rtol=1e-4)


def test_nodes_that_did_not_change_keep_their_documentation_and_metadata():
    proto = linear(node("Relu", "h", "r"), node("Squeeze", "r", "y", axes=[1]), opset=11, y=("m", 96))
    del proto.graph.node[2]
    proto.graph.node.append(node("Softmax", "r", "y", "soft"))
    for n in proto.graph.node:
        n.doc_string = f"about {n.name}"
        n.metadata_props.add(key="origin", value=n.name)
    leaky = node("LeakyRelu", "h", "leak", alpha=0.5)
    proto.graph.node.append(leaky)
    proto.graph.doc_string, proto.doc_string = "the graph", "the model"
    proto.graph.metadata_props.add(key="g", value="1")
    proto.metadata_props.add(key="m", value="1")
    for item in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        item.doc_string = f"about {item.name}"
        item.metadata_props.add(key="from", value=item.name)
    rewritten, _ = mxfp8_graph.rewrite(proto)
    after = {n.name: n for n in rewritten.graph.node}
    assert after["Relu_r"] == proto.graph.node[1]
    assert after["LeakyRelu_leak"] == leaky
    for name in ("linear", "Relu_r", "soft"):
        assert after[name].doc_string == f"about {name}"
        assert [p.value for p in after[name].metadata_props] == [name]
    assert (rewritten.graph.doc_string, rewritten.doc_string) == ("the graph", "the model")
    assert list(rewritten.graph.metadata_props) == list(proto.graph.metadata_props)
    assert rewritten.metadata_props[0] == proto.metadata_props[0]
    assert list(rewritten.graph.input) == list(proto.graph.input)
    assert list(rewritten.graph.output) == list(proto.graph.output)


def test_ir_version_rises_to_that_of_opset_21_and_never_falls():
    for before, after in ((8, 10), (11, 11)):
        proto = linear(node("Neg", "h", "y"), opset=17)
        proto.ir_version = before
        assert mxfp8_graph.rewrite(proto)[0].ir_version == after


def branches(then: list[onnx.NodeProto], opset: int) -> onnx.ModelProto:
    graphs = [
        helper.make_graph(nodes, "b", [], [value(nodes[-1].output[0], F32, ["a", 3, 96])])
        for nodes in (then, [node("Identity", "h", "e")])
    ]
    nodes = [
        node("MatMul", "x w", "h", "linear"),
        helper.make_node("If", ["yes"], ["y"], "if", then_branch=graphs[0], else_branch=graphs[1]),
    ]
    inputs = {"x": (F32, [2, 3, 64]), "yes": (np.bool_, [])}
    return model(nodes, inputs, {"y": (F32, [2, 3, 96])}, {"w": weight(64, 96)}, opset=opset)


@looped(
    "then, opset",
    [
        ([node("Softmax", "h", "t")], 11),
        ([node("Softmax", "h", "t", axis=1)], 11),
        ([node("Clip", "h", "t", min=0.0)], 10),
        ([node("Unsqueeze", "h", "s", axes=[0]), node("Squeeze", "s", "t", axes=[0])], 11),
        ([node("LogSoftmax", "h", "t", axis=1)], 12),
        ([node("Abs", "h", "t")], 13),
    ],
)
def test_a_branch_of_ops_that_changed_is_converted_or_refused_never_changed_silently(then, opset):
    proto = branches(then, opset)
    recipe = mxfp8_graph.Recipe(name="mxfp8", output_projections=True)
    x = normal(2, 3, 64)
    feeds = {"x": x, "yes": np.array(True)}
    try:
        rewritten, _ = mxfp8_graph.rewrite(proto, recipe)
    except ContractError as error:
        assert "expected opset 21 or above; export the model again with one" in str(error)  # noqa: PT017
        assert opset < 13
        return
    before, after = run(proto, feeds)[0], run(rewritten, feeds)[0]
    assert np.linalg.norm(after - before) <= 0.15 * np.linalg.norm(before)


def test_the_old_ir_lists_every_initializer_as_an_input():
    nodes = steps("linear:MatMul x w>h; Reshape h shape>r; Upsample r scales>u|mode='nearest'; Neg u>y")
    weights = {"w": weight(64, 96), "shape": np.array([1, 1, -1, 96]), "scales": np.array([1, 1, 2, 1], F32)}
    proto = model(nodes, {"x": (F32, [3, 64])}, {"y": (F32, [1, 1, 6, 96])}, weights, opset=9)
    proto.graph.input.extend(value(name, array.dtype, array.shape) for name, array in weights.items())
    proto.ir_version = 3
    onnx.checker.check_model(proto)
    rewritten, _ = mxfp8_graph.rewrite(proto)
    check_well_formed(rewritten)
    assert kinds(rewritten)["MXFP8Gemm"] == 1
    actual = run(rewritten, {"x": X})[0]
    NEGATED.check(actual[0, 0, ::2])
    NEGATED.check(actual[0, 0, 1::2])


def test_local_functions_are_inlined_when_the_opset_changes():
    body, imports = [node("Add", "a a", "r")], [helper.make_opsetid("", 17)]
    twice = helper.make_function("local", "Twice", ["a"], ["r"], body, imports)
    proto = linear(node("Neg", "h", "n"), node("Neg", "n", "y"), opset=17)
    proto.graph.node[2].CopyFrom(node("Twice", "n", "y", "call", domain="local"))
    proto.functions.append(twice)
    proto.opset_import.append(helper.make_opsetid("local", 1))
    onnx.checker.check_model(proto)
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert report.notes == ("inlined local functions: Twice", "converted opset 17 to 21")
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1, "Add": 1}
    type(NEGATED)(2 * NEGATED.y, 2 * NEGATED.bound).check(run(rewritten, {"x": X})[0])


@looped("version", range(3, 14))
def test_every_ir_version_that_onnx_runtime_reads(version):
    proto = linear(node("Neg", "h", "y"), opset=13 if version < 10 else 21)
    proto.ir_version = version
    if version < 4:
        proto.graph.input.append(value("w", F32, [64, 96]))
    NEGATED.check(run(mxfp8_graph.rewrite(proto)[0], {"x": X})[0])


def test_a_model_of_other_domains_alone_needs_no_import_of_the_default_one():
    nodes = [node("FusedMatMul", "x w", "h", domain="com.microsoft"), node("Gelu", "h", "y", domain="com.microsoft")]
    proto = linear(node("Neg", "h", "y"), opset=21)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.opset_import[0].domain, proto.opset_import[0].version = "com.microsoft", 1
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert (opset_of(rewritten), report.notes) == (21, ())
    x = normal(3, 64)
    before, after = run(proto, {"x": x})[0], run(rewritten, {"x": x})[0]
    assert 0 < np.linalg.norm(after - before) < 0.1 * np.linalg.norm(before)


def test_custom_domain_nodes_do_not_stop_a_conversion():
    proto = chain_model(opset=17)
    proto.graph.node.append(helper.make_node("Probe", ["x"], ["p"], "probe", domain="org.custom", kind="odd"))
    proto.opset_import.append(helper.make_opsetid("org.custom", 4))
    rewritten, _ = mxfp8_graph.rewrite(proto)
    assert rewritten.graph.node[-1] == proto.graph.node[-1]
    assert opset_of(rewritten) == 21


def test_what_is_refused() -> None:
    def refused(change: Callable[[onnx.ModelProto], Any]) -> str:
        proto = linear(node("Neg", "h", "y"), opset=11)
        change(proto)
        with pytest.raises(ContractError) as caught:
            mxfp8_graph.rewrite(proto)
        return str(caught.value).removeprefix("model: ")

    knows = f"which onnx {onnx.__version__} knows; upgrade onnx"
    newest = onnx.defs.onnx_opset_version()
    assert refused(lambda p: setattr(p.opset_import[0], "version", 99)) == f"opset 99; expected 1 to {newest}, {knows}"
    assert refused(lambda p: setattr(p.opset_import[0], "version", 0)).startswith("opset 0; expected 1 to ")
    assert refused(lambda p: setattr(p, "ir_version", 99)) == (
        f"IR version 99; expected 3 to {onnx.IR_VERSION}, {knows}"
    )
    assert refused(lambda p: setattr(p, "ir_version", 2)).startswith("IR version 2; expected 3 to ")
    assert refused(lambda p: setattr(p.opset_import[0], "domain", "org.custom")) == (
        "no opset import for the default domain; expected one; re-export the model with an opset"
    )


@looped("nested", [False, True])
def test_active_dropout_is_switched_off(nested: bool) -> None:
    drop = node("Dropout", "h ratio on", "d")
    if nested:
        then, other = (
            helper.make_graph([inner], "b", [], [value(inner.output[0], F32, ["m", 96])])
            for inner in (drop, node("Identity", "h", "e"))
        )
        drop = node("If", "on", "d", then_branch=then, else_branch=other)
    proto = linear(drop, node("Neg", "d", "y"), opset=21, ratio=np.array(0.5, F32), on=np.array(True))
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert report.notes == ("the model was exported in training mode; in the result Dropout is off (1)",)
    NEGATED.check(run(rewritten, {"x": X})[0])


def test_a_flag_that_the_caller_sets_stays():
    proto = linear(node("Dropout", "h ratio on", "y"), opset=21, ratio=np.array(0.5, F32), on=np.array(True))
    proto.graph.input.append(value("on", np.bool_, []))
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert report.notes == ()
    assert [list(n.input[2:]) for n in rewritten.graph.node if n.op_type == "Dropout"] == [["on"]]
