"""Writes one transformer block with a classifier, random weights, as ONNX."""

from __future__ import annotations

import sys

import numpy as np
import onnx
from onnx import helper, numpy_helper

HIDDEN, HEADS, CLASSES = 128, 4, 10


def main(path: str) -> None:
    """Writes the model to `path`."""
    rng = np.random.default_rng(0)
    weights = {
        "split": np.array([0, 0, HEADS, HIDDEN // HEADS]),
        "merge": np.array([0, 0, HIDDEN]),
        "root": np.array((HIDDEN // HEADS) ** 0.5, np.float32),
    }
    nodes: list[onnx.NodeProto] = []

    def add(op: str, inputs: str, output: str, name: str = "", **attributes: object) -> None:
        nodes.append(helper.make_node(op, inputs.split(), [output], name=name or output, **attributes))

    def linear(x: str, output: str, name: str, k: int, n: int) -> None:
        weights[f"{name}.weight"] = (rng.standard_normal((k, n)) / k**0.5).astype(np.float32)
        add("MatMul", f"{x} {name}.weight", output, name)

    for letter in "qkv":
        linear("x", f"{letter}0", f"attention/{letter}", HIDDEN, HIDDEN)
        add("Reshape", f"{letter}0 split", f"{letter}1")
        add("Transpose", f"{letter}1", letter, perm=[0, 2, 3, 1] if letter == "k" else [0, 2, 1, 3])
    add("MatMul", "q k", "s0", "attention/scores")
    add("Div", "s0 root", "s1")
    add("Softmax", "s1", "p", axis=-1)
    add("MatMul", "p v", "a0", "attention/values")
    add("Transpose", "a0", "a1", perm=[0, 2, 1, 3])
    add("Reshape", "a1 merge", "a2")
    linear("a2", "a3", "attention/output", HIDDEN, HIDDEN)
    add("Add", "x a3", "h")
    linear("h", "u0", "ffn/up", HIDDEN, 4 * HIDDEN)
    add("Relu", "u0", "u1")
    linear("u1", "u2", "ffn/down", 4 * HIDDEN, HIDDEN)
    add("Add", "h u2", "e")
    linear("e", "logits", "classifier", HIDDEN, CLASSES)

    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", "sequence", HIDDEN])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", "sequence", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


if __name__ == "__main__":
    main(sys.argv[1])
