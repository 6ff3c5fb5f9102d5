"""Models below opset 21 are converted up: same results, names and documentation, or an error that names the node.

The result must compute what ONNX Runtime computes of the original. onnx's converter alone gets a dozen ops wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from grids import looped
from models import calling, chain_model, choose, local_function, model, node, steps, subgraph, value, weight
from old_op_forms import FORMS, INPUTS, Form, form, old_model
from onnx import helper, numpy_helper
from oracle import check_well_formed, expect, kinds, run
from upgraded_models import X, differences, upgraded, with_linear
from upgraded_models import run as run_as_written

import mxfp8_graph
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.onnx_pass.prepare import prepare
from mxfp8_graph.policy.recipe import load_recipe
from mxfp8_ops.errors import ContractError

F32 = np.float32
NEGATED = expect(X, weight(64, 96).T).then(np.negative)


def opset_of(proto: onnx.ModelProto) -> int:
    (version,) = [entry.version for entry in proto.opset_import if entry.domain == ""]
    return version


def linear(*more: onnx.NodeProto, opset: int = 21, **weights: np.ndarray) -> onnx.ModelProto:
    """x @ w -> h -> more -> y; by default y = -h."""
    nodes = [*steps("linear:MatMul x w>h"), *(more or steps("Neg h>y"))]
    ends = {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}
    return model(nodes, *ends, {"w": weight(64, 96), **weights}, opset=opset, checked=False)


@looped("opset", range(7, 21))
def test_every_form_of_an_op_below_opset_21_computes_what_it_did(opset: int) -> None:
    proto, feeds, labels = old_model([each for each in FORMS if each.first <= opset <= each.last], opset)
    rewritten, report = upgraded(proto)
    assert (opset_of(rewritten), report.notes[0]) == (21, f"converted opset {opset} to 21")
    feeds["beside.x"] = X
    before, after = run_as_written(with_linear(proto), feeds), run_as_written(rewritten, feeds)
    assert differences(labels, before, after) == {}


@looped("opset", range(21, 27))
def test_opset_21_and_above_stays(opset: int) -> None:
    rewritten, report = mxfp8_graph.rewrite(linear(opset=opset))
    onnx.checker.check_model(rewritten, full_check=True)
    assert (opset_of(rewritten), report.notes) == (opset, ())
    assert {e.version for f in rewritten.functions for e in f.opset_import if e.domain == ""} == {opset}
    NEGATED.check(run(rewritten, {"x": X})[0])


def test_nodes_that_did_not_change_keep_their_documentation_and_metadata() -> None:
    proto = linear(*steps("relu:Relu h>r; LeakyRelu h>leak|alpha=0.5; soft:Softmax r>y"), opset=11)
    graph = proto.graph
    proto.doc_string, graph.doc_string = "the model", "the graph"
    for item in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        item.doc_string = f"about {item.name}"
    for item in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        item.metadata_props.add(key="from", value=item.name if item is not proto else "model")
    rewritten, _ = mxfp8_graph.rewrite(proto)
    check_well_formed(rewritten)
    after = {n.name: n for n in rewritten.graph.node}
    assert [after[n.name] for n in graph.node[1:3]] == list(graph.node[1:3])
    for name in ("linear", "soft"):  # nodes that did change
        assert (after[name].doc_string, after[name].metadata_props[0].value) == (f"about {name}", name)
    for field in ("doc_string", "metadata_props", "input", "output"):
        assert getattr(rewritten.graph, field) == getattr(graph, field), field
    assert (rewritten.doc_string, rewritten.metadata_props[0]) == (proto.doc_string, proto.metadata_props[0])


@looped("before, after", [(8, 10), (11, 11)])
def test_the_ir_version_rises_to_that_of_opset_21_and_never_falls(before: int, after: int) -> None:
    proto = linear(opset=17)
    proto.ir_version = before
    assert mxfp8_graph.rewrite(proto)[0].ir_version == after


@looped("version", range(3, 14))
def test_every_ir_version_that_onnx_runtime_reads_is_rewritten(version: int) -> None:
    proto = linear(opset=13 if version < 10 else 21)
    proto.ir_version = version
    if version < 4:  # which lists every initializer as an input
        proto.graph.input.append(value("w", F32, [64, 96]))
    rewritten, _ = mxfp8_graph.rewrite(proto)
    assert rewritten.ir_version == max(version, 10)
    NEGATED.check(run(rewritten, {"x": X})[0])


@pytest.mark.parametrize("opset", [17, 21])
def test_a_model_goes_to_onnx_twice_and_comes_back_once(opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First for all passes, then for the types of what they return; a node of a function keeps its metadata."""
    act = local_function("act", "a b", "MatMul a b>m; Relu m>r", opset)
    act.node[1].metadata_props.add(key="module", value="act")
    ends = {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}
    loaded = load(calling(model(steps("act x w>y"), *ends, {"w": weight(64, 96)}, opset=opset, checked=False), act))
    calls, functions = list[str](), {"to_proto": ir.to_proto, "from_proto": ir.from_proto}
    for name, function in functions.items():
        counted = lambda x, name=name, function=function: calls.append(name) or function(x)  # noqa: E731
        monkeypatch.setattr(ir, name, counted)
    prepared, _ = prepare(loaded, load_recipe("mxfp8"))
    assert calls == ["to_proto", "from_proto", "to_proto"]
    assert [dict(node.metadata_props) for node in prepared.graph if node.op_type == "Relu"] == [{"module": "act"}]


def test_local_functions_are_inlined_when_the_opset_changes() -> None:
    proto = linear(*steps("Neg h>n; call:Twice n>y"), opset=17)
    calling(proto, local_function("Twice", "a", "Add a a>r", 17))
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert report.notes == ("inlined local functions: Twice", "converted opset 17 to 21")
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1, "Add": 1}
    type(NEGATED)(2 * NEGATED.y, 2 * NEGATED.bound).check(run(rewritten, {"x": X})[0])


@looped("opset", [17, 21])
def test_both_names_of_the_default_domain_become_one(opset: int) -> None:
    proto = linear(*steps("Neg h>n; call:Twice n>y"), opset=opset)
    calling(proto, local_function("Twice", "a", "Add a a>r", opset))
    for part in (proto, *proto.functions):
        part.opset_import.append(helper.make_opsetid("ai.onnx", opset))
    proto.graph.node[0].domain = "ai.onnx"
    rewritten, _ = mxfp8_graph.rewrite(proto)
    for part in (rewritten, *rewritten.functions):
        assert [entry.version for entry in part.opset_import if entry.domain in ("", "ai.onnx")] == [21]
    type(NEGATED)(2 * NEGATED.y, 2 * NEGATED.bound).check(run(rewritten, {"x": X})[0])


def test_a_model_of_other_domains_alone_needs_no_import_of_the_default_one() -> None:
    proto = linear()
    del proto.graph.node[:]
    proto.graph.node.extend(steps("com.microsoft.FusedMatMul x w>h; com.microsoft.Gelu h>y"))
    proto.opset_import[0].domain, proto.opset_import[0].version = "com.microsoft", 1
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert (opset_of(rewritten), report.notes) == (21, ())
    before, after = run(proto, {"x": X})[0], run(rewritten, {"x": X})[0]
    assert 0 < np.linalg.norm(after - before) < 0.1 * np.linalg.norm(before)


def test_nodes_of_a_custom_domain_stay_in_a_conversion() -> None:
    proto = chain_model(opset=17)
    proto.graph.node.append(node("Probe", "x", "p", domain="org.custom", kind="odd"))
    proto.opset_import.append(helper.make_opsetid("org.custom", 4))
    rewritten, _ = mxfp8_graph.rewrite(proto)
    assert rewritten.graph.node[-1] == proto.graph.node[-1]
    assert opset_of(rewritten) == 21


@looped(
    "each, opset",
    [
        (form("Softmax", "x", axis=1), 9),
        (form("Clip", "half", min=-0.5), 10),
        (form("Upsample", "image", mode="linear", scales=[1.0, 1.0, 1.0, 1.0]), 8),
        (form("Hardmax", "x", axis=2), 11),
        (form("Dropout", "x"), 8),
    ],
)
def test_a_branch_computes_what_it_did(each: Form, opset: int) -> None:
    x = INPUTS[each.inputs]
    choice = choose(subgraph([each.node(["b"])]), f"Identity {each.inputs}>b", "y")
    inputs = {each.inputs: (x.dtype, x.shape), "yes": (np.bool_, [])}
    proto = model([choice], inputs, {"y": (x.dtype, x.shape)}, opset=opset)
    rewritten, _ = upgraded(proto)
    feeds = {each.inputs: x, "yes": np.array(True), "beside.x": X}
    before, after = run_as_written(with_linear(proto), feeds), run_as_written(rewritten, feeds)
    assert differences(["y"], before, after) == {}


def test_a_resize_whose_scales_are_computed_has_a_note() -> None:
    resize = form("Resize", "image computed", mode="nearest")
    _, report = upgraded(old_model([resize], 10)[0])
    assert report.notes[1:] == (f"node {resize.label!r} (Resize) is assumed to enlarge: its scales are computed",)


@looped("nested", [False, True])
def test_active_dropout_is_switched_off(nested: bool) -> None:
    drop = node("Dropout", "h ratio on", "d")
    drop = choose(subgraph([drop]), "Identity h>e", "d", yes="on") if nested else drop
    proto = linear(drop, node("Neg", "d", "y"), ratio=np.array(0.5, F32), on=np.array(True))
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert report.notes == ("the model was exported in training mode; in the result Dropout is off (1)",)
    NEGATED.check(run(rewritten, {"x": X})[0])


def test_a_flag_of_dropout_that_the_caller_sets_stays() -> None:
    proto = linear(node("Dropout", "h ratio on", "y"), ratio=np.array(0.5, F32), on=np.array(True))
    proto.graph.input.append(value("on", np.bool_, []))
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert report.notes == ()
    assert [list(n.input[2:]) for n in rewritten.graph.node if n.op_type == "Dropout"] == [["on"]]


# --- What is refused ---


def refusal(proto: onnx.ModelProto) -> str:
    with pytest.raises(ContractError) as caught:
        upgraded(proto)
    return str(caught.value).removeprefix("model: ")


@looped(
    "each, opset, needed, why",
    [
        (form("Hardmax", "x"), 12, 13, "it was over all axes from 1 on"),
        (form("Hardmax", "x", axis=0), 7, 13, "it was over all axes from 0 on"),
        (form("PRelu", "x slope"), 6, 7, "its slopes were per channel"),
        (
            form("Resize", "image tall"), 10, 11,
            "it enlarges one axis and shrinks another, and rounds either its own way",
        ),
        (
            form("GroupNormalization", "image channels channels", num_groups=2), 20, 21,
            "its scale and bias were per group",
        ),
    ],
)  # fmt: skip
def test_a_node_that_the_converter_would_change_is_refused(each: Form, opset: int, needed: int, why: str) -> None:
    assert refusal(old_model([each], opset)[0]) == (
        f"node {each.label!r} ({each.op}): is of opset {opset}, and onnx's converter would change what it "
        f"computes: {why}; expected opset {needed} or above; export the model again"
    )


def test_an_error_of_the_converter_has_its_message() -> None:
    message = refusal(old_model([form("BatchNormalization", "image row row row row", spatial=0)], 8)[0])
    assert message.startswith("onnx's converter from opset 8 to 21 refuses it: ")
    assert message.endswith("; expected opset 21 or above; export the model again")


@looped("op, opset", [("ATen", 9), ("ImageScaler", 8), ("Where", 8)])
def test_an_op_that_the_opset_lacks_is_named(op: str, opset: int) -> None:
    assert refusal(old_model([form(op, "x")], opset)[0]) == (
        f"node '{op} x' ({op}): opset {opset} of the model has no such op, so that it cannot be converted to "
        f"21; expected an op of opset {opset}, or opset 21 or above; export the model again"
    )


def test_a_scan_of_opset_8_is_refused() -> None:
    ends = [[value(name, F32, [4]) for name in pair] for pair in (("state", "x"), ("next", "y"))]
    body = helper.make_graph(steps("Add state x>next; Neg x>y"), "body", *ends)
    scan = helper.make_node("Scan", ["", "start", "xs"], ["end", "ys"], "scan", body=body, num_scan_inputs=1)
    inputs = {"start": (F32, [1, 4]), "xs": (F32, [1, 3, 4])}
    message = refusal(model([scan], inputs, {"end": (F32, [1, 4]), "ys": (F32, [1, 3, 4])}, opset=8))
    assert message.startswith("node 'scan' (Scan): is of opset 8, ")
    assert "it had a batch axis" in message


@looped("opset", [7, 9, 10])
def test_a_mask_of_dropout_that_is_read_is_refused(opset: int) -> None:
    x, mask = (F32, [3, 4, 5]), (F32 if opset < 10 else np.bool_, [3, 4, 5])
    proto = model([node("Dropout", "x", "y mask")], {"x": x}, {"mask": mask}, opset=opset)
    assert "its mask was of zeros when nothing is dropped; expected opset 12 or above" in refusal(proto)


def test_a_sparse_tensor_is_refused() -> None:
    values, indices = numpy_helper.from_array(np.ones(2, F32), "sparse"), numpy_helper.from_array(np.array([1, 5]))
    proto = old_model([form("Relu", "x")], 11)[0]
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 4]))
    message = refusal(proto)
    assert message.startswith("sparse initializer 'sparse', ")
    assert message.endswith("; expected dense tensors; store it as a dense initializer")


KNOWS = f"which onnx {onnx.__version__} knows; "
OPSETS = f"expected 1 to {onnx.defs.onnx_opset_version()}, {KNOWS}"
IR_VERSIONS = f"expected 3 to {onnx.IR_VERSION}, {KNOWS}"
VERSIONS: dict[str, Callable[[onnx.ModelProto], Any]] = {
    f"opset 99; {OPSETS}upgrade onnx": lambda p: setattr(p.opset_import[0], "version", 99),
    f"opset 0; {OPSETS}export the model again": lambda p: setattr(p.opset_import[0], "version", 0),
    f"IR version 99; {IR_VERSIONS}upgrade onnx": lambda p: setattr(p, "ir_version", 99),
    f"IR version 2; {IR_VERSIONS}export the model again": lambda p: setattr(p, "ir_version", 2),
    "no opset import for the default domain; expected one; re-export the model with an opset": lambda p: setattr(
        p.opset_import[0], "domain", "org.custom"
    ),
}


@looped("said", VERSIONS)
def test_a_version_that_onnx_does_not_know_is_refused(said: str) -> None:
    proto = linear(opset=11)
    VERSIONS[said](proto)
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.rewrite(proto)
    assert str(caught.value) == f"model: {said}"
