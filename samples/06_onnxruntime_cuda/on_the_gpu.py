"""Runs a rewritten model again and again on its own output, in the memory of the GPU if there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime import OrtValue

import mxfp8_graph
from mxfp8_ops import ort
from mxfp8_ops.errors import BackendError

HIDDEN, LAYERS, BATCH, RUNS = 256, 4, 8, 10


def make(path: Path) -> None:
    """Writes y = x + layers(x), a stack of linears, so that an output can be the next input."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for i in range(LAYERS):
        weight = (rng.standard_normal((HIDDEN, HIDDEN)) / HIDDEN**0.5).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"h{i}"]))
        nodes.append(helper.make_node("Tanh", [f"h{i}"], [f"a{i}"]))
        last = f"a{i}"
    nodes.append(helper.make_node("Add", ["x", last], ["y"]))
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", HIDDEN]) for name in "xy")
    graph = helper.make_graph(nodes, "stack", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
make(folder / "stack.onnx")
model, report = mxfp8_graph.rewrite(folder / "stack.onnx", output=folder / "stack.mxfp8.onnx", overwrite=True)
print(f"{model}: {len(report.rewritten)} linears")

try:
    session, memory = ort.session(model, device="cuda"), "cuda"
except BackendError as error:
    print(f"no GPU is used: {error}")
    session, memory = ort.session(model), "cpu"
print(f"{session.get_providers()[0]}, values in {memory} memory")

start = np.random.default_rng(1).standard_normal((BATCH, HIDDEN), np.float32)
x = OrtValue.ortvalue_from_numpy(start.copy(), memory, 0)  # on the CPU this is the array itself, overwritten below
y = OrtValue.ortvalue_from_shape_and_type(start.shape, np.float32, memory, 0)
for _ in range(RUNS):
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    session.run_with_iobinding(binding)
    x, y = y, x  # the output becomes the input: no value leaves its memory

expected, on_the_processor = start, ort.session(model)
for _ in range(RUNS):
    expected = on_the_processor.run(["y"], {"x": expected})[0]
error = np.linalg.norm(x.numpy() - expected) / np.linalg.norm(expected)
print(f"{RUNS} runs; relative L2 difference to plain runs on the processor: {error:.1e}")
