"""Wherever constants are stored, and whatever else reads them and what is between nodes, fusing changes no result.

A shape, a scale, a mask of a random attention is an initializer or a Constant node, of one attention or of all; a node
beside or behind the attention, a branch, or a caller of the model reads it too. Likewise of the other fusions.
"""

from __future__ import annotations

from random import Random

import numpy as np
import onnx
import pytest
from attention_models import BATCH, HEADS, HIDDEN, ROWS, SIZE
from builders import model, node, steps, value, weight
from fused_models import activated, both_ways, check_same, graph_model
from grids import looped
from onnx import helper, numpy_helper
from oracle import kinds

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.running.sessions import Session

F32 = np.float32
SHAPE = (BATCH, ROWS, HIDDEN)
EXACT = Recipe(activations="unchanged", min_dim=0)
"""Fused or not, values are multiplied as they are: results differ by sums in another order."""

LAYERS = 2
NORMS = 6 * SIZE
"""|q| |k| is below it: inputs and weights are normal, so the mean is SIZE, and 2 * SIZE behind a first layer."""
MOST_DIFFERENT = LAYERS * 2.0**-23 * (2 * (SIZE + 2) * NORMS + ROWS + 2)
"""Relative. Here and there a score is off by the roundings of a sum and two factors, and a weight by that in its
numerator and its denominator; then so many values are summed."""


def reader(random: Random, read: onnx.ValueInfoProto) -> onnx.NodeProto:
    """Returns a node that gives a value once more, perhaps from its branches; it may need a constant `no`."""
    name, branches = read.name, {}
    if random.random() < 0.5:
        return node("Identity", name, f"{name}_also")
    for op in ("then", "else"):
        again = onnx.ValueInfoProto(name=f"{name}_{op}", type=read.type)
        branches[f"{op}_branch"] = helper.make_graph([node("Identity", name, again.name)], op, [], [again])
    return node("If", "no", f"{name}_also", **branches)


class RandomAttention:
    """x [B, S, 64] -> one or two attentions, each with a linear behind it -> y, and what else reads the constants."""

    def __init__(self, seed: int) -> None:
        self.random, self.layers = Random(seed), 0
        self.sizes = self.random.choice([["batch", "rows", HIDDEN], [BATCH, "rows", HIDDEN], [*SHAPE]])
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, np.ndarray] = {"no": np.array(False)}
        self.outputs: dict[str, tuple[type, list[int | str | None]]] = {}
        self.known: dict[bytes, str] = {}
        x = "x"
        for _ in range(self.random.randint(1, LAYERS)):
            x = self.attention(x)
        self.nodes.append(node("Neg", x, "y"))

    def constant(self, what: str, numbers: np.ndarray) -> str:
        """Returns the name of a constant, of a new one or of one of the same numbers, which something else may read."""
        key = numbers.tobytes() + numbers.dtype.char.encode()
        if key in self.known and self.random.random() < 0.5:
            return self.known[key]
        name = self.known[key] = f"{what}_{len(self.known)}_{len(self.nodes)}"
        if self.random.random() < 0.3:
            self.stored[name] = numbers
        else:
            self.nodes.append(node("Constant", "", name, value=numpy_helper.from_array(numbers)))
            if self.random.random() < 0.2:
                self.outputs[name] = (numbers.dtype.type, [*numbers.shape])
        if self.random.random() < 0.2:
            self.read(name, numbers)
        return name

    def read(self, name: str, numbers: np.ndarray) -> None:
        """Lets a node beside the attention read a constant, or one in a branch."""
        self.outputs[f"{name}_also"] = (numbers.dtype.type, [*numbers.shape])
        self.nodes.append(reader(self.random, value(name, numbers.dtype, numbers.shape)))

    def emit(self, op: str, inputs: str, **attributes: object) -> str:
        self.nodes.append(node(op, inputs, f"v{len(self.nodes)}", **attributes))
        return f"v{len(self.nodes) - 1}"

    def linear(self, x: str) -> str:
        name = f"w{len(self.stored)}"
        self.stored[name] = weight(HIDDEN, HIDDEN, seed=len(self.stored))
        return self.emit("MatMul", f"{x} {name}")

    def heads(self, x: str, *perm: int) -> str:
        shapes = [[0, 0, HEADS, SIZE], [0, -1, HEADS, SIZE], [0, 0, -1, SIZE]]
        if self.sizes == [*SHAPE]:  # else the attention looks as if it were between values of other sizes
            shapes.append([BATCH, ROWS, HEADS, SIZE])
        shape = self.random.choice(shapes)
        apart = self.emit("Reshape", f"{x} {self.constant('heads', np.array(shape))}")
        return self.emit("Transpose", apart, perm=perm)

    def attention(self, x: str) -> str:
        pick = self.random.choice
        q, k, v = (self.heads(self.linear(x), *perm) for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)))
        if pick([True, False]):
            q = self.emit("Mul", f"{q} {self.constant('factor', np.array(0.5, F32))}")
        scores = self.emit("MatMul", f"{q} {k}")
        if pick([True, False]):
            scores = self.emit("Div", f"{scores} {self.constant('root', np.array(4, F32))}")
        if (kind := pick(["none", "added", "chosen"])) != "none":
            hidden = np.triu(np.ones((1, 1, ROWS, ROWS), np.bool_), 1)
            if kind == "added":
                scores = self.emit("Add", f"{scores} {self.constant('mask', np.where(hidden, F32(-3), F32(0)))}")
            else:
                lowest = self.constant("lowest", np.array(np.finfo(F32).min, F32))
                scores = self.emit("Where", f"{self.constant('seen', ~hidden)} {scores} {lowest}")
        result = self.emit("MatMul", f"{self.emit('Softmax', scores, axis=-1)} {v}")
        shape = pick([[0, 0, HIDDEN], [0, -1, HIDDEN], [BATCH, -1, HIDDEN], [-1, ROWS, HIDDEN], [*SHAPE], [-1, HIDDEN]])
        apart = self.emit("Transpose", result, perm=[0, 2, 1, 3])
        merged = self.linear(self.emit("Reshape", f"{apart} {self.constant('merged', np.array(shape))}"))
        behind = np.array(pick([[0, 0, HIDDEN], [*SHAPE]]) if len(shape) == 3 else SHAPE)
        again = self.emit("Reshape", f"{merged} {self.constant('merged', behind)}")
        return self.emit("Add", f"{x} {again}")

    def proto(self) -> onnx.ModelProto:
        """Returns the model; `no` is stored where a branch asks for it."""
        used = {name for each in self.nodes for name in each.input}
        stored = {name: numbers for name, numbers in self.stored.items() if name in used}
        return model(self.nodes, {"x": (F32, self.sizes)}, {"y": (F32, [None] * 3), **self.outputs}, stored)


def check(seed: int) -> None:
    """Fails if an attention of a random model is not fused, or gives something else where it is."""
    proto = RandomAttention(seed).proto()
    feeds = {"x": np.random.default_rng(seed).standard_normal(SHAPE).astype(F32)}
    unfused, _ = mxfp8_graph.rewrite(proto, EXACT.without_fusion())
    fused, report = mxfp8_graph.rewrite(proto, EXACT)
    assert [each.kind for each in report.fusions].count("attention") == kinds(proto)["Softmax"]
    expected = Session(unfused, kernels=True).run(feeds)
    for kernels in (False, True):
        for name, found in Session(fused, kernels=kernels).run(feeds).items():
            before = expected[name].astype(np.float64)
            assert found.shape == before.shape, f"{name}: shape {found.shape}, not fused {before.shape}"
            off = np.linalg.norm(found - before) / max(np.linalg.norm(before), 1e-30)
            assert off <= MOST_DIFFERENT, f"{name}, kernels {kernels}: off by {off:.3g}, at most {MOST_DIFFERENT:.3g}"


@looped("seed", range(60))
def test_attention_is_the_same_fused_or_not(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@looped("seed", range(60, 200))
def test_more_attentions_are_the_same_fused_or_not(seed: int) -> None:
    check(seed)


FORMS = {
    "gelu": activated(
        *steps("Div h root>d; Erf d>e; Add e one>f; Mul h f>g; Mul g half>y"), root=2**0.5, one=1, half=0.5
    ),
    "silu and gate": graph_model(
        steps("MatMul x w>h; Sigmoid h>s; Mul h s>g; MatMul x up>u; Mul g u>m; MatMul m down>d; Neg d>y"),
        {"w": weight(64, 96), "up": weight(64, 96, seed=1), "down": weight(96, 64, seed=2)},
    ),
}
"""What other fusions take."""


def scattered(random: Random, original: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with some constants as nodes, and some values read or given to the caller once more."""
    proto = onnx.ModelProto()
    proto.CopyFrom(original)
    graph = proto.graph
    tensors = [*graph.initializer]
    known = {each.name: each for each in onnx.shape_inference.infer_shapes(original).graph.value_info}
    for tensor in tensors:
        known[tensor.name] = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    del graph.initializer[:]
    for tensor in tensors:
        if random.random() < 0.5:
            graph.initializer.append(tensor)
        else:
            graph.node.insert(0, node("Constant", "", tensor.name, value=tensor))
    graph.initializer.append(numpy_helper.from_array(np.array(False), "no"))
    for name, info in known.items():
        if (chance := random.random()) < 0.15:
            graph.node.append(reader(random, info))
            graph.output.add().CopyFrom(info)
            graph.output[-1].name = f"{name}_also"
        elif chance < 0.25:
            graph.output.append(info)
    return proto


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("runtime")
def test_other_fusions_are_the_same(form: str) -> None:
    fused_once = 0
    for seed in range(20):
        proto = scattered(Random(seed), FORMS[form])
        fused, plain, report = both_ways(proto)
        check_same(proto, fused, plain, limit=2e-3)  # an element may be rounded to the other side
        fused_once += bool(report.fusions)
    assert fused_once > 0
