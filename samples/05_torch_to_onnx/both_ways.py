"""Two ways from a module to an MXFP8 ONNX file give the same nodes and the same bytes.

module -> ExportedProgram -> rewrite -> to_onnx
module -> ExportedProgram -> torch.onnx.export -> rewrite
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import mxfp8_graph
from mxfp8_ops import ort

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)

torch.manual_seed(0)
block = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
model = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
x = torch.randn(4, 16, 128)
names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "dynamic_shapes": ({0: "batch"},)}

with torch.no_grad():
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
rewritten, report = mxfp8_graph.rewrite(program)
first = mxfp8_graph.to_onnx(rewritten, folder / "first.onnx", overwrite=True, **names)
print(f"{first}: {len(report.rewritten)} linears, {first.stat().st_size / 1e6:.2f} MB")

torch.onnx.export(program, f=folder / "plain.onnx", dynamo=True, verbose=False, **names)
second, _ = mxfp8_graph.rewrite(folder / "plain.onnx", output=folder / "second.onnx", overwrite=True)

ours, theirs = mxfp8_graph.unpack(first), mxfp8_graph.unpack(second)
for a, b in zip(ours.values(), theirs.values(), strict=True):
    same = np.array_equal(a.elements, b.elements) and np.array_equal(a.scales, b.scales)
    print(f"  {a.parameter:40} {'same bytes' if same else 'DIFFERENT BYTES'}")

feeds = {"x": x.numpy()}
with torch.no_grad():
    expected = rewritten.module()(x).numpy()
for name, session in (
    ("stock ONNX Runtime", onnxruntime.InferenceSession(first)),
    ("with our kernels", ort.session(first)),
):
    error = np.linalg.norm(session.run(["y"], feeds)[0] - expected) / np.linalg.norm(expected)
    print(f"{name:20} relative L2 difference to the exported program: {error:.1e}")
