"""Every old form of every op that changed below opset 21: the same results after the conversion, or refused by name.

What ONNX Runtime computes of the original is what its result must compute. onnx's converter alone gets a dozen wrong.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from builders import model, node, steps, value
from grids import looped
from old_op_forms import FORMS, INPUTS, Form, form, old_model
from onnx import helper, numpy_helper
from upgraded_models import X, differences, run, upgraded, with_linear

from mxfp8_ops.errors import ContractError

F32 = np.float32


@looped("opset", range(7, 21))
def test_every_form_computes_what_it_did(opset: int) -> None:
    proto, feeds, labels = old_model([each for each in FORMS if each.first <= opset <= each.last], opset)
    rewritten, report = upgraded(proto)
    assert report.notes[0] == f"converted opset {opset} to 21"
    feeds["beside.x"] = X
    assert differences(labels, run(with_linear(proto), feeds), run(rewritten, feeds)) == {}


RESIZE = "it enlarges one axis and shrinks another, and rounds either its own way"
GROUPS = form("GroupNormalization", "image channels channels", num_groups=2)


def refusal(each: Form, opset: int) -> str:
    with pytest.raises(ContractError) as caught:
        upgraded(old_model([each], opset)[0])
    return str(caught.value)


@looped(
    "each, opset, needed, why",
    [
        (form("Hardmax", "x"), 12, 13, "it was over all axes from 1 on"),
        (form("Hardmax", "x", axis=0), 7, 13, "it was over all axes from 0 on"),
        (form("PRelu", "x slope"), 6, 7, "its slopes were per channel"),
        (form("Resize", "image tall"), 10, 11, RESIZE),
        (GROUPS, 20, 21, "its scale and bias were per group"),
    ],
)
def test_what_the_converter_would_change_is_refused(each: Form, opset: int, needed: int, why: str) -> None:
    assert refusal(each, opset) == (
        f"model: node {each.label!r} ({each.op}): is of opset {opset}, and onnx's converter would change what it "
        f"computes: {why}; expected opset {needed} or above; export the model again"
    )


def test_what_the_converter_refuses() -> None:
    message = refusal(form("BatchNormalization", "image row row row row", spatial=0), 8)
    assert message.startswith("model: onnx's converter from opset 8 to 21 refuses it: ")
    assert message.endswith("; expected opset 21 or above; export the model again")


@looped("op, opset", [("ATen", 9), ("ImageScaler", 8), ("Where", 8)])
def test_an_op_that_the_opset_has_not_is_named(op: str, opset: int) -> None:
    assert refusal(form(op, "x"), opset) == (
        f"model: node '{op} x' ({op}): opset {opset} of the model has no such op, so that it cannot be converted to "
        f"21; expected an op of opset {opset}, or opset 21 or above; export the model again"
    )


def test_a_scan_of_opset_8_is_refused() -> None:
    ends = [[value(name, F32, [4]) for name in pair] for pair in (("state", "x"), ("next", "y"))]
    body = helper.make_graph(steps("Add state x>next; Neg x>y"), "body", *ends)
    scan = helper.make_node("Scan", ["", "start", "xs"], ["end", "ys"], "scan", body=body, num_scan_inputs=1)
    inputs = {"start": (F32, [1, 4]), "xs": (F32, [1, 3, 4])}
    proto = model([scan], inputs, {"end": (F32, [1, 4]), "ys": (F32, [1, 3, 4])}, opset=8)
    with pytest.raises(ContractError, match=r"model: node 'scan' \(Scan\): is of opset 8.*it had a batch axis"):
        upgraded(proto)


@looped("opset", [7, 9, 10])
def test_a_mask_of_dropout_that_is_read_is_refused(opset: int) -> None:
    x, mask = (F32, [3, 4, 5]), (F32 if opset < 10 else np.bool_, [3, 4, 5])
    proto = model([node("Dropout", "x", "y mask")], {"x": x}, {"mask": mask}, opset=opset)
    said = "its mask was of zeros when nothing is dropped; expected opset 12 or above"
    with pytest.raises(ContractError, match=said):
        upgraded(proto)


def test_a_sparse_tensor_is_refused() -> None:
    values, indices = numpy_helper.from_array(np.ones(2, F32), "sparse"), numpy_helper.from_array(np.array([1, 5]))
    proto = old_model([form("Relu", "x")], 11)[0]
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 4]))
    said = r"^model: sparse initializer 'sparse', .*; expected dense tensors; store it as a dense initializer"
    with pytest.raises(ContractError, match=said):
        upgraded(proto)


def test_a_resize_whose_scales_are_computed_is_told() -> None:
    resize = form("Resize", "image computed", mode="nearest")
    _, report = upgraded(old_model([resize], 10)[0])
    assert report.notes[1:] == (f"node {resize.label!r} (Resize) is assumed to enlarge: its scales are computed",)


def in_branch(each: Form, opset: int) -> onnx.ModelProto:
    (x,) = each.inputs.split()
    dtype, shape = INPUTS[x].dtype, INPUTS[x].shape
    graphs = [
        helper.make_graph([inner], "branch", [], [value("b", dtype, shape)])
        for inner in (each.node(["b"]), node("Identity", x, "b"))
    ]
    nodes = [helper.make_node("If", ["yes"], ["y"], "if", then_branch=graphs[0], else_branch=graphs[1])]
    return model(nodes, {x: (dtype, shape), "yes": (np.bool_, [])}, {"y": (dtype, shape)}, opset=opset)


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
    proto = in_branch(each, opset)
    rewritten, _ = upgraded(proto)
    feeds = {each.inputs: INPUTS[each.inputs], "yes": np.array(True), "beside.x": X}
    assert differences(["y"], run(with_linear(proto), feeds), run(rewritten, feeds)) == {}
