"""What is refused of an ONNX model when it is loaded, and what ONNX Runtime tolerates and is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, node, weight
from grids import looped
from onnx import NodeProto, TensorProto, helper, numpy_helper
from oracle import run

import mxfp8_graph
from mxfp8_ops.errors import ContractError

F32 = np.float32
Change = Callable[[onnx.ModelProto], Any]
ONCE, DEFINED = "expected each name once", "expected an input, an initializer or an output of a node"


def linear(*more: NodeProto, **weights: np.ndarray) -> onnx.ModelProto:
    """y = relu(x @ w), and nodes beside it."""
    nodes = [node("MatMul", "x w", "h", "linear"), node("Relu", "h", "y", "relu")]
    proto = model(nodes, {"x": (F32, ["n", 64])}, {"y": (F32, ["n", 96])}, {"w": weight(64, 96), **weights})
    proto.graph.node.extend(more)  # which onnx.checker need not like
    return proto


def choosing(*stored: TensorProto) -> NodeProto:
    """Returns an If whose first branch has these initializers."""
    branches = [helper.make_graph([node("Neg", "x", "b")], "b", [], [helper.make_empty_tensor_value_info("b")])]
    branches.append(helper.make_graph([node("Abs", "x", "a")], "a", [], [helper.make_empty_tensor_value_info("a")]))
    branches[0].initializer.extend(stored)
    return node("If", "c", "z", "if", then_branch=branches[0], else_branch=branches[1])


def called(*bodies: Sequence[NodeProto]) -> onnx.ModelProto:
    """Returns a model that calls F, with the local functions F, G, ..., which have these bodies."""
    proto = linear(node("F", "x", "z", domain="f"))
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    names = zip("FG", bodies, strict=False)
    proto.functions.extend(helper.make_function("f", name, ["a"], ["b"], list(body), imports) for name, body in names)
    proto.opset_import.append(helper.make_opsetid("f", 1))
    return proto


def changed(change: Change, **weights: np.ndarray) -> onnx.ModelProto:
    proto = linear(**weights)
    change(proto)
    return proto


def packed(name: str, value: Any) -> onnx.ModelProto:
    """Returns a rewritten model, of whose first node of ours an attribute is changed."""
    proto, _ = mxfp8_graph.rewrite(linear())
    (entry,) = (each for each in proto.graph.node[0].attribute if each.name == "block_size")
    entry.CopyFrom(helper.make_attribute(name, value))
    return proto


W = numpy_helper.from_array(weight(64, 96), "w")
CONDITION = {"c": np.array(True)}
REFUSED = {
    "the graph has no outputs; expected at least one": changed(lambda p: p.graph.ClearField("output")),
    f"output 'q' is not defined; {DEFINED}": changed(lambda p: setattr(p.graph.output[0], "name", "q")),
    f"node 'Neg_z' (Neg): input 'q' is not defined; {DEFINED}": linear(node("Neg", "q", "z")),
    f"an initializer called 'w' is defined twice; {ONCE}": changed(lambda p: p.graph.initializer.append(W)),
    f"an initializer has no name; {ONCE}": changed(lambda p: p.graph.initializer.add(data_type=1, dims=[0])),
    "if/then_branch: the initializer 'w' has the name of a value of a graph around it; expected another name": linear(
        choosing(W), **CONDITION
    ),
    "node 'Neg_p' (Neg): it needs its own result; expected no cycle": linear(
        node("Neg", "q", "p"), node("Abs", "p", "q")
    ),
    "local function 'F' is defined twice; expected each once": changed(
        lambda p: p.functions.extend([called([node("Neg", "a", "b")]).functions[0]] * 2)
    ),
    f"function 'F': node 'Neg_b' (Neg): input 'q' is not defined; {DEFINED}": called([node("Neg", "q", "b")]),
    "tensor 'w': unknown dtype 99; expected a dtype of onnx": changed(
        lambda p: setattr(p.graph.initializer[0], "data_type", 99)
    ),
    "tensor 'w': has 24576 bytes; expected 24192 for float [63, 96]": changed(
        lambda p: p.graph.initializer[0].dims.__setitem__(0, 63)
    ),
    "node 'x_mxfp8_quantize' (MXFP8Quantize): block_size 16; expected 32, the only one that runs": packed(
        "block_size", 16
    ),
}  # fmt: skip


@looped("said", REFUSED)
def test_a_damaged_model_is_refused_in_one_line(said: str) -> None:
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.rewrite(REFUSED[said])
    assert str(caught.value).removeprefix("model: ").rpartition("; ")[0] == said


def test_functions_that_call_themselves_are_the_error_of_onnx_checker() -> None:
    with pytest.raises(ContractError, match=r"must not be recursive; expected a model that passes onnx\.checker"):
        mxfp8_graph.rewrite(called([node("G", "a", "b", domain="f")], [node("F", "a", "b", domain="f")]))


def test_a_name_that_is_no_text_is_refused() -> None:
    content = linear(node("Neg", "h", "ZZZZ")).SerializeToString().replace(b"ZZZZ", b"\xff\xfe\xfd\xfc")
    with pytest.raises(ContractError, match="onnx_ir cannot write it"):
        mxfp8_graph.rewrite(onnx.ModelProto.FromString(content))


def _old(proto: onnx.ModelProto) -> None:
    proto.ir_version = 3
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 96]))
    proto.graph.input.append(helper.make_tensor_value_info("top", TensorProto.FLOAT, []))


def _add(*tensors: TensorProto) -> Change:
    return lambda proto: proto.graph.initializer.extend(tensors)


TOLERATED: dict[str, Change] = {
    "a size of -1": lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1),
    "a declared shape that is wrong": lambda p: p.graph.value_info.append(
        helper.make_tensor_value_info("h", 1, ["n", 7])
    ),
    "nodes out of order": lambda p: p.graph.node.insert(0, p.graph.node.pop()),
    "an empty optional input": lambda p: p.graph.node.append(
        helper.make_node("Clip", ["h", "", "top"], ["z"], name="clip")
    ),
    "a domain that is not imported": lambda p: p.graph.node.append(node("Gelu", "h", "z", domain="com.microsoft")),
    "weights among the inputs": _old,
    "an output of unknown shape": lambda p: p.graph.output[0].type.tensor_type.ClearField("shape"),
    "no name of the graph": lambda p: p.graph.ClearField("name"),
    "an output twice": lambda p: p.graph.output.append(p.graph.output[0]),
    "an input as output": lambda p: p.graph.output.append(p.graph.input[0]),
    "an empty initializer": _add(numpy_helper.from_array(np.ones((0, 3), F32), "e")),
    "strings": _add(numpy_helper.from_array(np.array(["a"], object), "s")),
    "bool and float16 as integers": _add(
        TensorProto(name="b", data_type=TensorProto.BOOL, dims=[2], int32_data=[0, 1]),
        TensorProto(name="half", data_type=TensorProto.FLOAT16, dims=[1], int32_data=[0x3C00]),
    ),
    "4-bit integers, two to an entry": _add(
        TensorProto(name="four", data_type=TensorProto.INT4, dims=[3], int32_data=[33, 3])
    ),
    "a sequence": lambda p: p.graph.node.append(node("SequenceConstruct", "h h", "z")),
    "training information": lambda p: p.training_info.add().algorithm.node.append(node("Nothing", "q", "r")),
}  # fmt: skip
"""ONNX Runtime runs these, so they are rewritten, and what comes out runs too."""


@looped("name", TOLERATED)
def test_what_onnx_runtime_tolerates_is_rewritten_and_runs(name: str) -> None:
    proto = changed(TOLERATED[name], top=np.array(1, F32))
    x = {"x": np.random.default_rng(0).standard_normal((3, 64), F32)}
    expected = run(proto, x)[0]
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert len(report.rewritten) == 1
    assert np.linalg.norm(run(rewritten, x)[0] - expected) < 0.05 * np.linalg.norm(expected)
