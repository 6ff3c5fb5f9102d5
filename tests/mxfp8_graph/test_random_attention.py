"""Random attentions: wherever their constants are stored and whatever else reads those, fusing changes no result.

A shape, a scale, a mask is an initializer or a Constant node, of one attention or of all; a node beside or behind the
attention, a branch, or a caller of the model reads it too.
"""

from __future__ import annotations

from random import Random

import numpy as np
import onnx
from attention_models import BATCH, HEADS, HIDDEN, ROWS, SIZE
from builders import model, node, value, weight
from grids import looped
from onnx import helper, numpy_helper
from oracle import kinds

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.checking.sessions import Session

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
        also, dtype, shape = f"{name}_also", numbers.dtype.type, [*numbers.shape]
        self.outputs[also] = (dtype, shape)
        if self.random.random() < 0.5:
            self.nodes.append(node("Identity", name, also))
        else:
            branches = {
                f"{op}_branch": helper.make_graph(
                    [node("Identity", name, f"{name}_{op}")], op, [], [value(f"{name}_{op}", dtype, shape)]
                )
                for op in ("then", "else")
            }
            self.nodes.append(node("If", "no", also, **branches))

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


@looped("seed", range(200))
def test_fused_or_not_it_is_the_same(seed: int) -> None:
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
