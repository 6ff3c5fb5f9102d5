"""Edits a model with onnx-graphsurgeon before and after the rewrite: `rewrite` takes and returns a gs.Graph."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs

import mxfp8_graph
from mxfp8_ops import ort

SIZE, LAYERS, CLASSES = 256, 3, 10


def network() -> gs.Graph:
    """Returns a small network with a debugging output, as an exporter could leave it."""
    rng = np.random.default_rng(0)
    x = gs.Variable("x", np.float32, ["batch", SIZE])
    graph = gs.Graph(inputs=[x], opset=21, ir_version=10)
    for layer in range(LAYERS):
        last = layer == LAYERS - 1
        width = CLASSES if last else SIZE
        weight = gs.Constant(f"layers.{layer}.weight", rng.normal(0, SIZE**-0.5, (SIZE, width)).astype(np.float32))
        hidden = gs.Variable(f"layers.{layer}.sum", np.float32, ["batch", width])
        graph.nodes.append(gs.Node("MatMul", f"layers.{layer}", inputs=[x, weight], outputs=[hidden]))
        x = hidden
        if not last:
            x = gs.Variable(f"layers.{layer}.relu", np.float32, ["batch", width])
            graph.nodes.append(gs.Node("Relu", f"relu.{layer}", inputs=[hidden], outputs=[x]))
    graph.outputs = [x, graph.nodes[0].outputs[0]]
    return graph


def main(folder: Path) -> None:
    """Writes folder/edited.onnx and runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = network()

    # Before: drop the debugging output. An output would keep the first matmul from being fused with its Relu.
    del graph.outputs[1]
    rewritten, report = mxfp8_graph.rewrite(graph)
    for site in report.sites:
        print(f"{site.decision.site.name}: {'MXFP8' if site.decision.quantize else site.decision.reason}")

    # After: add probabilities behind the logits. The nodes and bytes of the rewrite stay.
    logits = rewritten.outputs[0]
    probabilities = gs.Variable("probabilities", np.float32, ["batch", CLASSES])
    rewritten.nodes.append(gs.Node("Softmax", "softmax", {"axis": -1}, [logits], [probabilities]))
    rewritten.outputs = [probabilities]

    # gs.export_onnx drops the metadata of a model. The record of the rewrite is in it, so put it back.
    proto = gs.export_onnx(rewritten)
    onnx.helper.set_model_props(proto, rewritten.metadata_props)
    path = folder / "edited.onnx"
    onnx.save(proto, path)
    values = np.random.default_rng(1).standard_normal((4, SIZE), np.float32)
    with_kernels = ort.session(str(path)).run(None, {"x": values})[0]
    print("sums of the probabilities:", with_kernels.sum(axis=1).round(5).tolist())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
