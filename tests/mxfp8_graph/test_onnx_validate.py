"""What is no valid ONNX model is refused where it is opened, and what ONNX Runtime tolerates is not."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from builders import matmul_model, model, node, save, steps, value, weight
from commands import refused
from grids import looped
from mxfp8_graph.onnx_model import child
from mxfp8_graph.onnx_model.check_nodes import Copy, Place
from onnx import NodeProto, TensorProto, helper, numpy_helper
from oracle import run

import mxfp8_graph
from mxfp8_graph import Recipe, Rule
from mxfp8_ops.errors import ContractError

F32 = np.float32
Change = Callable[[onnx.ModelProto], Any]


def linear(*more: NodeProto, **weights: np.ndarray) -> onnx.ModelProto:
    """y = relu(x @ w), and nodes that onnx.checker need not like; without them a good model."""
    nodes = [node("MatMul", "x w", "h", "linear"), node("Relu", "h", "y", "relu")]
    stored = {"w": weight(64, 96), **weights}
    proto = model(nodes, {"x": (F32, ["n", 64])}, {"y": (F32, ["n", 96])}, stored)
    proto.graph.node.extend(more)
    return proto


def changed(change: Change, *more: NodeProto, **weights: np.ndarray) -> onnx.ModelProto:
    proto = linear(*more, **weights)
    change(proto)
    return proto


def refusal(proto: onnx.ModelProto, **options: Any) -> str:
    """Returns why a model is refused, without "model: " and without the advice."""
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.rewrite(proto, **options)
    return str(caught.value).removeprefix("model: ").rpartition("; ")[0]


def graph(nodes: Sequence[NodeProto], inputs: Sequence[str] = (), outputs: Sequence[str] = ("b",)) -> onnx.GraphProto:
    values = [[helper.make_tensor_value_info(name, 1, None) for name in names] for names in (inputs, outputs)]
    return helper.make_graph(nodes, "inner", *values)


def function(name: str, nodes: Sequence[NodeProto], inputs: Sequence[str] = ("a",)) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    return helper.make_function("f", name, inputs, ["b"], nodes, imports)


def calling(call: NodeProto, *functions: onnx.FunctionProto) -> onnx.ModelProto:
    proto = linear(call)
    proto.functions.extend(functions)
    proto.opset_import.append(helper.make_opsetid("f", 1))
    return proto


def first(proto: onnx.ModelProto) -> TensorProto:
    return proto.graph.initializer[0]


def unreadable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model in which the name ZZZZ is not text."""
    return onnx.ModelProto.FromString(proto.SerializeToString().replace(b"ZZZZ", b"\xff\xfe\xfd\xfc"))


def attribute(damaged: NodeProto, change: Callable[[Any], Any]) -> onnx.ModelProto:
    change(damaged.attribute)
    return linear(damaged)


def branch(*nodes: NodeProto) -> onnx.GraphProto:
    return graph(nodes or [node("Neg", "x", "b")])


def choosing(then: onnx.GraphProto, other: onnx.GraphProto | None = None, outputs: str = "z") -> onnx.ModelProto:
    graphs = {"then_branch": then, **({"else_branch": other} if other is not None else {})}
    return linear(node("If", "c", outputs, "if", **graphs), c=np.array(True))


def storing(name: str) -> onnx.GraphProto:
    """Returns a branch with an initializer of that name."""
    stored = branch(node("MatMul", f"x {name}", "b"))
    stored.initializer.append(numpy_helper.from_array(weight(64, 96, seed=1), name))
    return stored


def nested(levels: int) -> onnx.ModelProto:
    proto = linear()
    inner = proto.graph
    for _ in range(levels):
        inner = inner.node.add(op_type="If").attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    return proto


def sparse(proto: onnx.ModelProto) -> None:
    values, indices = numpy_helper.from_array(np.ones(2, F32), "few"), numpy_helper.from_array(np.arange(3), "i")
    proto.graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, indices=indices, dims=[9]))


def f(name: str, inputs: str = "a", output: str = "b") -> NodeProto:
    return node(name, inputs, output, domain="f")


NEG = function("F", [node("Neg", "a", "b")])
TWICE = "Graph must be in single static assignment (SSA) form, however {} names multiple times..."
UNSORTED = "...Nodes in a graph must be topologically sorted, however input '{}' of node: name: {} "
NODES: dict[str, NodeProto] = {
    "Node(MatMul_z) with schema(::MatMul:13) has input size 1 not in range...": node("MatMul", "x", "z"),
    "Node(MatMul_z) with schema(::MatMul:13) has input size 3 not in range...": node("MatMul", "x w w", "z"),
    "Node (MatMul_z)'s input 1 is marked single but has an empty string in the graph...": helper.make_node(
        "MatMul", ["x", ""], ["z"], name="MatMul_z"
    ),
    "Node(Concat_z) with schema(::Concat:13) has input size 0 not in range...": node("Concat", "", "z", axis=0),
    "Node(Relu_z) with schema(::Relu:14) has output size 0 not in range...": helper.make_node(
        "Relu", ["x"], [], name="Relu_z"
    ),
    "Node(Clip_z) with schema(::Clip:13) has input size 4 not in range...": node("Clip", "x x x x", "z"),
    "Required attribute 'to' is missing...": node("Cast", "x", "z"),
    "Mismatched attribute type in 'Transpose_z : perm'. Expected: 'INTS', actual: 'FLOAT'...": node(
        "Transpose", "x", "z", perm=1.5
    ),
    "unknown attribute 'alpha'; expected none": node("Relu", "x", "z", alpha=1),
    "2 inputs; expected 4 to 5": node("MXFP8Gemm", "x w", "z", domain="mxfp8"),
}
CHANGES: dict[str, Change] = {
    "output 'q' is not defined...": lambda p: p.graph.output.add(name="q"),
    TWICE.format("'h' has been used as output"): lambda p: p.graph.node.append(node("Identity", "x", "h")),
    TWICE.format("'x' has been used as graph input"): lambda p: p.graph.input.append(p.graph.input[0]),
    "an initializer called 'w' is defined twice...": lambda p: p.graph.initializer.append(first(p)),
    "Field 'name' of 'value_info' is required to be non-empty...": lambda p: p.graph.input.add(),
    "imports domain 'ai.onnx' twice, versions 21 and 13...": lambda p: p.opset_import.add(version=13),
    "IR version -3...": lambda p: setattr(p, "ir_version", -3),
    "value 'x' has unknown dtype 99...": lambda p: setattr(p.graph.input[0].type.tensor_type, "elem_type", 99),
    "...sparse, of dims [9], with values [2] at indices [3]": sparse,
}
TENSORS: dict[str, Callable[[TensorProto], Any]] = {
    "has 0 entries of float_data; expected 6144 for float [64, 96]": lambda t: t.ClearField("raw_data"),
    "has 99 bytes; expected 24576 for float [64, 96]": lambda t: setattr(t, "raw_data", bytes(99)),
    "dims [64, 96, -1, -1]; expected none below 0": lambda t: t.dims.extend([-1, -1]),
    "72 dims; expected at most 32": lambda t: t.dims.extend([1] * 70),
    "unknown dtype 99...": lambda t: setattr(t, "data_type", 99),
    "unknown dtype 0...": lambda t: setattr(t, "data_type", 0),
    "is one segment of a tensor...": lambda t: t.segment.SetInParent(),
}
COUNTS = {"count": np.array(3), "true": np.array(True)}
LOOP = graph([node("Identity", "c", "go"), node("Neg", "v", "b")], ["i", "c", "v"], ["go", "b"])
MODELS: dict[str, onnx.ModelProto] = {
    UNSORTED.format("q", "Identity_z"): linear(node("Identity", "q", "z")),
    UNSORTED.format("z", "Add_z"): linear(node("Add", "x z", "z")),
    "node 'Transpose_z' (Transpose): Attribute 'perm' appeared multiple times...": attribute(
        node("Transpose", "x", "z", perm=[1, 0]), lambda a: a.append(a[0])
    ),
    "node 'If_z' (If): 'then_branch' has 0 outputs; expected 1 as the node has": attribute(
        node("If", "x", "z"), lambda a: a.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
    ),
    "...attribute 'to' refers to one of a function": attribute(
        node("Cast", "x", "z"), lambda a: a.add(name="to", type=onnx.AttributeProto.INT, ref_attr_name="dtype")
    ),
    UNSORTED.format("b", "Transpose_a"): linear(
        node("Transpose", "b", "a"), node("Identity", "a", "b"), node("MatMul", "x a", "z", "second")
    ),
    "...is not UTF-8": unreadable(linear(node("Neg", "h", "ZZZZ"))),
    "...not UTF-8, in the name of the graph": unreadable(changed(lambda p: setattr(p.graph, "name", "ZZZZ"))),
    "...not UTF-8, in a dimension": unreadable(
        changed(lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "ZZZZ"))
    ),
    "node 'if' (If): Required attribute 'else_branch' is missing...": choosing(branch()),
    "node 'if' (If): 'else_branch' has 1 input; expected 0 as the node has": choosing(
        branch(), graph([node("Neg", "i", "b")], ["i"])
    ),
    "node 'if' (If): 'else_branch' has 1 output; expected 2 as the node has": choosing(branch(), branch(), "z v"),
    "node 'loop' (Loop): 'body' has 3 inputs; expected 4 as the node has": linear(
        node("Loop", "count true x x", "z v", "loop", body=LOOP), **COUNTS
    ),
    f"node 'scan' (Scan): num_scan_inputs is {2**40}; expected 1 to 1": linear(
        node("Scan", "x", "z", "scan", body=graph([node("Neg", "e", "b")], ["e"]), num_scan_inputs=2**40)
    ),
    "node 'if' (If): " + TWICE.format("'w' has been used as output"): choosing(
        branch(node("Neg", "x", "w"), node("MatMul", "x w", "b")), branch()
    ),
    **{
        f"if/else_branch: the initializer {name!r} has the name of a value of a graph around it...": choosing(
            branch(), storing(name)
        )
        for name in ("w", "x", "h", "z")
    },
    "if/then_branch/if/then_branch: the initializer 'k' has the name of a value of a graph around it...": choosing(
        branch(node("Neg", "x", "k"), node("If", "c", "b", "if", then_branch=storing("k"), else_branch=branch()))
    ),
    UNSORTED.format("k", "Relu_b"): choosing(branch(node("Relu", "k", "b"), node("Neg", "x", "k")), branch()),
    "subgraphs inside subgraphs, more than 33 levels; expected fewer": nested(34),
    "tensor 'odd': has 0 entries of float_data; expected 3 for float [3]": choosing(
        *[branch(node("Constant", "", "b", value=TensorProto(name="odd", data_type=1, dims=[3])))] * 2
    ),
    "local functions call themselves: ...": calling(f("F", "x", "z"), function("F", [f("G")]), function("G", [f("F")])),
    "local functions expand to too many nodes; expected at most 100000": calling(
        f("F0", "x", "z"),
        *(function(f"F{i}", [f(f"F{i + 1}", "a", "c"), f(f"F{i + 1}", "c")]) for i in range(40)),
        function("F40", [node("Neg", "a", "b")]),
    ),
    "node 'F_z' (F): 2 inputs; expected at most 1, as its function has": calling(f("F", "x x", "z"), NEG),
    "...(MatMul)": calling(f("F", "x", "z"), function("F", [node("MatMul", "a c", "b")], ["a", "c"])),
    "local function 'F' is defined...": calling(f("F", "x", "z"), NEG, NEG),
}
DAMAGES = {
    **{f"node {each.name!r} ({each.op_type}): {said}": linear(each) for said, each in NODES.items()},
    **{said: changed(change) for said, change in CHANGES.items()},
    **{f"tensor 'w': {said}": changed(lambda p, change=change: change(first(p))) for said, change in TENSORS.items()},
    **MODELS,
}
"""What is said of each damaged model: all of it, or what it begins with, or (after ...) what is in it."""


@looped("said", DAMAGES)
def test_a_damaged_model_is_refused(said: str) -> None:
    found = refusal(DAMAGES[said])
    if said.startswith("..."):
        assert said[3:].partition(", in ")[0] in found
    elif said.endswith("..."):
        assert found.startswith(said[:-3])
    else:
        assert found == said


def test_inputs_of_a_body_may_have_the_name_of_a_value_outside() -> None:
    """ONNX does not forbid it: the name is the input in the body."""
    takes = [value("i", np.int64, []), value("c", np.bool_, []), value("w", F32, [96, 96])]
    gives = [value("d", np.bool_, []), value("b", F32, ["n", 96])]
    body = helper.make_graph([node("Identity", "c", "d"), node("MatMul", "h w", "b")], "inner", takes, gives)
    body.node.append(node("Identity", "w", "same"))
    body.output.insert(1, value("same", F32, [96, 96]))
    proto = linear(node("Loop", "count true other", "last z", "loop", body=body), **COUNTS, other=weight(96, 96))
    proto.graph.output.append(value("z", F32, [3, "n", 96]))
    feeds = {"x": np.ones((2, 64), F32)}
    rewritten, _ = mxfp8_graph.rewrite(proto)
    for found, expected in zip(run(rewritten, feeds), run(proto, feeds), strict=True):
        assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


@looped("size", [2**33, 2**62])
def test_a_tensor_of_too_many_values_is_refused(size: int) -> None:
    found = refusal(changed(lambda p: first(p).dims.append(size)))
    assert found.startswith((f"tensor 'w': dims [64, 96, {size}]", "tensor 'w': has"))


@looped("other", [{"i": 1}, {"ints": [1]}, {"s": b"x"}])
def test_an_attribute_with_a_value_of_another_kind(other: dict[str, Any]) -> None:
    """ONNX Runtime refuses it, and the attributes of a Gemm are gone after a rewrite."""
    gemm = node("Gemm", "w w", "z", alpha=0.5, transB=1)
    gemm.attribute[0].MergeFrom(onnx.AttributeProto(**other))
    with pytest.raises(Exception, match="mismatch in attribute"):
        onnxruntime.InferenceSession(linear(gemm).SerializeToString())
    assert refusal(linear(gemm)).startswith(
        "node 'Gemm_z' (Gemm): type field and data field mismatch in attribute alpha"
    )


@looped("size", [16, 64])
def test_a_node_of_ours_with_blocks_of_another_size(size: int) -> None:
    proto, _ = mxfp8_graph.rewrite(linear())
    (quantize,) = (node for node in proto.graph.node if node.op_type == "MXFP8Quantize")
    (attribute,) = (attribute for attribute in quantize.attribute if attribute.name == "block_size")
    attribute.i = size
    expected = f"node 'x_mxfp8_quantize' (MXFP8Quantize): block_size {size}; expected 32, the only one that runs"
    assert refusal(proto) == expected


def test_forty_shared_functions_that_are_never_called_together() -> None:
    """Each calls all the later ones, in a subgraph or not, and has no matmul: nothing is expanded."""
    functions = [function(f"F{i}", [f(f"F{i + 1}")]) for i in range(40)]
    proto = calling(f("F0", "x", "z"), *functions, function("F40", [node("Neg", "a", "b")]))
    assert len(mxfp8_graph.rewrite(proto)[1].rewritten) == 1


CONTRADICTIONS = (
    "Transpose w>v|perm=[7,0]", "Transpose w>v|perm=[0]", "Cast w>v|to=99", "Reshape w big>v", "Reshape w zeros>v",
    "Reshape w minus>v", "Squeeze w nine>v", "Unsqueeze w nines>v", "Slice w zeros nine>v",
    "Slice w nine nine nine nine>v", "Split w nines>v v1|axis=0", "Split w>v v1|axis=9 num_outputs=2",
    "Split w>v v1 v2|num_outputs=2",
)  # fmt: skip
"""Views of a weight that contradict it: the matmul is kept, with a reason, or the model refused."""


@looped("view", CONTRADICTIONS)
def test_views_that_contradict_their_weight_are_kept_or_refused(view):
    numbers = {"big": [2**62, 2**62], "zeros": [0, 0, 0], "minus": [-1, -1], "nine": [9], "nines": [9, 9, 9]}
    stored = {name: np.array(values, np.int64) for name, values in numbers.items()}
    proto = linear(*steps(f"{view}; hostile:MatMul x v>z"), **stored)
    try:
        _, report = mxfp8_graph.rewrite(proto)
    except ContractError:
        return
    reasons = {site.decision.site.name: site.decision.quantize for site in report.sites}
    assert reasons == {"linear": True, "hostile": False}


def test_thousands_of_views_of_a_weight():
    names = ["w", *(f"v{i}" for i in range(5000))]
    views = [node("Identity", a, b) for a, b in itertools.pairwise(names)]
    proto = linear(*views, node("MatMul", f"x {names[-1]}", "z", "far"))
    _, report = mxfp8_graph.rewrite(proto)
    assert [site.decision.quantize for site in report.sites] == [True, False]


def test_a_scalar_added_to_a_product_of_unknown_width_is_no_bias():
    nodes = steps("product:MatMul a b>h; Add h one>s; Neg s>y")
    inputs = {"a": (F32, ["m", 64]), "b": (F32, [64, "n"])}
    proto = model(nodes, inputs, {"y": (F32, ["m", "n"])}, {"one": np.array(1, F32)})
    rewritten, _ = mxfp8_graph.rewrite(proto, Recipe(name="r", rules=(Rule(op="MatMul"),)))
    assert [n.op_type for n in rewritten.graph.node][-2:] == ["Add", "Neg"]


@looped(
    "damaged, expected, opset",
    [
        (node("MatMul", "x short", "z", "odd"), "Incompatible dimensions for matrix multiplication", 11),
        (node("Add", "h x", "z", "odd"), "Incompatible dimensions", 21),
        (node("Softmax", "b", "z", "odd", axis=1), "'axis' must be in [-1 , 0]. Its actual value is: 1", 11),
        (node("MatMul", "x integers", "z", "odd"), "B has inconsistent type tensor(int64)", 21),
    ],
)
def test_what_an_op_cannot_take(damaged, expected, opset):
    """ONNX Runtime refuses these, but not always what our node or onnx's converter make of them."""
    stored = {"short": weight(32, 96), "b": weight(96), "integers": np.zeros((64, 96), np.int64)}
    proto = linear(damaged, **stored)
    proto.opset_import[0].version = opset
    onnxruntime.set_default_logger_severity(4)
    with pytest.raises(Exception, match="odd"):
        onnxruntime.InferenceSession(proto.SerializeToString())
    fit = "expected inputs and attributes that fit together"
    assert refusal(proto) == f"node 'odd' ({damaged.op_type}): {expected}; {fit}"


def test_what_aborts_the_shape_inference_of_onnx():
    """Onnx 1.23 runs over the end of a vector here; another version may know better."""
    proto = linear(node("Split", "three", "z0 z1 z2 z3", num_outputs=3), three=np.ones(3, F32))
    with contextlib.suppress(ContractError):
        assert len(mxfp8_graph.rewrite(proto)[1].rewritten) == 1


def _valueless() -> NodeProto:
    result = node("Flatten", "h", "z", "flatten")
    result.attribute.add(name="axis", type=onnx.AttributeProto.INT)
    return result


@looped("kind", ["GRAPH", "SPARSE_TENSOR", "TYPE_PROTO"])
def test_an_attribute_without_a_value_that_has_no_default(kind: str) -> None:
    unknown = node("Unknown", "h", "z", domain="f")
    unknown.attribute.add(name="odd", type=onnx.AttributeProto.AttributeType.Value(kind))
    assert refusal(linear(unknown)) == (
        f"node 'Unknown_z' (Unknown): attribute 'odd' has no value; expected one of kind {kind}"
    )


def test_large_attributes_are_not_copied_for_the_checker() -> None:
    values = {"text": bytes(2**20), "numbers": [0.5] * 2**18, "counts": [2**40] * 2**17, "texts": ["a" * 2**10] * 2**10}
    proto = linear(node("Unknown", "h", "z", domain="f", **values))
    assert Copy(proto.opset_import, {}, Place("model")).of_graph(proto.graph).ByteSize() < 2**18
    assert mxfp8_graph.rewrite(proto)[0].graph.node[-1].attribute == proto.graph.node[-1].attribute


def test_thousands_of_initializers_with_the_last_name_twice() -> None:
    proto = linear()
    proto.graph.initializer.extend(TensorProto(name=f"w{i}", data_type=1, dims=[0]) for i in [*range(30_000), 29_999])
    start = time.process_time()
    assert refusal(proto) == "an initializer called 'w29999' is defined twice; expected each name once"
    assert time.process_time() - start < 5


def _undocumented(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].attribute.add(name="__kept", i=1, type=onnx.AttributeProto.INT, doc_string="ZZZZ")
    proto.CopyFrom(unreadable(proto))


def _add_function(proto: onnx.ModelProto, added: onnx.FunctionProto) -> None:
    proto.functions.append(added)
    proto.opset_import.append(helper.make_opsetid("f", 1))


def _store(proto: onnx.ModelProto, array: np.ndarray) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(array, "stored"))


def _old(proto: onnx.ModelProto) -> None:
    proto.ir_version = 3
    values = (helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer)
    proto.graph.input.extend(values)


TOLERATED: dict[str, Change] = {
    "another size of -1": lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", -1),
    "a declared shape that is wrong, of which ONNX Runtime warns": lambda p: p.graph.value_info.append(
        helper.make_tensor_value_info("h", 1, ["n", 7])
    ),
    "nodes out of order": lambda p: p.graph.node.insert(0, p.graph.node.pop()),
    "an empty optional input": lambda p: p.graph.node.append(
        helper.make_node("Clip", ["h", "", "top"], ["z"], name="clip")
    ),
    "a domain that is not imported": lambda p: p.graph.node.append(node("Gelu", "h", "z", domain="com.microsoft")),
    "weights among the inputs": _old,
    "an output of unknown shape": lambda p: p.graph.output[0].type.tensor_type.ClearField("shape"),
    "a size of -1": lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1),
    "no name of the graph": lambda p: p.graph.ClearField("name"),
    "an output twice": lambda p: p.graph.output.append(p.graph.output[0]),
    "an input as output": lambda p: p.graph.output.append(p.graph.input[0]),
    "an empty initializer": lambda p: _store(p, np.ones((0, 3), F32)),
    "strings": lambda p: _store(p, np.array(["a"], object)),
    "bool and float16 as integers": lambda p: p.graph.initializer.extend(
        [
            TensorProto(name="b", data_type=TensorProto.BOOL, dims=[2], int32_data=[0, 1]),
            TensorProto(name="half", data_type=TensorProto.FLOAT16, dims=[1], int32_data=[0x3C00]),
        ]
    ),
    "4-bit integers, two to an entry": lambda p: p.graph.initializer.append(
        TensorProto(name="four", data_type=TensorProto.INT4, dims=[3], int32_data=[0x21, 0x3])
    ),
    "a sequence": lambda p: p.graph.node.append(node("SequenceConstruct", "h h", "z")),
    "documentation of an attribute that is not text": _undocumented,
    "an attribute without a value": lambda p: p.graph.node.append(_valueless()),
    "a function that is broken and never called": lambda p: _add_function(
        p, function("F", [node("Relu", "nothing", "b")])
    ),
    "the import of a domain twice": lambda p: p.opset_import.append(p.opset_import[0]),
    "training information": lambda p: p.training_info.add().algorithm.node.append(node("Nothing", "q", "r")),
}
"""ONNX Runtime runs these, so they are rewritten, and what comes out runs too."""


@looped("name", TOLERATED)
def test_what_onnx_runtime_tolerates_is_rewritten_and_runs(name):
    proto = changed(TOLERATED[name], top=np.array(1, F32))
    x = {"x": np.random.default_rng(0).standard_normal((3, 64), F32)}
    expected = run(proto, x)[0]
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert len(report.rewritten) == 1
    assert np.linalg.norm(run(rewritten, x)[0] - expected) < 0.05 * np.linalg.norm(expected)


@looped("command", ["rewrite m.onnx", "rewrite --dry-run m.onnx", "run m.onnx", "verify m.onnx m.onnx"])
@pytest.mark.usefixtures("own_folder")
def test_every_command_that_opens_a_damaged_model_refuses_it(command: str) -> None:
    Path("m.onnx").write_bytes(linear(node("MatMul", "x", "z", "odd")).SerializeToString())
    assert refused(*command.split()) == (
        "error: m.onnx: node 'odd' (MatMul): Node(odd) with schema(::MatMul:13) has input size 1 not in range "
        "[min=2, max=2]; expected a model that passes onnx.checker; export the model again"
    )
    assert [p.name for p in Path().iterdir()] == ["m.onnx"]


def test_unpack_refuses_it_too() -> None:
    with pytest.raises(ContractError, match="2 inputs; expected 4 to 5"):
        mxfp8_graph.unpack(linear(NODES["2 inputs; expected 4 to 5"]))


def test_external_data_that_is_too_short(tmp_path: Path) -> None:
    path = save(matmul_model(), tmp_path / "m.onnx", external=True)
    path.with_name("m.onnx.data").write_bytes(bytes(100))
    for dry_run in (False, True):
        with pytest.raises(ContractError, match="needs bytes 0 to 24576 of "):
            mxfp8_graph.rewrite(path, dry_run=dry_run)


def test_external_data_in_a_file_whose_name_is_not_text(tmp_path: Path) -> None:
    path = save(matmul_model(), tmp_path / "m.onnx", external=True)
    content = path.read_bytes()
    for name in (b"\xff\xfe", b"a\0b"):
        path.write_bytes(content.replace(b"m.onnx.data", name.ljust(11, b"x")))
        with pytest.raises(ContractError, match=r"tensor 'w': external 'location' is .*; expected text"):
            mxfp8_graph.rewrite(path)


def test_a_child_gives_what_the_call_returns():
    content = bytes(range(256)) * 10000
    assert child.call(lambda: content, 10) == content


def test_a_child_gives_what_the_call_raises():
    assert child.call(lambda: bytes([300]), 10) == child.Failure("ValueError", "bytes must be in range(0, 256)")


def test_a_child_survives_an_abort(capfd):
    assert child.call(lambda: bytes(os.abort() or 0), 10) == child.Failure("", "crashes on it")


def test_a_child_ends_a_call_that_does_not():
    assert child.call(lambda: bytes(_forever()), 1) == child.Failure("", "takes more than 1 s")


def test_a_child_bounds_its_memory():
    assert child.call(lambda: bytes(child.MOST_MEMORY + 1), 10).kind == "MemoryError"


def test_a_child_of_a_process_with_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, limits = os.pipe, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(2048, limits[1])), limits[1]))

    def high() -> tuple[int, int]:
        reading, writing = pipe()
        copy = fcntl.fcntl(reading, fcntl.F_DUPFD, 1024)
        os.close(reading)
        return copy, writing

    monkeypatch.setattr(os, "pipe", high)
    try:
        assert child.call(lambda: b"done", 10) == b"done"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@looped("limit, less", [("RLIMIT_CPU", 5), ("RLIMIT_AS", 2**28), ("RLIMIT_CORE", 0)])
def test_a_child_of_a_process_with_a_lower_limit(limit: str, less: int) -> None:
    def inner() -> bytes:
        number = getattr(resource, limit)
        lower = resource.getrlimit(number)[1] - less
        resource.setrlimit(number, (lower, lower))
        result = child.call(lambda: b"done", 10)
        return result if isinstance(result, bytes) else result.message.encode()

    assert child.call(inner, 10) == b"done"


def test_a_child_that_the_system_kills():
    said = "is killed, as systems do when memory runs out"
    assert child.call(lambda: bytes(os.kill(os.getpid(), signal.SIGKILL) or 0), 10) == child.Failure("", said)


def test_a_child_leaves_the_garbage_of_its_parent_alone():
    """A session of ONNX Runtime in it would wait for threads that the child does not have, or crash."""
    parent = os.getpid()

    class Session:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                os._exit(1)

    gc.disable()
    try:
        Session()
        gc.enable()
        assert child.call(lambda: b"done" if [[] for _ in range(10**5)] else b"", 10) == b"done"
    finally:
        gc.enable()


def _forever() -> int:
    while True:
        pass


def test_an_invalid_model_never_becomes_one_that_runs():
    onnxruntime.set_default_logger_severity(4)
    recipe = Recipe(name="all", min_dim=1)
    for damaged in (
        linear(node("MatMul", "x w w", "z")),
        changed(lambda p: p.graph.node[0].input.append("w")),
        changed(lambda p: p.graph.node[0].attribute.append(helper.make_attribute("odd", 1))),
    ):
        with pytest.raises(Exception, match="invalid"):
            onnxruntime.InferenceSession(damaged.SerializeToString())
        with pytest.raises(ContractError):
            mxfp8_graph.rewrite(damaged, recipe)


def test_an_interrupt_while_the_child_is_made_reaches_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, interrupts = os.fork, (signal.SIGINT, signal.SIGTERM)

    def interrupted() -> int:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # what this raises in a hook of fork() would be lost
        made = fork()
        if made:
            assert set(interrupts) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return made

    monkeypatch.setattr(os, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        child.call(lambda: b"", seconds=5)
    assert not set(interrupts) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
