"""Random graphs of matmuls, with fixed seeds: whatever they are made of, kernels and function bodies agree on them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from builders import model, node, weight

import mxfp8_graph

SIZES = (32, 48, 64, 70, 96)
"""Values of K and N: whole blocks, and partial last ones."""

GRAPHS, OPS = 40, 12


class RandomGraph:
    """A model grown op by op on a current value of shape [*lead, width]; any value may be used again."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = np.float16 if self.rng.random() < 0.25 else np.float32
        self.lead, self.width = [("b", 3), ("b",), (2, "b", 3)][self.rng.integers(3)], 64
        self.inputs = {"x": (self.dtype, [*self.lead, 64])}
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.values = [("x", 64)]
        for _ in range(OPS):
            getattr(self, str(self.rng.choice(["matmul", "matmul", "gemm", "add", "activate", "reshape", "again"])))()
        self.matmul()  # so that there is one, and it is no output projection
        self.emit("Relu", self.value, self.width)

    @property
    def value(self) -> str:
        return self.values[-1][0]

    def emit(self, op: str, inputs: str, width: int, **attributes: object) -> None:
        self.values.append((f"v{len(self.nodes)}", width))
        self.nodes.append(node(op, inputs, self.value, **attributes))
        self.width = width

    def weight(self, rows: int, columns: int) -> str:
        known = [name for name, w in self.weights.items() if w.shape == (rows, columns)]
        if known and self.rng.random() < 0.3:
            return known[0]
        name = f"w{len(self.weights)}"
        self.weights[name] = weight(rows, columns, seed=len(self.weights), dtype=self.dtype)
        return name

    def matmul(self) -> None:
        n = int(self.rng.choice(SIZES))
        form = self.rng.integers(3)
        extra = f"t{len(self.nodes)}"
        if form == 0:  # a weight behind a Transpose
            self.nodes.append(node("Transpose", self.weight(n, self.width), extra))
            self.emit("MatMul", f"{self.value} {extra}", n)
        elif form == 1 and len(self.lead) > 1:  # on the left: w @ x^T, and back
            swap = [*range(len(self.lead) - 1), len(self.lead), len(self.lead) - 1]
            self.nodes += [
                node("Transpose", self.value, extra, perm=swap),
                node("MatMul", f"{self.weight(n, self.width)} {extra}", f"{extra}w"),
            ]
            self.emit("Transpose", f"{extra}w", n, perm=swap)
        else:
            self.emit("MatMul", f"{self.value} {self.weight(self.width, n)}", n)

    def gemm(self) -> None:
        if len(self.lead) == 1:
            n, trans = int(self.rng.choice(SIZES)), int(self.rng.integers(2))
            w = self.weight(n, self.width) if trans else self.weight(self.width, n)
            bias = f" {self.weight(1, n)}" if self.rng.random() < 0.5 else ""
            scale = {"alpha": float(self.rng.choice([1.0, 0.7])), "beta": float(self.rng.choice([1.0, 2.0]))}
            self.emit("Gemm", f"{self.value} {w}{bias}", n, transB=trans, **scale)

    def add(self) -> None:
        equal = [name for name, width in self.values[:-1] if width == self.width]
        other = self.rng.choice(equal) if equal and self.rng.random() < 0.5 else self.weight(1, self.width)
        self.emit("Add", f"{self.value} {other}" if self.rng.random() < 0.5 else f"{other} {self.value}", self.width)

    def activate(self) -> None:
        self.emit(str(self.rng.choice(["Relu", "Tanh", "Softmax", "Identity"])), self.value, self.width)

    def reshape(self) -> None:
        self.weights["same"] = np.array([0] * len(self.lead) + [-1])
        self.emit("Reshape", f"{self.value} same", self.width)

    def again(self) -> None:
        self.emit("Identity", *self.values[int(self.rng.integers(len(self.values)))])

    def proto(self) -> onnx.ModelProto:
        used = {name for n in self.nodes for name in n.input}
        weights = {name: w for name, w in self.weights.items() if name in used}
        return model(self.nodes, self.inputs, {self.value: (self.dtype, [*self.lead, self.width])}, weights)


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_kernels_and_function_bodies_agree(seed: int) -> None:
    graph = RandomGraph(seed).proto()
    recipe = ("mxfp8", "mxfp8-weight-only", "ocp", "all")[seed % 4]
    rewritten, report = mxfp8_graph.rewrite(graph, recipe)
    assert report.rewritten
    assert all(site.decision.reason for site in report.sites)
    checked = mxfp8_graph.verify(graph, rewritten, seed=seed)
    assert checked.failures == (), graph
    # 12 ops on residual streams: at most 4% per matmul, and softmaxes of nothing much have small results.
    assert checked.worst_relative_l2 < 0.3
