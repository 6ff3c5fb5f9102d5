"""What is no valid ONNX model is refused where it is opened, and what ONNX Runtime tolerates is not."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime
import pytest
from builders import matmul_model, model, node, save, weight
from commands import process
from onnx import NodeProto, TensorProto, helper, numpy_helper
from oracle import run

import mxfp8_graph
from mxfp8_graph import Recipe, Rule
from mxfp8_graph.onnx_model import child
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


class TestNodes:
    @pytest.mark.parametrize(
        ("damaged", "expected"),
        [
            (node("MatMul", "x", "z"), "1 input; expected 2"),
            (node("MatMul", "x w w", "z"), "3 inputs; expected 2"),
            (helper.make_node("MatMul", ["x", ""], ["z"], name="MatMul_z"), "input 1 is left empty; expected a name"),
            (node("Concat", "", "z", axis=0), "0 inputs; expected at least 1"),
            (helper.make_node("Relu", ["x"], [], name="Relu_z"), "0 outputs; expected 1"),
            (node("Clip", "x x x x", "z"), "4 inputs; expected 1 to 3"),
            (node("Cast", "x", "z"), "has no attribute 'to'; expected one"),
            (node("Transpose", "x", "z", perm=1.5), "attribute 'perm' is of kind FLOAT; expected INTS"),
            (node("Relu", "x", "z", alpha=1), "unknown attribute 'alpha'; expected none"),
            (node("Identity", "q", "z"), "uses 'q', which is not defined; expected a name that is defined"),
            (node("Identity", "x", "h", "Identity_z"), "output 'h' is defined twice; expected each name once"),
            (node("Add", "x z", "z"), "needs its own result: the graph has a cycle; expected no cycle"),
            (node("MXFP8Gemm", "x w", "z", domain="mxfp8"), "2 inputs; expected 4 to 5"),
        ],
        ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
    )
    def test_one_that_is_not_what_its_schema_says(self, damaged, expected):
        label = damaged.name
        assert refusal(linear(damaged)) == f"node {label!r} ({damaged.op_type}): {expected}"

    def test_an_attribute_that_is_there_twice(self):
        twice = node("Transpose", "x", "z", perm=[1, 0])
        twice.attribute.append(twice.attribute[0])
        expected = "node 'Transpose_z' (Transpose): has attribute 'perm' twice; expected each once"
        assert refusal(linear(twice)) == expected

    def test_a_graph_attribute_without_a_graph(self):
        empty = node("If", "x", "z")
        empty.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
        assert refusal(linear(empty)) == "node 'If_z' (If): attribute 'then_branch' has no value; expected one"

    @pytest.mark.parametrize("other", [{"i": 1}, {"ints": [1]}, {"s": b"x"}])
    def test_an_attribute_with_a_value_of_another_kind(self, other):
        """ONNX Runtime refuses it, and the attributes of a Gemm are gone after a rewrite."""
        gemm = node("Gemm", "w w", "z", alpha=0.5, transB=1)
        gemm.attribute[0].MergeFrom(onnx.AttributeProto(**other))
        with pytest.raises(Exception, match="mismatch in attribute"):
            onnxruntime.InferenceSession(linear(gemm).SerializeToString())
        what = f"attribute 'alpha' of kind FLOAT has a value in field {next(iter(other))!r}"
        assert refusal(linear(gemm)) == f"node 'Gemm_z' (Gemm): {what}; expected a value of its kind and no other"

    def test_a_reference_to_an_attribute_of_no_function(self):
        referring = node("Cast", "x", "z")
        referring.attribute.add(name="to", type=onnx.AttributeProto.INT, ref_attr_name="dtype")
        assert "attribute 'to' refers to one of a function" in refusal(linear(referring))

    def test_a_cycle_of_views_in_front_of_a_matmul(self):
        views = node("Transpose", "b", "a"), node("Identity", "a", "b"), node("MatMul", "x a", "z", "second")
        assert "the graph has a cycle" in refusal(linear(*views))

    def test_a_name_that_is_not_text(self, tmp_path):
        content = linear(node("Neg", "h", "ZZZZ")).SerializeToString().replace(b"ZZZZ", b"\xff\xfe\xfd\xfc")
        assert "is not UTF-8" in refusal(onnx.ModelProto.FromString(content))

    @pytest.mark.parametrize("where", ["graph", "dimension"])
    def test_what_is_not_text_elsewhere(self, where):
        proto = linear()
        if where == "graph":
            proto.graph.name = "ZZZZ"
        else:
            proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "ZZZZ"
        content = proto.SerializeToString().replace(b"ZZZZ", b"\xff\xfe\xfd\xfc")
        assert "not UTF-8" in refusal(onnx.ModelProto.FromString(content))


class TestBodies:
    def test_an_if_without_a_branch(self):
        damaged = node("If", "c", "z", "if", then_branch=graph([node("Neg", "x", "b")]))
        expected = "node 'if' (If): has no attribute 'else_branch'; expected one"
        assert refusal(linear(damaged, c=np.array(True))) == expected

    def test_branches_that_give_too_much_or_take_anything(self):
        good, bad = graph([node("Neg", "x", "b")]), graph([node("Neg", "i", "b")], ["i"])
        damaged = node("If", "c", "z", "if", then_branch=good, else_branch=bad)
        expected = "node 'if' (If): 'else_branch' has 1 input; expected 0 as the node has"
        assert refusal(linear(damaged, c=np.array(True))) == expected
        damaged = node("If", "c", "z v", "if", then_branch=good, else_branch=good)
        expected = "node 'if' (If): 'else_branch' has 1 output; expected 2 as the node has"
        assert refusal(linear(damaged, c=np.array(True))) == expected

    def test_a_loop_body_of_the_wrong_size(self):
        body = graph([node("Identity", "c", "go"), node("Neg", "v", "b")], ["i", "c", "v"], ["go", "b"])
        damaged = node("Loop", "count true x x", "z v", "loop", body=body)
        expected = "node 'loop' (Loop): 'body' has 3 inputs; expected 4 as the node has"
        assert refusal(linear(damaged, count=np.array(3), true=np.array(True))) == expected

    def test_a_scan_over_more_than_it_has(self):
        body = graph([node("Neg", "e", "b")], ["e"])
        damaged = node("Scan", "x", "z", "scan", body=body, num_scan_inputs=2**40)
        assert refusal(linear(damaged)) == f"node 'scan' (Scan): num_scan_inputs is {2**40}; expected 1 to 1"

    def test_a_body_that_hides_a_name_around_it(self):
        hiding = graph([node("Neg", "x", "w"), node("MatMul", "x w", "b")])
        damaged = node("If", "c", "z", "if", then_branch=hiding, else_branch=graph([node("Neg", "x", "b")]))
        expected = "node 'if/then_branch/Neg_w' (Neg): output 'w' is defined twice; expected each name once"
        assert refusal(linear(damaged, c=np.array(True))) == expected

    def test_a_body_that_uses_what_comes_later(self):
        late = graph([node("Relu", "k", "b"), node("Neg", "x", "k")])
        damaged = node("If", "c", "z", "if", then_branch=late, else_branch=graph([node("Neg", "x", "b")]))
        assert "uses 'k' before it is defined" in refusal(linear(damaged, c=np.array(True)))

    def test_more_levels_than_a_file_can_have(self):
        damaged = linear()
        inner = damaged.graph
        for _ in range(34):
            inner = inner.node.add(op_type="If").attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        assert refusal(damaged) == "subgraphs inside subgraphs, more than 33 levels; expected fewer"


class TestGraph:
    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (lambda p: p.graph.output.add(name="q"), "output 'q' is not defined"),
            (lambda p: p.graph.input.append(p.graph.input[0]), "an input called 'x' is defined twice"),
            (lambda p: p.graph.initializer.append(first(p)), "an initializer called 'w' is defined twice"),
            (lambda p: p.graph.input.add(), "an input without a name"),
            (lambda p: p.opset_import.add(version=13), "imports domain 'ai.onnx' twice, versions 21 and 13"),
            (lambda p: setattr(p, "ir_version", -3), "IR version -3"),
            (lambda p: setattr(p.graph.input[0].type.tensor_type, "elem_type", 99), "value 'x' has unknown dtype 99"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_damage(self, change, expected):
        assert refusal(changed(change)).startswith(f"{expected}; expected ")


class TestTensors:
    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (lambda t: t.ClearField("raw_data"), "has 0 entries of float_data; expected 6144 for float [64, 96]"),
            (lambda t: setattr(t, "raw_data", bytes(99)), "has 99 bytes; expected 24576 for float [64, 96]"),
            (lambda t: t.dims.append(2**33), f"dims [64, 96, {2**33}]"),
            (lambda t: t.dims.append(2**62), f"dims [64, 96, {2**62}]"),
            (lambda t: t.dims.extend([-1, -1]), "dims [64, 96, -1, -1]; expected none below 0"),
            (lambda t: t.dims.extend([1] * 70), "72 dims; expected at most 32"),
            (lambda t: setattr(t, "data_type", 99), "unknown dtype 99"),
            (lambda t: setattr(t, "data_type", 0), "unknown dtype 0"),
            (lambda t: t.segment.SetInParent(), "is one segment of a tensor"),
        ],
        ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
    )
    def test_damage(self, change, expected):
        found = refusal(changed(lambda proto: change(first(proto))))
        assert found.startswith(f"tensor 'w': {expected}") or (expected[:4] == "dims" and "tensor 'w': has" in found)

    def test_in_a_node_of_a_subgraph(self):
        value = TensorProto(name="odd", data_type=1, dims=[3])
        inner = graph([node("Constant", "", "b", value=value)])
        damaged = node("If", "c", "z", "if", then_branch=inner, else_branch=inner)
        expected = "tensor 'odd': has 0 entries of float_data; expected 3 for float [3]"
        assert refusal(linear(damaged, c=np.array(True))) == expected

    def test_a_sparse_one_whose_parts_do_not_fit(self):
        proto = linear()
        values, indices = numpy_helper.from_array(np.ones(2, F32), "few"), numpy_helper.from_array(np.arange(3), "i")
        proto.graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, indices=indices, dims=[9]))
        assert "sparse, of dims [9], with values [2] at indices [3]" in refusal(proto)

    @pytest.mark.parametrize("name", [b"\xff\xfe", b"a\0b"])
    def test_external_data_in_a_file_whose_name_is_not_text(self, tmp_path, name):
        path = save(matmul_model(), tmp_path / "m.onnx", external=True)
        path.write_bytes(path.read_bytes().replace(b"m.onnx.data", name.ljust(11, b"x")))
        with pytest.raises(ContractError, match=r"tensor 'w': external 'location' is .*; expected text"):
            mxfp8_graph.rewrite(path)

    @pytest.mark.parametrize("dry_run", [False, True])
    def test_external_data_that_is_too_short(self, tmp_path, dry_run):
        path = save(matmul_model(), tmp_path / "m.onnx", external=True)
        path.with_name("m.onnx.data").write_bytes(bytes(100))
        with pytest.raises(ContractError, match="needs bytes 0 to 24576 of "):
            mxfp8_graph.rewrite(path, dry_run=dry_run)


class TestFunctions:
    def test_recursion(self):
        proto = calling(
            node("F", "x", "z", domain="f"),
            function("F", [node("G", "a", "b", domain="f")]),
            function("G", [node("F", "a", "b", domain="f")]),
        )
        assert refusal(proto).startswith("local functions call themselves: ")

    def test_forty_that_each_call_the_next_twice(self):
        chain = [
            function(f"F{i}", [node(f"F{i + 1}", "a", "c", domain="f"), node(f"F{i + 1}", "c", "b", domain="f")])
            for i in range(40)
        ]
        proto = calling(node("F0", "x", "z", domain="f"), *chain, function("F40", [node("Neg", "a", "b")]))
        assert refusal(proto) == "local functions expand to too many nodes; expected at most 100000"

    def test_forty_shared_ones_that_are_never_called_together(self):
        """Each calls all the later ones, in a subgraph or not, and has no matmul: nothing is expanded."""
        chain = [function(f"F{i}", [node(f"F{i + 1}", "a", "b", domain="f")]) for i in range(40)]
        proto = calling(node("F0", "x", "z", domain="f"), *chain, function("F40", [node("Neg", "a", "b")]))
        assert len(mxfp8_graph.rewrite(proto)[1].rewritten) == 1

    def test_a_call_with_more_than_the_function_takes(self):
        proto = calling(node("F", "x x", "z", domain="f"), function("F", [node("Neg", "a", "b")]))
        assert refusal(proto) == "node 'F_z' (F): 2 inputs; expected at most 1, as its function has"

    def test_a_call_that_leaves_a_matmul_without_an_operand(self):
        proto = calling(node("F", "x", "z", domain="f"), function("F", [node("MatMul", "a c", "b")], ["a", "c"]))
        assert "(MatMul)" in refusal(proto)

    def test_two_of_one_name(self):
        again = function("F", [node("Neg", "a", "b")])
        assert refusal(calling(node("F", "x", "z", domain="f"), again, again)).startswith(
            "local function 'F' is defined"
        )


class TestHostileOperands:
    """Views of a weight that contradict it: the matmul is kept, with a reason, or the model refused."""

    @pytest.mark.parametrize(
        "view",
        [
            node("Transpose", "w", "v", perm=[7, 0]),
            node("Transpose", "w", "v", perm=[0]),
            node("Cast", "w", "v", to=99),
            node("Reshape", "w big", "v"),
            node("Reshape", "w zeros", "v"),
            node("Reshape", "w minus", "v"),
            node("Squeeze", "w nine", "v"),
            node("Unsqueeze", "w nines", "v"),
            node("Slice", "w zeros nine", "v"),
            node("Slice", "w nine nine nine nine", "v"),
            node("Split", "w nines", "v v1", axis=0),
            node("Split", "w", "v v1", axis=9, num_outputs=2),
            node("Split", "w", "v v1 v2", num_outputs=2),
        ],
        ids=lambda view: " ".join((view.op_type, *view.input)),
    )
    def test_is_no_exception_of_another_kind(self, view):
        numbers = {"big": [2**62, 2**62], "zeros": [0, 0, 0], "minus": [-1, -1], "nine": [9], "nines": [9, 9, 9]}
        stored = {name: np.array(values, np.int64) for name, values in numbers.items()}
        proto = linear(view, node("MatMul", "x v", "z", "hostile"), **stored)
        try:
            _, report = mxfp8_graph.rewrite(proto)
        except ContractError:
            return
        reasons = {site.decision.site.name: site.decision.quantize for site in report.sites}
        assert reasons == {"linear": True, "hostile": False}

    def test_thousands_of_views(self):
        names = ["w", *(f"v{i}" for i in range(5000))]
        views = [node("Identity", a, b) for a, b in itertools.pairwise(names)]
        proto = linear(*views, node("MatMul", f"x {names[-1]}", "z", "far"))
        _, report = mxfp8_graph.rewrite(proto)
        assert [site.decision.quantize for site in report.sites] == [True, False]

    def test_a_scalar_added_to_a_product_of_unknown_width_is_no_bias(self):
        nodes = [node("MatMul", "a b", "h", "product"), node("Add", "h one", "s"), node("Neg", "s", "y")]
        inputs = {"a": (F32, ["m", 64]), "b": (F32, [64, "n"])}
        proto = model(nodes, inputs, {"y": (F32, ["m", "n"])}, {"one": np.array(1, F32)})
        rewritten, _ = mxfp8_graph.rewrite(proto, Recipe(name="r", rules=(Rule(op="MatMul"),)))
        assert [n.op_type for n in rewritten.graph.node][-2:] == ["Add", "Neg"]

    @pytest.mark.parametrize("opset", [11, 21])
    @pytest.mark.parametrize(
        ("damaged", "expected"),
        [
            (node("MatMul", "x short", "z", "odd"), "Incompatible dimensions for matrix multiplication"),
            (node("Add", "h x", "z", "odd"), "Incompatible dimensions"),
            (node("Softmax", "b", "z", "odd", axis=1), "'axis' must be in [-1 , 0]. Its actual value is: 1"),
            (node("MatMul", "x integers", "z", "odd"), "B has inconsistent type tensor(int64)"),
        ],
        ids=["K", "bias", "axis", "dtype"],
    )
    def test_what_an_op_cannot_take(self, damaged, expected, opset):
        """ONNX Runtime refuses these, but not always what our node or onnx's converter make of them."""
        stored = {"short": weight(32, 96), "b": weight(96), "integers": np.zeros((64, 96), np.int64)}
        proto = linear(damaged, **stored)
        proto.opset_import[0].version = opset
        onnxruntime.set_default_logger_severity(4)
        with pytest.raises(Exception, match="odd"):
            onnxruntime.InferenceSession(proto.SerializeToString())
        assert (
            refusal(proto)
            == f"node 'odd' ({damaged.op_type}): {expected}; expected inputs and attributes that fit together"
        )

    def test_an_input_with_a_size_of_minus_one_is_no_damage(self):
        proto = linear()
        proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -1
        onnxruntime.set_default_logger_severity(4)
        onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": np.ones((2, 64), F32)})
        assert len(mxfp8_graph.rewrite(proto)[1].sites) == 1

    def test_declared_shapes_that_are_wrong_are_no_damage(self):
        """ONNX Runtime warns of them."""
        proto = linear()
        proto.graph.value_info.append(helper.make_tensor_value_info("h", 1, ["n", 7]))
        onnxruntime.set_default_logger_severity(4)
        onnxruntime.InferenceSession(proto.SerializeToString())
        assert len(mxfp8_graph.rewrite(proto)[1].rewritten) == 1

    def test_what_aborts_the_shape_inference_of_onnx(self):
        """Onnx 1.23 runs over the end of a vector here; another version may know better."""
        proto = linear(node("Split", "three", "z0 z1 z2 z3", num_outputs=3), three=np.ones(3, F32))
        with contextlib.suppress(ContractError):
            assert len(mxfp8_graph.rewrite(proto)[1].rewritten) == 1


def _valueless() -> NodeProto:
    result = node("Flatten", "h", "z", "flatten")
    result.attribute.add(name="axis", type=onnx.AttributeProto.INT)
    return result


def _add_function(proto: onnx.ModelProto, added: onnx.FunctionProto) -> None:
    proto.functions.append(added)
    proto.opset_import.append(helper.make_opsetid("f", 1))


def _store(proto: onnx.ModelProto, array: np.ndarray) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(array, "stored"))


def _old(proto: onnx.ModelProto) -> None:
    proto.ir_version = 3
    values = (helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer)
    proto.graph.input.extend(values)


class TestTolerated:
    """ONNX Runtime runs these, so they are rewritten, and what comes out runs too."""

    MODELS: ClassVar = {
        "nodes out of order": lambda p: p.graph.node.insert(0, p.graph.node.pop()),
        "an empty optional input": lambda p: p.graph.node.append(
            helper.make_node("Clip", ["h", "", "top"], ["z"], name="clip")
        ),
        "a domain that nobody imports": lambda p: p.graph.node.append(node("Gelu", "h", "z", domain="com.microsoft")),
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
        "an attribute without a value": lambda p: p.graph.node.append(_valueless()),
        "a function that is broken and never called": lambda p: _add_function(
            p, function("F", [node("Relu", "nothing", "b")])
        ),
        "the import of a domain twice": lambda p: p.opset_import.append(p.opset_import[0]),
        "training information": lambda p: p.training_info.add().algorithm.node.append(node("Nothing", "q", "r")),
    }

    @pytest.mark.parametrize("name", MODELS)
    def test_model(self, name):
        proto = changed(self.MODELS[name], top=np.array(1, F32))
        x = {"x": np.random.default_rng(0).standard_normal((3, 64), F32)}
        expected = run(proto, x)[0]
        rewritten, report = mxfp8_graph.rewrite(proto)
        assert len(report.rewritten) == 1
        assert np.linalg.norm(run(rewritten, x)[0] - expected) < 0.05 * np.linalg.norm(expected)


class TestCommands:
    """Every command that opens a model refuses a damaged one, with exit code 2 and one line."""

    @pytest.mark.parametrize(
        "command", ["rewrite m.onnx", "rewrite --dry-run m.onnx", "run m.onnx", "verify m.onnx m.onnx"]
    )
    def test_exit_code(self, tmp_path, command):
        save_unchecked(linear(node("MatMul", "x", "z", "odd")), tmp_path / "m.onnx")
        done = process(*command.split(), cwd=tmp_path)
        assert done.stderr.splitlines() == [
            "error: m.onnx: node 'odd' (MatMul): 1 input; expected 2; export the model again"
        ]
        assert (done.returncode, done.stdout, [p.name for p in tmp_path.iterdir()]) == (2, "", ["m.onnx"])

    def test_unpack(self):
        with pytest.raises(ContractError, match="2 inputs; expected 4 to 5"):
            mxfp8_graph.unpack(linear(node("MXFP8Gemm", "x w", "z", domain="mxfp8")))


def save_unchecked(proto: onnx.ModelProto, path: Path) -> None:
    path.write_bytes(proto.SerializeToString())


class TestChild:
    def test_gives_what_the_call_returns(self):
        content = bytes(range(256)) * 10000
        assert child.call(lambda: content, 10) == content

    def test_gives_what_the_call_raises(self):
        assert child.call(lambda: bytes([300]), 10) == child.Failure("ValueError", "bytes must be in range(0, 256)")

    def test_survives_an_abort(self, capfd):
        assert child.call(lambda: bytes(os.abort() or 0), 10) == child.Failure("", "crashes on it")

    def test_ends_a_call_that_does_not(self):
        assert child.call(lambda: bytes(_forever()), 1) == child.Failure("", "takes more than 1 s")

    def test_bounds_its_memory(self):
        assert child.call(lambda: bytes(child.MOST_MEMORY + 1), 10).kind == "MemoryError"

    def test_leaves_the_garbage_of_its_parent_alone(self):
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
